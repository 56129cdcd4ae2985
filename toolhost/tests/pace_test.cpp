// Pace: which calls may keep finished replies waiting.
#include "check.h"
#include "pace.h"

#include <chrono>
#include <thread>

namespace {

using toolhost::Pace;
using toolhost::Tool;

Tool quick_tool(bool pure) {
    Tool tool;
    tool.pure = pure;
    tool.took(1000);
    return tool;
}

void sleep_us(int us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

}  // namespace

TEST("replies wait for a quick pure call, and for no other") {
    Tool quick = quick_tool(true), impure = quick_tool(false), unknown, slow;
    unknown.pure = slow.pure = true;
    slow.took(5'000'000);
    Pace pace;
    pace.wakes();
    pace.holding();
    CHECK(pace.may_wait_for(quick));
    CHECK(!pace.may_wait_for(impure));
    CHECK(!pace.may_wait_for(unknown));
    CHECK(!pace.may_wait_for(slow));
}

TEST("a reply does not wait long, however quick the calls are") {
    Tool quick = quick_tool(true), other = quick_tool(true);
    Pace pace;
    pace.wakes();
    pace.holding();
    CHECK(pace.may_wait_for(quick));
    pace.done();
    sleep_us(300);
    CHECK(!pace.may_wait_for(other));  // another tool: the clock is looked at
}

TEST("a call is timed even if the input ends right after it, and waiting for more is not its time") {
    Tool quick = quick_tool(true);
    Pace pace;
    pace.wakes();
    pace.may_wait_for(quick);
    sleep_us(300);
    pace.done();
    pace.sleeps();
    CHECK(quick.usual_ns > 250'000);
    const std::int64_t before = quick.usual_ns;
    sleep_us(2000);
    pace.wakes();
    pace.may_wait_for(quick);
    pace.done();
    pace.sleeps();
    CHECK(quick.usual_ns < before);
}

TEST("one slow call makes a tool slow, and many quick ones make it quick again") {
    Tool tool = quick_tool(true);
    tool.took(50'000'000);
    CHECK(tool.usual_ns == 50'000'000);
    int calls = 0;
    for (; tool.usual_ns > toolhost::kQuickToolNs; ++calls) tool.took(1000);
    CHECK(calls > 10 && calls < 200);
}
