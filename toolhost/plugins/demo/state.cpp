// AID.DEMO.STATE.v1: puts, gets and deletes one JSON value in the caller's DSState.
#include "demo_tools.h"

namespace demo {

using machina::ToolResult;
using support::done;
using support::failed;

ToolResult state(const support::Input& input, machina::DSState& state) {
    const std::string_view op = input.text("op");
    const auto slot = static_cast<std::uint8_t>(input.number("slot", 0, 255));
    const std::string head = "{\"slot\":" + std::to_string(slot);

    if (op == "put") {
        std::string value = input.json("value");
        const std::size_t size = value.size();
        state.slots[slot] = {"json", std::move(value), "demo", size};
        return done(head + ",\"stored\":true}");
    }
    if (op == "get") {
        const auto found = state.slots.find(slot);
        if (found == state.slots.end()) return done(head + ",\"found\":false,\"value\":null}");
        const std::string& value = found->second.content_json;
        if (!support::is_json(value)) return failed("slot " + std::to_string(slot) + " does not hold JSON");
        return done(head + ",\"found\":true,\"value\":" + value + "}");
    }
    if (op == "del") return done(head + (state.slots.erase(slot) > 0 ? ",\"removed\":true}" : ",\"removed\":false}"));
    throw support::BadInput("\"op\" must be \"put\", \"get\" or \"del\"");
}

}  // namespace demo
