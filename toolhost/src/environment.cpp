// The environment variables that the toolhost reads, typed.
#include "environment.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>

namespace toolhost {

std::string env_text(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

bool env_flag(const char* name) {
    const std::string value = env_text(name);
    return value == "1" || value == "true";
}

std::int64_t env_number(const char* name, std::int64_t otherwise) {
    const std::string value = env_text(name);
    if (value.empty()) return otherwise;
    std::int64_t number = 0;
    const char* const end = value.data() + value.size();
    const auto [stopped, error] = std::from_chars(value.data(), end, number);
    if (error == std::errc() && stopped == end && number >= 0) return number;
    std::fprintf(stderr, "machina_toolhost: %s=%s is not a whole number; using %lld\n", name, value.c_str(),
                 static_cast<long long>(otherwise));
    return otherwise;
}

}  // namespace toolhost
