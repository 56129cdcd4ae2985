// LineReader: request lines out of a stream, with a cap on their length and on the memory that they take.
#pragma once

#include <cstddef>

namespace toolhost {

struct Line {
    char* data;  // at least four writable bytes follow it, for the JSON reader's padding
    std::size_t size;
};

class LineReader {
public:
    // `cap` counts a line without its line end, and without backslashes: where a broker wrote an object as a string, each
    // of its quotes has one. (They may double a line, no more.)
    LineReader(int fd, std::size_t cap);
    ~LineReader();
    LineReader(const LineReader&) = delete;
    LineReader& operator=(const LineReader&) = delete;

    enum class Next { Line, TooLong, NeedMore, End };

    // Never blocks. TooLong is said once for a line; its rest is dropped as it streams by.
    Next next(Line& line);

    // One read, which may block. Lines handed out before are gone.
    void fill();

private:
    bool fits(std::size_t begin, std::size_t end);

    const int fd_;
    const std::size_t cap_;
    const std::size_t capacity_;
    char* const buffer_;
    std::size_t start_ = 0;    // of the line that is being read
    std::size_t scanned_ = 0;  // no line end before this: a line that comes in pieces is searched once
    std::size_t end_ = 0;
    std::size_t counted_ = 0;  // of a line over the cap, up to here its backslashes are counted
    std::size_t escapes_ = 0;
    std::size_t touched_ = 0;
    bool dropping_ = false;
    bool at_end_ = false;
};

}  // namespace toolhost
