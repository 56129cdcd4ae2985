// DSState on the wire.
#include "state_json.h"

#include <charconv>
#include <optional>
#include <string>
#include <string_view>

#include "json_text.h"

namespace toolhost {
namespace {

using machina::Artifact;
using machina::DSState;

constexpr unsigned kSlots = 256;

std::optional<std::uint8_t> slot_of(std::string_view key) {
    unsigned number = 0;
    const char* const end = key.data() + key.size();
    const auto [stopped, error] = std::from_chars(key.data(), end, number);
    const bool canonical = key == "0" || (!key.empty() && key[0] != '0');
    if (error != std::errc() || stopped != end || number >= kSlots || !canonical) return std::nullopt;
    return static_cast<std::uint8_t>(number);
}

std::string string_member(yyjson_val* object, const char* name) {
    yyjson_val* value = yyjson_obj_get(object, name);
    return yyjson_is_str(value) ? std::string(yyjson_get_str(value), yyjson_get_len(value)) : std::string();
}

Artifact artifact_of(yyjson_val* object) {
    yyjson_val* size = yyjson_obj_get(object, "size_bytes");
    return {string_member(object, "type"), string_member(object, "content_json"), string_member(object, "provenance"),
            yyjson_is_uint(size) ? static_cast<std::size_t>(yyjson_get_uint(size)) : 0};
}

void set_slots(DSState& state, yyjson_val* slots) {
    if (!yyjson_is_obj(slots)) return;
    yyjson_val *key, *value;
    std::size_t i, n;
    yyjson_obj_foreach(slots, i, n, key, value) {
        const auto slot = slot_of({yyjson_get_str(key), yyjson_get_len(key)});
        if (slot && yyjson_is_obj(value)) state.slots[*slot] = artifact_of(value);
    }
}

void erase_slots(DSState& state, yyjson_val* removed) {
    if (!yyjson_is_arr(removed)) return;
    yyjson_val* slot;
    std::size_t i, n;
    yyjson_arr_foreach(removed, i, n, slot) {
        if (yyjson_is_uint(slot) && yyjson_get_uint(slot) < kSlots) {
            state.slots.erase(static_cast<std::uint8_t>(yyjson_get_uint(slot)));
        }
    }
}

bool same(const Artifact& a, const Artifact& b) {
    return a.size_bytes == b.size_bytes && a.type == b.type && a.provenance == b.provenance &&
           a.content_json == b.content_json;
}

const Artifact* find(const DSState& state, unsigned slot) {
    const auto found = state.slots.find(static_cast<std::uint8_t>(slot));
    return found == state.slots.end() ? nullptr : &found->second;
}

// "6":{"type":…,"provenance":…,"content_json":…,"size_bytes":…}
void append_slot(Text& out, bool first, unsigned slot, const Artifact& artifact) {
    out.append(first ? "\"" : ",\"");
    out.append_number(slot);
    out.append("\":{\"type\":");
    append_json_string(out, artifact.type);
    out.append(",\"provenance\":");
    append_json_string(out, artifact.provenance);
    out.append(",\"content_json\":");
    append_json_string(out, artifact.content_json);
    out.append(",\"size_bytes\":");
    out.append_number(artifact.size_bytes);
    out.append("}");
}

}  // namespace

void apply_state(DSState& state, yyjson_val* ds_state) {
    if (!yyjson_is_obj(ds_state)) return;
    yyjson_val* slots = yyjson_obj_get(ds_state, "slots");
    if (state.slots.empty() && yyjson_obj_size(slots) == 0) return;  // most calls: nothing to replace, set or erase
    const bool delta = yyjson_is_true(yyjson_obj_get(ds_state, "delta"));
    if (!delta) state.slots.clear();
    set_slots(state, slots);
    if (delta) erase_slots(state, yyjson_obj_get(ds_state, "removed_slots"));
}

void append_state(Text& out, const DSState& state) {
    out.append("{\"slots\":{");
    bool first = true;
    for (unsigned slot = 0; slot < kSlots; ++slot) {
        const Artifact* artifact = find(state, slot);
        if (artifact == nullptr) continue;
        append_slot(out, first, slot, *artifact);
        first = false;
    }
    out.append("}}");
}

void append_delta(Text& out, const DSState& before, const DSState& after) {
    if (before.slots.empty() && after.slots.empty()) {  // most calls
        out.append("{\"delta\":true,\"slots\":{},\"removed_slots\":[]}");
        return;
    }
    out.append("{\"delta\":true,\"slots\":{");
    bool first = true;
    for (unsigned slot = 0; slot < kSlots; ++slot) {
        const Artifact* now = find(after, slot);
        const Artifact* then = find(before, slot);
        if (now == nullptr || (then != nullptr && same(*now, *then))) continue;
        append_slot(out, first, slot, *now);
        first = false;
    }
    out.append("},\"removed_slots\":[");
    first = true;
    for (unsigned slot = 0; slot < kSlots; ++slot) {
        if (find(before, slot) == nullptr || find(after, slot) != nullptr) continue;
        if (!first) out.append(",");
        out.append_number(slot);
        first = false;
    }
    out.append("]}");
}

}  // namespace toolhost
