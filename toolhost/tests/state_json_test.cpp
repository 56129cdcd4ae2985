// DSState on the wire: what is applied, what is passed over, what a delta says.
#include "check.h"
#include "state_json.h"

#include <string>

namespace {

using machina::DSState;

void apply(DSState& state, const std::string& json) {
    yyjson_doc* doc = yyjson_read(json.data(), json.size(), 0);
    CHECK(doc != nullptr);
    toolhost::apply_state(state, yyjson_doc_get_root(doc));
    yyjson_doc_free(doc);
}

DSState of(const std::string& json) {
    DSState state;
    apply(state, json);
    return state;
}

std::string whole(const DSState& state) {
    toolhost::Text out;
    toolhost::append_state(out, state);
    return std::string(out.view());
}

std::string delta(const DSState& before, const DSState& after) {
    toolhost::Text out;
    toolhost::append_delta(out, before, after);
    return std::string(out.view());
}

const std::string kSix =
    R"({"slots":{"6":{"type":"t","provenance":"p","content_json":"{}","size_bytes":2}}})";

}  // namespace

TEST("a whole state replaces, a delta builds") {
    DSState state = of(kSix);
    CHECK(whole(state) == kSix);
    apply(state, R"({"delta":true,"slots":{"7":{}},"removed_slots":[6,9]})");
    CHECK(whole(state) == R"({"slots":{"7":{"type":"","provenance":"","content_json":"","size_bytes":0}}})");
    apply(state, R"({"removed_slots":[7]})");
    CHECK(state.slots.empty());
    CHECK(whole(state) == R"({"slots":{}})");
}

TEST("what is no slot and no state is passed over") {
    DSState state;
    apply(state, R"({"slots":{"-1":{},"256":{},"06":{},"x":{},"":{}," 1":{},"1 ":{},"0x1":{},"3":7}})");
    CHECK(state.slots.empty());
    apply(state, kSix);
    apply(state, R"({"delta":true,"slots":[],"removed_slots":["6",-6,256,6.0,null]})");
    for (const char* no_state : {"null", "7", "[]", "\"x\""}) apply(state, no_state);
    CHECK(whole(state) == kSix);
    apply(state, R"({"slots":{"0":{},"255":{}}})");
    CHECK(state.slots.size() == 2);
}

TEST("a delta names what changed, in the order of the slots") {
    CHECK(delta({}, {}) == R"({"delta":true,"slots":{},"removed_slots":[]})");
    CHECK(delta(of(kSix), of(kSix)) == R"({"delta":true,"slots":{},"removed_slots":[]})");
    CHECK(delta(of(R"({"slots":{"200":{},"9":{},"10":{}}})"), {}) ==
          R"({"delta":true,"slots":{},"removed_slots":[9,10,200]})");
    for (const char* changed : {R"({"type":"x","provenance":"p","content_json":"{}","size_bytes":2})",
                                R"({"type":"t","provenance":"x","content_json":"{}","size_bytes":2})",
                                R"({"type":"t","provenance":"p","content_json":"x","size_bytes":2})",
                                R"({"type":"t","provenance":"p","content_json":"{}","size_bytes":3})"}) {
        const std::string slots = std::string(R"({"6":)") + changed + "}";
        CHECK(delta(of(kSix), of(R"({"slots":)" + slots + "}")) ==
              R"({"delta":true,"slots":)" + slots + R"(,"removed_slots":[]})");
    }
}
