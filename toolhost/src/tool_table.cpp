// ToolTable: registration, look-up, and what follows from a tool's description.
#include "tool_table.h"

#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <stdexcept>

namespace toolhost {
namespace {

bool contains_any(std::string_view text, std::initializer_list<std::string_view> words) {
    return std::any_of(words.begin(), words.end(), [&](auto word) { return text.find(word) != text.npos; });
}

bool any_contains(const std::vector<std::string>& texts, std::initializer_list<std::string_view> words) {
    return std::any_of(texts.begin(), texts.end(), [&](auto& text) { return contains_any(text, words); });
}

bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool is_part(std::string_view part) {
    return !part.empty() && is_upper(part[0]) &&
           std::all_of(part.begin(), part.end(), [](char c) { return is_upper(c) || is_digit(c) || c == '_'; });
}

bool is_version(std::string_view text) {
    return text.size() > 1 && text[0] == 'v' && std::all_of(text.begin() + 1, text.end(), is_digit);
}

}  // namespace

bool is_aid(std::string_view text) {
    if (text.substr(0, 4) != "AID.") return false;
    text.remove_prefix(4);
    for (std::size_t parts = 0;; ++parts) {
        const std::size_t dot = text.find('.');
        if (dot == text.npos) return parts > 0 && is_version(text);
        if (!is_part(text.substr(0, dot))) return false;
        text.remove_prefix(dot + 1);
    }
}

int tier_of(const machina::ToolDesc& desc) {
    if (contains_any(desc.aid, {"GENESIS"})) return 3;
    if (contains_any(desc.aid, {"SHELL", "NET.HTTP"})) return 2;
    if (any_contains(desc.side_effects, {"exec", "network", "process"})) return 2;
    if (any_contains(desc.side_effects, {"write", "append", "delete", "create"})) return 1;
    if (contains_any(desc.aid, {"FILE.WRITE", "MEMORY.APPEND", "VECDB.UPSERT"})) return 1;
    return 0;
}

void ToolTable::register_tool(const machina::ToolDesc& desc, machina::ToolFnPtr fn) {
    if (desc.aid.substr(0, 1) == "_") throw std::runtime_error("names with a leading _ are the host's: " + desc.aid);
    if (desc.aid.empty()) throw std::runtime_error("a tool without an AID: " + desc.name);
    if (fn == nullptr) throw std::runtime_error("tool without a function: " + desc.aid);
    if (find(desc.aid) != nullptr) throw std::runtime_error("tool registered twice: " + desc.aid);
    if (!is_aid(desc.aid)) {
        std::fprintf(stderr, "machina_toolhost: warning: %s does not look like AID.<PART>.v<N>\n", desc.aid.c_str());
    }
    auto tool = std::make_unique<Tool>();
    tool->desc = desc;
    tool->fn = fn;
    tool->tier = tier_of(desc);
    tool->pure = desc.deterministic && desc.side_effects == std::vector<std::string>{"none"};
    by_aid_.emplace(tool->desc.aid, tool.get());
    tools_.push_back(std::move(tool));
}

Tool* ToolTable::find(std::string_view aid) {
    if (last_ != nullptr && last_->desc.aid == aid) return last_;  // callers tend to stay with a tool
    const auto found = by_aid_.find(aid);
    return found == by_aid_.end() ? nullptr : last_ = found->second;
}

std::vector<const Tool*> ToolTable::sorted_by_aid() const {
    std::vector<const Tool*> sorted;
    for (const auto& tool : tools_) sorted.push_back(tool.get());
    std::sort(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->desc.aid < b->desc.aid; });
    return sorted;
}

}  // namespace toolhost
