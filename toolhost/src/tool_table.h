// ToolTable: the tools that a plugin registered, found by AID.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "machina/plugin_api.h"

namespace toolhost {

struct Tool {
    machina::ToolDesc desc;
    machina::ToolFnPtr fn = nullptr;
    int tier = 0;       // what a lease must allow to run it
    bool pure = false;  // deterministic, side effects exactly ["none"]: its reply may be held for a batch

    // How long a line for this tool usually takes. Rises at once and falls slowly: better an early write too many than
    // a finished reply that waits behind a slow call.
    std::int64_t usual_ns = std::numeric_limits<std::int64_t>::max();
    void took(std::int64_t ns) { usual_ns = ns > usual_ns || never_ran() ? ns : usual_ns - (usual_ns - ns) / 8; }

private:
    bool never_ran() const { return usual_ns == std::numeric_limits<std::int64_t>::max(); }
};

// AID.<PART>(.<PART>)*.v<N>
bool is_aid(std::string_view text);

// 0 safe, 1 writes, 2 shell, network or process, 3 loads code.
int tier_of(const machina::ToolDesc& desc);

class ToolTable final : public machina::IToolRegistrar {
public:
    // Throws std::runtime_error for a tool without a function or AID, or whose AID is taken or reserved.
    void register_tool(const machina::ToolDesc& desc, machina::ToolFnPtr fn) override;

    // nullptr if there is none.
    Tool* find(std::string_view aid);

    std::vector<const Tool*> sorted_by_aid() const;

private:
    std::vector<std::unique_ptr<Tool>> tools_;
    std::unordered_map<std::string_view, Tool*> by_aid_;  // keys are the tools' own strings
    Tool* last_ = nullptr;
};

}  // namespace toolhost
