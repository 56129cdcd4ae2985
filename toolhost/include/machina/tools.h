// What a tool is: a function from input JSON and the caller's state to a result.
#pragma once

#include <functional>
#include <string>

#include "machina/state.h"

namespace machina {

enum class StepStatus { OK, INVALID_PICK, TOOL_ERROR, BREAKER_TRIP };

// The order of the members is binary interface: see plugin_api.h.
struct ToolResult {
    StepStatus status = StepStatus::OK;
    std::string output_json;
    std::string error;
};

using ToolFn = std::function<ToolResult(const std::string& input_json, DSState& state)>;

}  // namespace machina
