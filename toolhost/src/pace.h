// Pace: whether finished replies may wait for the next call, so that a batch costs one write and nobody waits for it.
#pragma once

#include <cstdint>

#include "clock.h"
#include "limits.h"
#include "tool_table.h"

namespace toolhost {

class Pace {
public:
    // Before and after waiting for whoever sends and reads, which is no tool's time.
    void sleeps() { look(); }
    void wakes() { last_look_ns_ = now_ns(); }

    // A reply is the first to be held.
    void holding() { held_since_ns_ = last_look_ns_; }

    // Before the call. False: it is not pure, or due to take long, or has kept the others waiting long enough.
    bool may_wait_for(Tool& tool) {
        if (&tool != tool_) {
            look();
            tool_ = &tool;
        }
        return tool.pure && tool.usual_ns <= kQuickToolNs && last_look_ns_ - held_since_ns_ <= kMaxHeldNs;
    }

    // After the call. Looking at the clock costs a tenth of a quick call, so a few of the same tool share one look.
    void done() {
        ++calls_;
        if (calls_ == kCallsPerLook || tool_->usual_ns > kQuickToolNs / kCallsPerLook) look();
    }

private:
    static constexpr std::int64_t kCallsPerLook = 8;

    void look() {
        if (calls_ == 0) return;
        const std::int64_t now = now_ns();
        tool_->took((now - last_look_ns_) / calls_);
        last_look_ns_ = now;
        calls_ = 0;
    }

    Tool* tool_ = nullptr;
    std::int64_t calls_ = 0;  // of tool_, since the last look
    std::int64_t last_look_ns_ = now_ns();
    std::int64_t held_since_ns_ = 0;
};

}  // namespace toolhost
