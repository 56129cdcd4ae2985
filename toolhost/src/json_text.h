// Writes JSON strings. Whatever bytes go in, valid JSON in valid UTF-8 comes out.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text.h"

namespace toolhost {

// Quoted and escaped. Bytes that are not UTF-8 become U+FFFD, one for each maximal invalid part, as browsers and
// Python's errors="replace" do it.
void append_nonempty_json_string(Text& out, std::string_view s);
inline void append_json_string(Text& out, std::string_view s) {
    if (s.empty()) out.append("\"\"");  // the error of every call that went well
    else append_nonempty_json_string(out, s);
}

// ["a","b"]
void append_json_strings(Text& out, const std::vector<std::string>& strings);

}  // namespace toolhost
