// Capability masks: names, numbers, messages.
#include "capabilities.h"

#include <charconv>
#include <cstdio>

#include "plugin.h"

namespace toolhost {
namespace {

struct Name {
    std::string_view name;
    std::uint32_t bits;
};

constexpr Name kNames[] = {
    {"file_read", machina::CAP_FILE_READ}, {"file_write", machina::CAP_FILE_WRITE}, {"shell", machina::CAP_SHELL},
    {"network", machina::CAP_NETWORK},     {"memory", machina::CAP_MEMORY},         {"genesis", machina::CAP_GENESIS},
    {"gpu", machina::CAP_GPU},             {"none", machina::CAP_NONE},             {"all", machina::CAP_ALL},
};

bool parse_number(std::string_view word, std::uint32_t& number) {
    const bool hex = word.substr(0, 2) == "0x";
    if (hex) word.remove_prefix(2);
    const char* const end = word.data() + word.size();
    const auto [stopped, error] = std::from_chars(word.data(), end, number, hex ? 16 : 10);
    return error == std::errc() && stopped == end;
}

std::uint32_t parse_word(std::string_view word) {
    for (const Name& known : kNames) {
        if (known.name == word) return known.bits;
    }
    std::uint32_t number = 0;
    if (parse_number(word, number)) return number;
    throw PluginRefused("MACHINA_PLUGIN_CAPS: unknown capability \"" + std::string(word) +
                        "\"; known are file_read, file_write, shell, network, memory, genesis, gpu, none, all, "
                        "or a mask such as 0x3");
}

}  // namespace

std::uint32_t parse_capabilities(std::string_view text) {
    std::uint32_t mask = 0;
    for (;;) {
        const std::size_t comma = text.find(',');
        mask |= parse_word(text.substr(0, comma));
        if (comma == text.npos) return mask;
        text.remove_prefix(comma + 1);
    }
}

std::string capability_names(std::uint32_t mask) {
    std::string names;
    const auto add = [&](std::string_view name) { names.append(names.empty() ? "" : ", ").append(name); };
    for (const Name& known : kNames) {
        if (known.bits == machina::CAP_NONE || known.bits == machina::CAP_ALL) continue;
        if (mask & known.bits) add(known.name);
        mask &= ~known.bits;
    }
    if (mask != 0) add("bits without a name");
    return names;
}

std::string capability_hex(std::uint32_t mask) {
    char text[11];
    std::snprintf(text, sizeof text, "0x%08x", mask);
    return text;
}

}  // namespace toolhost
