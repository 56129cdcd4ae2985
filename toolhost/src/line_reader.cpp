// LineReader: one mapping that is as large as the longest line and touched only as far as lines are long.
#include "line_reader.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <sys/mman.h>

#include "io.h"
#include "large_pages.h"
#include "limits.h"

namespace toolhost {
namespace {

constexpr std::size_t kPadding = 64;

char* reserve(std::size_t bytes) {
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    return static_cast<char*>(mapped);
}

}  // namespace

// Two bytes more than the cap tell a line that is too long from one that ends in \r\n exactly at it.
LineReader::LineReader(int fd, std::size_t cap)
    : fd_(fd), cap_(cap), capacity_(2 * cap + 2 + kReadBytes), buffer_(reserve(capacity_ + kPadding)) {
    in_large_pages(buffer_ + kKeepBytes, capacity_ + kPadding - kKeepBytes);
}

LineReader::~LineReader() { munmap(buffer_, capacity_ + kPadding); }

bool LineReader::fits(std::size_t begin, std::size_t end) {
    const std::size_t size = end - begin;
    if (size <= cap_) return true;
    const std::size_t from = std::max(counted_, begin);
    if (from == begin) escapes_ = 0;
    escapes_ += static_cast<std::size_t>(std::count(buffer_ + from, buffer_ + end, '\\'));
    counted_ = end;
    return size - escapes_ <= cap_ && size <= 2 * cap_;
}

LineReader::Next LineReader::next(Line& line) {
    for (;;) {
        const void* found = std::memchr(buffer_ + scanned_, '\n', end_ - scanned_);
        if (found == nullptr) break;
        const std::size_t line_end = static_cast<std::size_t>(static_cast<const char*>(found) - buffer_);
        const std::size_t begin = start_;
        start_ = scanned_ = line_end + 1;
        if (dropping_) {
            dropping_ = false;
            continue;
        }
        line = {buffer_ + begin, line_end - begin};
        if (line.size > 0 && line.data[line.size - 1] == '\r') --line.size;
        return fits(begin, begin + line.size) ? Next::Line : Next::TooLong;
    }
    scanned_ = end_;
    if (dropping_) {
        start_ = end_;
        return at_end_ ? Next::End : Next::NeedMore;
    }
    if (end_ - start_ > cap_ + 1 && !fits(start_, end_ - 1)) {
        dropping_ = true;
        start_ = end_;
        return Next::TooLong;
    }
    if (!at_end_) return Next::NeedMore;
    if (start_ == end_) return Next::End;
    line = {buffer_ + start_, end_ - start_};  // an unterminated last line is a line
    start_ = end_;
    const std::size_t begin = static_cast<std::size_t>(line.data - buffer_);
    if (line.data[line.size - 1] == '\r') --line.size;
    return fits(begin, begin + line.size) ? Next::Line : Next::TooLong;
}

void LineReader::fill() {
    if (start_ > 0) {
        std::memmove(buffer_, buffer_ + start_, end_ - start_);
        end_ -= start_;
        scanned_ -= start_;
        counted_ = counted_ > start_ ? counted_ - start_ : 0;
        start_ = 0;
    }
    if (touched_ > kKeepBytes && end_ < kReadBytes) {
        char* const rest = at_large_page(buffer_ + kKeepBytes);
        madvise(rest, static_cast<std::size_t>(buffer_ + capacity_ + kPadding - rest), MADV_DONTNEED);
        touched_ = 0;
    }
    const ssize_t got = read_some(fd_, buffer_ + end_, std::min(kReadBytes, capacity_ - end_));
    if (got > 0) end_ += static_cast<std::size_t>(got);
    else at_end_ = true;
    touched_ = std::max(touched_, end_);
}

}  // namespace toolhost
