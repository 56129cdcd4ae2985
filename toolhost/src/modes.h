// The three modes, once the plugin is loaded. Each returns the process's exit code.
#pragma once

#include <string>

#include "held_replies.h"
#include "io.h"
#include "tool_table.h"

namespace toolhost {

constexpr int kExitOk = 0;
constexpr int kExitUsage = 2;
constexpr int kExitPlugin = 3;
constexpr int kExitNoTool = 4;
constexpr int kExitNotJson = 5;

int list_tools(const Protocol& protocol, const ToolTable& tools);
int run_once(const Protocol& protocol, ToolTable& tools, const std::string& aid);
int serve(const Protocol& protocol, ToolTable& tools, HeldReplies& replies);

}  // namespace toolhost
