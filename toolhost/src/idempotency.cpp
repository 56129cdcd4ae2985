// IdempotencyCache: two orders over the same entries, by use and by age.
#include "idempotency.h"

namespace toolhost {

std::string IdempotencyCache::name_of(const Tool& tool, std::string_view key) {
    // The length keeps ("A", "B:C") and ("A:B", "C") apart.
    const std::string& aid = tool.desc.aid;
    return std::to_string(aid.size()).append(":").append(aid).append(key);
}

const machina::ToolResult* IdempotencyCache::find(const Tool& tool, std::string_view key, std::int64_t now_ms) {
    drop_expired(now_ms);
    const auto found = by_name_.find(name_of(tool, key));
    if (found == by_name_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return &found->second->result;
}

void IdempotencyCache::store(const Tool& tool, std::string_view key, const machina::ToolResult& result,
                             std::int64_t now_ms) {
    std::string name = name_of(tool, key);
    const std::size_t bytes = name.size() + result.output_json.size() + result.error.size() + sizeof(Entry);
    if (bytes > max_bytes_) return;
    drop_expired(now_ms);
    while (!entries_.empty() && (entries_.size() >= max_entries_ || bytes_ + bytes > max_bytes_)) {
        drop(std::prev(entries_.end()));
    }
    entries_.push_front({std::move(name), result, now_ms + ttl_ms_, bytes, {}});
    const auto entry = entries_.begin();
    entry->age = by_age_.insert(by_age_.end(), entry);
    by_name_.emplace(entry->name, entry);
    bytes_ += bytes;
}

void IdempotencyCache::drop_expired(std::int64_t now_ms) {
    while (!by_age_.empty() && by_age_.front()->expires_ms <= now_ms) drop(by_age_.front());
}

void IdempotencyCache::drop(Entries::iterator entry) {
    bytes_ -= entry->bytes;
    by_name_.erase(entry->name);
    by_age_.erase(entry->age);
    entries_.erase(entry);
}

}  // namespace toolhost
