// SHA-256 (FIPS 180-4), to hold a plugin against its pin before any of its code runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace toolhost {

class Sha256 {
public:
    void update(const void* data, std::size_t size);
    std::string hex_digest();  // 64 lower-case digits; ends the hash

private:
    void block(const unsigned char* p);

    std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                           0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    unsigned char pending_[64];
    std::size_t pending_size_ = 0;
    std::uint64_t total_ = 0;
};

}  // namespace toolhost
