// IdempotencyCache: what is kept, for how long, and what goes first.
#include "check.h"
#include "idempotency.h"

namespace {

using toolhost::IdempotencyCache;

toolhost::Tool tool_named(const char* aid) {
    toolhost::Tool tool;
    tool.desc.aid = aid;
    return tool;
}

const toolhost::Tool kTool = tool_named("AID.A.v1");

machina::ToolResult result(const std::string& output) { return {machina::StepStatus::OK, output, ""}; }

bool holds(IdempotencyCache& cache, const std::string& key, std::int64_t now) {
    const auto* found = cache.find(kTool, key, now);
    return found != nullptr && found->output_json == key;
}

}  // namespace

TEST("a result is found until its TTL is over, however often it is used") {
    IdempotencyCache cache(1000);
    cache.store(kTool, "k", result("k"), 100);
    for (std::int64_t now = 100; now < 1100; now += 100) CHECK(holds(cache, "k", now));
    CHECK(!holds(cache, "k", 1100));
}

TEST("the same key under another tool is another entry") {
    const toolhost::Tool other = tool_named("AID.A.v11");
    IdempotencyCache cache(1000);
    cache.store(kTool, "1k", result("1k"), 0);
    CHECK(cache.find(other, "1k", 0) == nullptr);
    CHECK(cache.find(other, "k", 0) == nullptr);
}

TEST("a full cache drops the least recently used entry") {
    IdempotencyCache cache(1000, 3);
    for (const char* key : {"a", "b", "c"}) cache.store(kTool, key, result(key), 0);
    CHECK(holds(cache, "a", 1));
    cache.store(kTool, "d", result("d"), 1);
    CHECK(holds(cache, "a", 1));
    CHECK(!holds(cache, "b", 1));
    CHECK(holds(cache, "c", 1));
    CHECK(holds(cache, "d", 1));
}

TEST("a full cache drops what expired before what was used least recently") {
    IdempotencyCache cache(1000, 2);
    cache.store(kTool, "old", result("old"), 0);
    cache.store(kTool, "new", result("new"), 500);
    CHECK(holds(cache, "old", 600));  // now "new" is the least recently used
    cache.store(kTool, "x", result("x"), 1000);
    CHECK(holds(cache, "new", 1000));
    CHECK(holds(cache, "x", 1000));
}

TEST("the cache is bounded by bytes too") {
    IdempotencyCache cache(1000, 100, 10'000);
    const std::string large(6000, 'l');
    cache.store(kTool, "first", result(large), 0);
    cache.store(kTool, "second", result(large), 0);
    CHECK(cache.find(kTool, "first", 0) == nullptr);
    CHECK(cache.find(kTool, "second", 0) != nullptr);
    cache.store(kTool, "huge", result(std::string(20'000, 'h')), 0);
    CHECK(cache.find(kTool, "huge", 0) == nullptr);
    CHECK(cache.find(kTool, "second", 0) != nullptr);
}
