// Session: one call from request to reply, without any I/O.
#include "session.h"

#include <new>

#include "clock.h"
#include "environment.h"
#include "json_text.h"
#include "large_pages.h"
#include "reply.h"
#include "run_tool.h"
#include "state_json.h"

namespace toolhost {

using machina::StepStatus;
using machina::ToolResult;

Session::Session()
    : cache_(env_number("MACHINA_IDEMP_TTL_MS", kIdempotencyTtlMs)),
      enforce_leases_(env_flag("MACHINA_LEASE_ENFORCE")) {}

void Session::apply(yyjson_val* ds_state) {
    try {
        apply_state(state_, ds_state);
    } catch (const std::bad_alloc&) {
        state_.slots.clear();  // rather no state than half of one
        throw;
    }
}

void Session::call(const Tool& tool, const Request& request, Text& reply) {
    if (!request.idempotency_key.empty()) {
        if (const ToolResult* stored = cache_.find(tool, request.idempotency_key, now_ms())) {
            append_hit(reply, *stored);
            return;
        }
    }
    if (enforce_leases_ && tool.tier > 0 && !lease_allows(tool, request.lease_token, reply)) return;
    run(tool, request, reply);
}

void Session::run(const Tool& tool, const Request& request, Text& reply) {
    if (!before_.slots.empty()) before_.slots.clear();
    if (!state_.slots.empty()) before_ = state_;
    if (input_.capacity() < request.input_json.size()) {
        input_.reserve(request.input_json.size());
        in_large_pages(input_.data(), input_.capacity());
    }
    input_.assign(request.input_json);

    ToolResult result = run_tool(tool, input_, state_);
    try {
        append_result(reply, result);
        append_delta(reply, before_, state_);
        reply.append("}");
    } catch (const std::bad_alloc&) {
        // The caller will never learn what the tool changed, so the change must not stay either.
        state_.slots.swap(before_.slots);
        result = {StepStatus::TOOL_ERROR, "{}", "out of memory while writing the reply"};
        reply.release();
        append_result(reply, result);
        append_delta(reply, {}, {});
        reply.append("}");
    }

    if (!request.idempotency_key.empty()) {
        try {
            cache_.store(tool, request.idempotency_key, result, now_ms());
        } catch (const std::bad_alloc&) {
            // No room to remember it ends the promise, as an eviction does.
        }
    }
    if (input_.capacity() > kKeepBytes) input_ = std::string();
}

bool Session::lease_allows(const Tool& tool, std::string_view token, Text& reply) {
    if (token.empty()) {
        reply.append("{\"ok\":false,\"error\":\"lease_required\",\"tier\":");
        reply.append_number(static_cast<std::size_t>(tool.tier));
        reply.append(",\"aid\":");
        append_json_string(reply, tool.desc.aid);
        reply.append("}");
        return false;
    }
    const std::string reason = leases_.spend(token, tool, now_ms());
    if (reason.empty()) return true;
    reply.append("{\"ok\":false,\"error\":\"lease_rejected\",\"reason\":");
    append_json_string(reply, reason);
    reply.append("}");
    return false;
}

bool Session::command(const Request& request, ToolTable& tools, Text& reply) {
    if (request.aid == "_lease.issue") issue_lease(request, tools, reply);
    else if (request.aid == "_lease.gc") collect_leases(reply);
    else return false;
    return true;
}

void Session::issue_lease(const Request& request, ToolTable& tools, Text& reply) {
    if (request.tool_aid.empty()) return append_error(reply, "missing tool_aid");
    const Tool* tool = tools.find(request.tool_aid);
    int tier = tool == nullptr ? 0 : tool->tier;
    if (request.tier != nullptr) {
        if (!yyjson_is_uint(request.tier) || yyjson_get_uint(request.tier) > 3) {
            return append_error(reply, "tier must be 0, 1, 2 or 3");
        }
        tier = static_cast<int>(yyjson_get_uint(request.tier));
    }
    const std::int64_t ttl_ms = yyjson_is_int(request.ttl_ms) ? yyjson_get_sint(request.ttl_ms) : kLeaseDefaultMs;
    const auto token = leases_.issue(request.tool_aid, tier, ttl_ms, now_ms());
    if (!token) return append_error(reply, "too many leases: " + std::to_string(kLeaseEntries) + " are active");

    reply.append("{\"ok\":true,\"token_id\":");
    append_json_string(reply, *token);
    reply.append(",\"tool_aid\":");
    append_json_string(reply, request.tool_aid);
    reply.append(",\"tier\":");
    reply.append_number(static_cast<std::size_t>(tier));
    reply.append("}");
}

void Session::collect_leases(Text& reply) {
    const LeaseTable::Counts counts = leases_.collect(now_ms());
    const auto member = [&](std::string_view name, std::size_t value) {
        reply.append(name);
        reply.append_number(value);
    };
    member("{\"ok\":true,\"active\":", counts.active);
    member(",\"issued\":", counts.issued);
    member(",\"consumed\":", counts.consumed);
    member(",\"rejected\":", counts.rejected);
    reply.append("}");
}

}  // namespace toolhost
