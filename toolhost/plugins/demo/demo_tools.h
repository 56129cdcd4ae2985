// The demo tools that have a file of their own.
#pragma once

#include "input.h"

namespace demo {

machina::ToolResult state(const support::Input& input, machina::DSState& state);
machina::ToolResult word_count(const support::Input& input, machina::DSState& state);
machina::ToolResult file_write(const support::Input& input, machina::DSState& state);

}  // namespace demo
