// Text: an append-only byte buffer that is used again for every reply.
#pragma once

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>

#include "limits.h"

namespace toolhost {

// std::string would do, but for two things: it fills what resize() adds, and it grows with both copies alive.
class Text {
public:
    Text() = default;
    ~Text() { std::free(data_); }
    Text(const Text&) = delete;
    Text& operator=(const Text&) = delete;

    std::string_view view() const { return {data_, size_}; }
    std::size_t size() const { return size_; }

    void clear() {
        size_ = 0;
        if (capacity_ > kKeepBytes) release();  // a large reply's memory goes back
    }

    void release() {
        std::free(data_);
        data_ = nullptr;
        size_ = 0;
        capacity_ = 0;
    }

    // At least `n` writable bytes behind the text; wrote() makes them part of it.
    char* room(std::size_t n) {
        if (capacity_ - size_ < n) grow(n);
        return data_ + size_;
    }
    void wrote(std::size_t n) { size_ += n; }

    void append(std::string_view s) {
        if (s.empty()) return;
        std::memcpy(room(s.size()), s.data(), s.size());
        size_ += s.size();
    }

    void append_number(std::size_t n) {
        char* to = room(20);
        size_ += static_cast<std::size_t>(std::to_chars(to, to + 20, n).ptr - to);
    }

private:
    [[gnu::noinline]] void grow(std::size_t n) {
        std::size_t wanted = capacity_ + capacity_ / 2 + 256;
        if (wanted < size_ + n) wanted = size_ + n;
        void* grown = std::realloc(data_, wanted);
        if (grown == nullptr) throw std::bad_alloc();
        data_ = static_cast<char*>(grown);
        capacity_ = wanted;
    }

    char* data_ = nullptr;
    std::size_t size_ = 0;
    std::size_t capacity_ = 0;
};

}  // namespace toolhost
