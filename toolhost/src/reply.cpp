// The replies of the protocol.
#include "reply.h"

#include "json_text.h"

namespace toolhost {
namespace {

// {"ok":…,"status":…,"output_json":…,"error":…
void append_common(Text& out, const machina::ToolResult& result) {
    if (result.status == machina::StepStatus::OK) {
        out.append("{\"ok\":true,\"status\":\"OK\",\"output_json\":");
    } else {
        out.append("{\"ok\":false,\"status\":\"");
        out.append(status_name(result.status));
        out.append("\",\"output_json\":");
    }
    append_json_string(out, result.output_json);
    out.append(",\"error\":");
    append_json_string(out, result.error);
}

}  // namespace

std::string_view status_name(machina::StepStatus status) {
    switch (status) {
        case machina::StepStatus::OK: return "OK";
        case machina::StepStatus::INVALID_PICK: return "INVALID_PICK";
        case machina::StepStatus::BREAKER_TRIP: return "BREAKER_TRIP";
        case machina::StepStatus::TOOL_ERROR: break;
    }
    return "TOOL_ERROR";  // also for a number that a plugin made up
}

void append_result(Text& out, const machina::ToolResult& result) {
    append_common(out, result);
    out.append(",\"ds_state\":");
}

void append_hit(Text& out, const machina::ToolResult& stored) {
    append_common(out, stored);
    out.append(",\"idempotent_hit\":true,\"ds_state\":{}}");
}

void append_error(Text& out, std::string_view error, std::string_view detail) {
    out.append("{\"ok\":false,\"error\":");
    append_json_string(out, error);
    if (!detail.empty()) {
        out.append(",\"detail\":");
        append_json_string(out, detail);
    }
    out.append("}");
}

}  // namespace toolhost
