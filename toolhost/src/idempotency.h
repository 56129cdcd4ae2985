// IdempotencyCache: the results of keyed calls, so that a retry is answered without running the tool again.
//
// For those who use the toolhost alone: the broker keeps its own cache and never sends the key here.
#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>

#include "limits.h"
#include "machina/tools.h"
#include "tool_table.h"

namespace toolhost {

// Sans I/O: the time is an argument, in milliseconds of any clock that only goes forward.
class IdempotencyCache {
public:
    explicit IdempotencyCache(std::int64_t ttl_ms, std::size_t max_entries = kIdempotencyEntries,
                              std::size_t max_bytes = kIdempotencyBytes)
        : ttl_ms_(ttl_ms), max_entries_(max_entries), max_bytes_(max_bytes) {}

    // nullptr if this tool has not completed under this key within the TTL. Valid until the next call.
    const machina::ToolResult* find(const Tool& tool, std::string_view key, std::int64_t now_ms);

    // The TTL counts from here. Makes room by dropping what expired, then what was used least recently.
    void store(const Tool& tool, std::string_view key, const machina::ToolResult& result, std::int64_t now_ms);

private:
    struct Entry;
    using Entries = std::list<Entry>;                  // most recently used first
    using ByAge = std::list<Entries::iterator>;        // oldest first: the order in which they expire
    struct Entry {
        std::string name;
        machina::ToolResult result;
        std::int64_t expires_ms;
        std::size_t bytes;
        ByAge::iterator age;
    };

    // The same key under another tool is another name.
    static std::string name_of(const Tool& tool, std::string_view key);
    void drop_expired(std::int64_t now_ms);
    void drop(Entries::iterator entry);

    const std::int64_t ttl_ms_;
    const std::size_t max_entries_;
    const std::size_t max_bytes_;
    std::size_t bytes_ = 0;
    Entries entries_;
    ByAge by_age_;
    std::unordered_map<std::string_view, Entries::iterator> by_name_;
};

}  // namespace toolhost
