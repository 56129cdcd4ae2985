// DSState: the numbered slots of artifacts that a tool reads and changes on behalf of its caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

namespace machina {

// The slots of Profile A. A DSState takes any key from 0 to 255.
enum class DSSlot : std::uint8_t { DS0, DS1, DS2, DS3, DS4, DS5, DS6, DS7 };

// The order of the members is binary interface: see plugin_api.h.
struct Artifact {
    std::string type;
    std::string content_json;
    std::string provenance;
    std::size_t size_bytes = 0;
};

struct DSState {
    std::unordered_map<std::uint8_t, Artifact> slots;
};

}  // namespace machina
