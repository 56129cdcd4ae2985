// Spin: looks for the next request for a while before the processor is given up, as long as that pays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sys/ioctl.h>

#include "clock.h"

namespace toolhost {

class Spin {
public:
    explicit Spin(std::int64_t ns) : ns_(ns) {}

    // Where nothing came in time (the caller is slow, or shares our processor), the next times are passed over: twice as
    // many as before, so that a caller who comes rarely costs next to nothing.
    void wait(int fd) {
        if (ns_ <= 0) return;
        if (skip_ > 0) {
            --skip_;
            return;
        }
        const std::int64_t until = now_ns() + ns_;
        int bytes = 0;
        do {
            if (ioctl(fd, FIONREAD, &bytes) != 0) return;
        } while (bytes == 0 && now_ns() < until);
        skipped_ = bytes > 0 ? 0 : std::clamp<std::int64_t>(2 * skipped_, 1, kMostSkipped);
        skip_ = skipped_;
    }

private:
    static constexpr std::int64_t kMostSkipped = 1024;

    const std::int64_t ns_;
    std::int64_t skip_ = 0;
    std::int64_t skipped_ = 0;
};

}  // namespace toolhost
