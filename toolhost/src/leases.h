// LeaseTable: single-use permissions for tools above tier 0, issued and spent inside this process.
//
// For those who use the toolhost alone: behind the broker, leases are the broker's.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "limits.h"
#include "tool_table.h"

namespace toolhost {

// Sans I/O but for the random bits: the time is an argument, in milliseconds of a clock that only goes forward.
class LeaseTable {
public:
    explicit LeaseTable(std::size_t max_entries = kLeaseEntries) : max_entries_(max_entries) {}

    // The token, `lease_<32 hex>`; nothing if the table is full of leases that can still be used. `tool_aid` may be
    // "*": any tool within the tier.
    std::optional<std::string> issue(std::string_view tool_aid, int tier, std::int64_t ttl_ms, std::int64_t now_ms);

    // Spends the lease and returns an empty string, or leaves it as it is and returns the reason for the rejection.
    std::string spend(std::string_view token, const Tool& tool, std::int64_t now_ms);

    struct Counts {
        std::size_t active, issued, consumed, rejected;
    };
    // Forgets what expired.
    Counts collect(std::int64_t now_ms);

private:
    using Secret = std::array<unsigned char, 16>;
    struct Lease {
        Secret secret;
        std::string tool_aid;
        int tier;
        std::int64_t expires_ms;
        bool consumed;  // kept until it expires, to tell a second use from an invention
    };

    Lease* find(std::string_view token);
    std::string why_not(const Lease* lease, const Tool& tool, std::int64_t now_ms) const;

    const std::size_t max_entries_;
    std::vector<Lease> leases_;
    std::size_t issued_ = 0, consumed_ = 0, rejected_ = 0;
};

}  // namespace toolhost
