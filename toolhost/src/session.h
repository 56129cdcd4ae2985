// Session: what a serving toolhost remembers from one line to the next, and how a call passes through it.
#pragma once

#include <string>

#include "idempotency.h"
#include "leases.h"
#include "machina/state.h"
#include "request.h"
#include "text.h"
#include "tool_table.h"

namespace toolhost {

// Every function appends one whole reply, without the line end. One that throws std::bad_alloc has run no tool.
class Session {
public:
    Session();  // settings from the environment

    // What the caller says about the state holds whether or not its call is then refused: the caller goes on from it.
    void apply(yyjson_val* ds_state);

    // Cache, lease, tool, in this order: a retry cannot present a spent lease again.
    void call(const Tool& tool, const Request& request, Text& reply);

    // _lease.issue and _lease.gc; false, with nothing appended, for any other AID.
    bool command(const Request& request, ToolTable& tools, Text& reply);

private:
    bool lease_allows(const Tool& tool, std::string_view token, Text& reply);
    void run(const Tool& tool, const Request& request, Text& reply);
    void issue_lease(const Request& request, ToolTable& tools, Text& reply);
    void collect_leases(Text& reply);

    machina::DSState state_;
    machina::DSState before_;  // the state as the last tool got it
    IdempotencyCache cache_;
    LeaseTable leases_;
    const bool enforce_leases_;
    std::string input_;  // kept for its memory
};

}  // namespace toolhost
