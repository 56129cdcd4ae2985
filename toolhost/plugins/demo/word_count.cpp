// AID.DEMO.WORD_COUNT.v1: how often each word occurs in a text, the most frequent first.
#include <algorithm>
#include <unordered_map>
#include <vector>

#include "demo_tools.h"

namespace demo {
namespace {

// Every byte of a character beyond ASCII counts as part of a word, so that no character is ever cut in two.
bool in_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           static_cast<unsigned char>(c) >= 0x80;
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

}  // namespace

machina::ToolResult word_count(const support::Input& input, machina::DSState&) {
    const std::string_view text = input.text("text");
    std::unordered_map<std::string, std::size_t> counted;
    std::size_t total = 0;
    for (auto p = text.begin(); p != text.end();) {
        const auto begin = std::find_if(p, text.end(), in_word);
        p = std::find_if_not(begin, text.end(), in_word);
        if (begin == p) break;
        std::string word(begin, p);
        std::transform(word.begin(), word.end(), word.begin(), lower);
        ++counted[std::move(word)];
        ++total;
    }

    std::vector<std::pair<std::string, std::size_t>> counts(counted.begin(), counted.end());
    std::sort(counts.begin(), counts.end(), [](const auto& a, const auto& b) {
        return a.second != b.second ? a.second > b.second : a.first < b.first;
    });
    std::string output = "{\"total_tokens\":" + std::to_string(total) +
                         ",\"unique_tokens\":" + std::to_string(counts.size()) + ",\"counts\":[";
    for (const auto& [word, count] : counts) {
        if (output.back() != '[') output += ',';
        output += "{\"word\":" + support::quoted(word) + ",\"count\":" + std::to_string(count) + "}";
    }
    return support::done(output + "]}");
}

}  // namespace demo
