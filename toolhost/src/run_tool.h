// Calls a tool's function; whatever it throws becomes its result.
#pragma once

#include <string>

#include "tool_table.h"

namespace toolhost {

machina::ToolResult run_tool(const Tool& tool, const std::string& input_json, machina::DSState& state);

}  // namespace toolhost
