// LeaseTable: issue, spend, forget.
#include "leases.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <sys/random.h>

namespace toolhost {
namespace {

constexpr std::string_view kPrefix = "lease_";

int hex_value(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
}

template <typename Bytes>
void fill_randomly(Bytes& bytes) {
    while (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
        if (errno != EINTR) throw std::runtime_error("getrandom failed: no lease without randomness");
    }
}

template <typename Lease, typename Predicate>
void drop_if(std::vector<Lease>& leases, Predicate useless) {
    leases.erase(std::remove_if(leases.begin(), leases.end(), useless), leases.end());
}

}  // namespace

std::optional<std::string> LeaseTable::issue(std::string_view tool_aid, int tier, std::int64_t ttl_ms,
                                             std::int64_t now_ms) {
    if (leases_.size() >= max_entries_) {
        drop_if(leases_, [&](const Lease& l) { return l.consumed || l.expires_ms <= now_ms; });
        if (leases_.size() >= max_entries_) return std::nullopt;
    }
    Lease lease{{}, std::string(tool_aid), tier, now_ms + std::clamp(ttl_ms, kLeaseMinMs, kLeaseMaxMs), false};
    fill_randomly(lease.secret);
    std::string token(kPrefix);
    for (const unsigned char byte : lease.secret) {
        token += "0123456789abcdef"[byte >> 4];
        token += "0123456789abcdef"[byte & 15];
    }
    leases_.push_back(std::move(lease));
    ++issued_;
    return token;
}

// Every lease is compared, and every byte of it: the time taken says nothing about how much of a guess was right.
LeaseTable::Lease* LeaseTable::find(std::string_view token) {
    Secret secret;
    if (token.substr(0, kPrefix.size()) != kPrefix) return nullptr;
    token.remove_prefix(kPrefix.size());
    if (token.size() != 2 * secret.size()) return nullptr;
    for (std::size_t i = 0; i < secret.size(); ++i) {
        const int high = hex_value(token[2 * i]), low = hex_value(token[2 * i + 1]);
        if (high < 0 || low < 0) return nullptr;
        secret[i] = static_cast<unsigned char>(high * 16 + low);
    }
    Lease* found = nullptr;
    for (Lease& lease : leases_) {
        int difference = 0;
        for (std::size_t i = 0; i < secret.size(); ++i) difference |= lease.secret[i] ^ secret[i];
        if (difference == 0) found = &lease;
    }
    return found;
}

std::string LeaseTable::why_not(const Lease* lease, const Tool& tool, std::int64_t now_ms) const {
    if (lease == nullptr) return "lease not found";
    if (lease->expires_ms <= now_ms) return "lease expired";
    if (lease->consumed) return "lease already consumed";
    if (lease->tool_aid != "*" && lease->tool_aid != tool.desc.aid) {
        return "lease tool mismatch: expected=" + lease->tool_aid + " got=" + tool.desc.aid;
    }
    if (lease->tier < tool.tier) return "lease tier too low";
    return "";
}

std::string LeaseTable::spend(std::string_view token, const Tool& tool, std::int64_t now_ms) {
    Lease* lease = find(token);
    std::string reason = why_not(lease, tool, now_ms);
    if (reason.empty()) {
        lease->consumed = true;
        ++consumed_;
    } else {
        ++rejected_;
    }
    return reason;
}

LeaseTable::Counts LeaseTable::collect(std::int64_t now_ms) {
    drop_if(leases_, [&](const Lease& l) { return l.expires_ms <= now_ms; });
    const auto active = std::count_if(leases_.begin(), leases_.end(), [](const Lease& l) { return !l.consumed; });
    return {static_cast<std::size_t>(active), issued_, consumed_, rejected_};
}

}  // namespace toolhost
