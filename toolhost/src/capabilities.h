// Capability masks as the operator writes them and as messages show them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace toolhost {

// "file_read,network", "0x3", "3", "all" or "none". Throws PluginRefused for anything else.
std::uint32_t parse_capabilities(std::string_view text);

// "shell, network"
std::string capability_names(std::uint32_t mask);

// "0x0000000c"
std::string capability_hex(std::uint32_t mask);

}  // namespace toolhost
