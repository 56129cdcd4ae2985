// How a tool describes itself to whoever chooses, gates and replays it.
#pragma once

#include <string>
#include <vector>

namespace machina {

// The order of the members is binary interface: see plugin_api.h.
struct ToolDesc {
    std::string aid;  // AID.<PART>(.<PART>)*.v<N>
    std::string name;
    bool deterministic = true;
    std::vector<std::string> tags;
    std::vector<std::string> side_effects;  // {"none"} for a tool that has none; "file_write" and such raise its tier
    std::vector<std::string> replay_inputs;
};

}  // namespace machina
