// Every limit of the toolhost, named once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace toolhost {

// A caller's request line, without its line end. The broker splices members of its own into the line: they have room
// beyond the limit and do not count against the caller.
constexpr std::size_t kMaxRequestBytes = 10'485'760;
constexpr std::size_t kSplicedBytes = 4096;
constexpr unsigned kMaxNesting = 128;

constexpr std::size_t kReadBytes = 256 * 1024;
constexpr std::size_t kHeldBytes = 64 * 1024;

// Buffers that grew beyond this for one large line give their memory back after it.
constexpr std::size_t kKeepBytes = 1024 * 1024;

// A reply may wait for the next one only if that is due soon: neither may a tool that usually takes longer run in
// front of it, nor may it wait longer in all.
constexpr std::int64_t kQuickToolNs = 100'000;
constexpr std::int64_t kMaxHeldNs = 200'000;

constexpr std::int64_t kIdempotencyTtlMs = 60'000;
constexpr std::size_t kIdempotencyEntries = 1024;
constexpr std::size_t kIdempotencyBytes = 64 * 1024 * 1024;

constexpr std::int64_t kLeaseDefaultMs = 10'000;
constexpr std::int64_t kLeaseMinMs = 1'000;
constexpr std::int64_t kLeaseMaxMs = 300'000;
constexpr std::size_t kLeaseEntries = 1024;

}  // namespace toolhost
