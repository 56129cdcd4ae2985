// Calls a tool's function; whatever it throws becomes its result.
#include "run_tool.h"

#include <exception>

namespace toolhost {

machina::ToolResult run_tool(const Tool& tool, const std::string& input_json, machina::DSState& state) {
    try {
        return tool.fn(input_json, state);
    } catch (const std::exception& e) {
        return {machina::StepStatus::TOOL_ERROR, "{}", e.what()};
    } catch (...) {
        return {machina::StepStatus::TOOL_ERROR, "{}", "the tool threw something that is no std::exception"};
    }
}

}  // namespace toolhost
