// Writes JSON strings: long plain runs eight bytes at a time, the rest by one table look-up a byte.
#include "json_text.h"

#include <array>
#include <cstdint>

namespace toolhost {
namespace {

// What to do with a byte: copy it; check a UTF-8 sequence; write \u00XX; else write a backslash and that character.
constexpr char kPlain = 0;
constexpr char kMultiByte = 1;
constexpr char kUnicodeEscape = 2;

constexpr std::array<char, 256> make_escapes() {
    std::array<char, 256> table{};
    for (std::size_t c = 0; c < 0x20; ++c) table[c] = kUnicodeEscape;
    for (std::size_t c = 0x80; c < 0x100; ++c) table[c] = kMultiByte;
    table['\b'] = 'b';
    table['\f'] = 'f';
    table['\n'] = 'n';
    table['\r'] = 'r';
    table['\t'] = 't';
    table['"'] = '"';
    table['\\'] = '\\';
    return table;
}

constexpr std::array<char, 256> kEscapes = make_escapes();

constexpr std::uint64_t every_byte(std::uint8_t c) { return 0x0101010101010101u * c; }

// True if none of the eight bytes is a control character, a quote, a backslash or beyond ASCII. A subtraction borrows
// from the next byte only where its own byte is special, so the answer for the group is exact.
bool all_plain(const char* p) {
    std::uint64_t v;
    std::memcpy(&v, p, sizeof v);
    const std::uint64_t quote = v ^ every_byte('"');
    const std::uint64_t backslash = v ^ every_byte('\\');
    const std::uint64_t special = (v - every_byte(0x20)) | (quote - every_byte(1)) | (backslash - every_byte(1)) | v;
    return (special & every_byte(0x80)) == 0;
}

struct Utf8Part {
    std::size_t length;
    bool valid;
};

// The sequence that starts at p (a byte beyond ASCII), or the longest prefix of one that is cut short there.
Utf8Part utf8_part(const unsigned char* p, const unsigned char* end) {
    const unsigned lead = *p;
    std::size_t length = 0;
    unsigned low = 0x80, high = 0xBF;  // of the second byte: narrower where overlong forms and surrogates would begin
    if (lead >= 0xC2 && lead <= 0xDF) length = 2;
    else if (lead >= 0xE0 && lead <= 0xEF) length = 3;
    else if (lead >= 0xF0 && lead <= 0xF4) length = 4;
    else return {1, false};
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
    for (std::size_t i = 1; i < length; ++i) {
        if (p + i == end || p[i] < low || p[i] > high) return {i, false};
        low = 0x80;
        high = 0xBF;
    }
    return {length, true};
}

// A character that cannot just be copied, from p, which moves on; returns where the next one goes.
char* escape(char how, const char*& p, const char* end, char* to) {
    if (how > kUnicodeEscape) {
        to[0] = '\\';
        to[1] = how;
        ++p;
        return to + 2;
    }
    if (how == kMultiByte) {
        const Utf8Part part = utf8_part(reinterpret_cast<const unsigned char*>(p),
                                        reinterpret_cast<const unsigned char*>(end));
        const std::string_view written = part.valid ? std::string_view(p, part.length) : "\xEF\xBF\xBD";
        std::memcpy(to, written.data(), written.size());
        p += part.length;
        return to + written.size();
    }
    const auto byte = static_cast<unsigned char>(*p++);
    std::memcpy(to, "\\u00", 4);
    to[4] = "0123456789abcdef"[byte >> 4];
    to[5] = "0123456789abcdef"[byte & 15];
    return to + 6;
}

// Everything from p up to block_end, and the rest of a character that reaches beyond it (`end` is the string's).
char* escape_block(const char*& from, const char* block_end, const char* end, char* to) {
    const char* p = from;
    while (p < block_end) {
        while (block_end - p >= 8 && all_plain(p)) {
            std::memcpy(to, p, 8);
            p += 8;
            to += 8;
        }
        for (const char* const group_end = block_end - p > 8 ? p + 8 : block_end; p < group_end;) {
            const char how = kEscapes[static_cast<unsigned char>(*p)];
            if (how == kPlain) *to++ = *p++;
            else to = escape(how, p, end, to);
        }
    }
    from = p;
    return to;
}

}  // namespace

void append_nonempty_json_string(Text& out, std::string_view s) {
    const char* p = s.data();
    const char* const end = p + s.size();
    bool first = true;
    // A block at a time, so that room for the longest escapes (six bytes for one) is never six times the string.
    do {
        const char* const block_end = end - p > 4096 ? p + 4096 : end;
        char* const begin = out.room(static_cast<std::size_t>(block_end - p) * 6 + 10);
        char* to = begin;
        if (first) *to++ = '"';
        first = false;
        to = escape_block(p, block_end, end, to);
        if (p == end) *to++ = '"';
        out.wrote(static_cast<std::size_t>(to - begin));
    } while (p != end);
}

void append_json_strings(Text& out, const std::vector<std::string>& strings) {
    out.append("[");
    for (const std::string& s : strings) {
        if (&s != &strings.front()) out.append(",");
        append_json_string(out, s);
    }
    out.append("]");
}

}  // namespace toolhost
