// JSON strings: escapes, UTF-8 and what is not, and every boundary between the fast and the slow way.
#include "check.h"
#include "json_text.h"

#include <yyjson.h>

namespace {

std::string json(std::string_view s) {
    toolhost::Text out;
    toolhost::append_json_string(out, s);
    return std::string(out.view());
}

// What a JSON parser reads back.
std::string round_trip(std::string_view s) {
    const std::string text = json(s);
    yyjson_doc* doc = yyjson_read(text.data(), text.size(), 0);
    CHECK(doc != nullptr);
    yyjson_val* root = yyjson_doc_get_root(doc);
    std::string back(yyjson_get_len(root) ? yyjson_get_str(root) : "", yyjson_get_len(root));
    yyjson_doc_free(doc);
    return back;
}

const std::string kReplacement = "\xEF\xBF\xBD";

}  // namespace

TEST("a JSON string escapes what must be escaped and nothing else") {
    CHECK(json("") == R"("")");
    CHECK(json("plain /text/ \x7f") == "\"plain /text/ \x7f\"");
    CHECK(json("\"\\\b\f\n\r\t") == R"("\"\\\b\f\n\r\t")");
    CHECK(json(std::string_view("\0\x1f", 2)) == R"("\u0000\u001f")");
    CHECK(json("käse 猫 🐈") == "\"käse 猫 🐈\"");
}

TEST("every byte survives at every offset of a group of eight") {
    for (int byte = 1; byte < 0x80; ++byte) {
        for (std::size_t before = 0; before < 18; ++before) {
            const std::string s = std::string(before, 'a') + static_cast<char>(byte) + "tail of text";
            CHECK(round_trip(s) == s);
        }
    }
}

TEST("characters survive across the edge of a block") {
    for (std::size_t before = 4080; before < 4100; ++before) {
        const std::string s = std::string(before, 'a') + "🐈\"é" + std::string(5000, 'b');
        CHECK(round_trip(s) == s);
    }
}

TEST("bytes that are not UTF-8 become one replacement for each maximal part") {
    const std::string r = kReplacement;
    CHECK(round_trip("a\xffz") == "a" + r + "z");
    CHECK(round_trip("\x80\x80") == r + r);
    CHECK(round_trip("\xC0\xAF") == r + r);                  // overlong
    CHECK(round_trip("\xED\xA0\x80") == r + r + r);          // a surrogate
    CHECK(round_trip("\xF4\x90\x80\x80") == r + r + r + r);  // beyond U+10FFFF
    CHECK(round_trip("\xE7\x8C" "a") == r + "a");            // cut short by another character
    CHECK(round_trip("\xF0\x9F\x90") == r);                  // cut short by the end
}
