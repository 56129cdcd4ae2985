// LineReader: lines that come whole, in pieces, too long, unterminated.
#include "check.h"
#include "line_reader.h"

#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

using toolhost::Line;
using toolhost::LineReader;

// Everything that the reader says about an input: each line, and "<too long>".
std::vector<std::string> read_lines(const std::string& input, std::size_t cap, std::size_t piece) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    std::thread writer([&] {
        for (std::size_t at = 0; at < input.size(); at += piece) {
            const std::string part = input.substr(at, piece);
            CHECK(write(ends[1], part.data(), part.size()) == static_cast<ssize_t>(part.size()));
        }
        close(ends[1]);
    });
    std::vector<std::string> said;
    LineReader reader(ends[0], cap);
    for (bool more = true; more;) {
        Line line;
        switch (reader.next(line)) {
            case LineReader::Next::Line: said.emplace_back(line.data, line.size); break;
            case LineReader::Next::TooLong: said.emplace_back("<too long>"); break;
            case LineReader::Next::NeedMore: reader.fill(); break;
            case LineReader::Next::End: more = false; break;
        }
    }
    writer.join();
    close(ends[0]);
    return said;
}

using Lines = std::vector<std::string>;

}  // namespace

TEST("lines come out the same, however the bytes come in") {
    const std::string input = "one\ntwo\r\n\nthree";
    for (std::size_t piece = 1; piece <= input.size(); ++piece) {
        CHECK(read_lines(input, 100, piece) == (Lines{"one", "two", "", "three"}));
    }
}

TEST("a line at the cap passes, one byte more is refused once, and the next line is read") {
    const std::string at(10, 'a'), over(11, 'b');
    for (std::size_t piece = 1; piece <= 40; ++piece) {
        CHECK(read_lines(at + "\n" + over + "\n" + at + "\r\n" + over + "\r\nend\n", 10, piece) ==
              (Lines{at, "<too long>", at, "<too long>", "end"}));
    }
}

TEST("a line many times too long is dropped as it streams by") {
    CHECK(read_lines(std::string(3'000'000, 'x') + "\nnext\n", 1000, 65536) == (Lines{"<too long>", "next"}));
    CHECK(read_lines("first\n" + std::string(3'000'000, 'x'), 1000, 65536) == (Lines{"first", "<too long>"}));
}

TEST("an unterminated last line is a line, with the same cap") {
    CHECK(read_lines("a\nlast", 4, 3) == (Lines{"a", "last"}));
    CHECK(read_lines("a\nlast\r", 4, 3) == (Lines{"a", "last"}));
    CHECK(read_lines("a\nlonger", 4, 100) == (Lines{"a", "<too long>"}));
    CHECK(read_lines("", 4, 1).empty());
}
