// The replies of the protocol, one function each, without the line end.
#pragma once

#include <string_view>

#include "machina/tools.h"
#include "request.h"
#include "text.h"

namespace toolhost {

std::string_view status_name(machina::StepStatus status);

// {"ok":…,"status":…,"output_json":…,"error":…,"ds_state": — and then the caller appends the state and "}".
void append_result(Text& out, const machina::ToolResult& result);

// The same with "idempotent_hit":true and an empty state, complete.
void append_hit(Text& out, const machina::ToolResult& stored);

// {"ok":false,"error":…}, with "detail" if there is one.
void append_error(Text& out, std::string_view error, std::string_view detail = {});

}  // namespace toolhost
