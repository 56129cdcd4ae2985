// The clock: monotonic, so that no lease and no cached result lives longer because somebody set the time.
#pragma once

#include <chrono>
#include <cstdint>

namespace toolhost {

inline std::int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

inline std::int64_t now_ms() { return now_ns() / 1'000'000; }

}  // namespace toolhost
