// Fresh memory for something long in large pages, where the system has them: to touch 10 MB in small ones takes longer
// than all that is done with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sys/mman.h>

namespace toolhost {

constexpr std::size_t kLargePage = 2 * 1024 * 1024;

inline char* at_large_page(char* p) {
    return p + (kLargePage - reinterpret_cast<std::uintptr_t>(p) % kLargePage) % kLargePage;
}

inline void in_large_pages(char* data, std::size_t size) {
    char* const from = at_large_page(data);
    if (from + kLargePage > data + size) return;
    madvise(from, static_cast<std::size_t>(data + size - from) / kLargePage * kLargePage, MADV_HUGEPAGE);
}

}  // namespace toolhost
