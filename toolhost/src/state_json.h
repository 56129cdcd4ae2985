// DSState on the wire: what a caller sends is applied, what a tool changed is sent back.
#pragma once

#include <yyjson.h>

#include "machina/state.h"
#include "text.h"

namespace toolhost {

// A whole state replaces what is there; with "delta":true its slots are set and its removed_slots erased. What is not
// an object changes nothing, and keys that are no slot (0 to 255, decimal) are passed over.
void apply_state(machina::DSState& state, yyjson_val* ds_state);

// {"slots":{…}}
void append_state(Text& out, const machina::DSState& state);

// {"delta":true,"slots":{changed},"removed_slots":[…]}, by slot number.
void append_delta(Text& out, const machina::DSState& before, const machina::DSState& after);

}  // namespace toolhost
