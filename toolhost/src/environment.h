// The environment variables that the toolhost reads, typed. --help explains them.
#pragma once

#include <cstdint>
#include <string>

namespace toolhost {

// Set, and "1" or "true".
bool env_flag(const char* name);

// Empty if it is not set.
std::string env_text(const char* name);

// `otherwise` if it is not set; a value that is no whole number is reported on stderr and ignored.
std::int64_t env_number(const char* name, std::int64_t otherwise);

}  // namespace toolhost
