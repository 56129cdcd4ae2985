// Reading and writing a descriptor that may be a pipe, a file or a socket, blocking or not.
#pragma once

#include <cstddef>
#include <string_view>
#include <sys/types.h>

namespace toolhost {

// Some bytes, as soon as there are any; 0 at the end of input; -1 on an error.
ssize_t read_some(int fd, char* to, std::size_t n);

// All bytes; false if the reader is gone. Async-signal-safe.
bool write_all(int fd, std::string_view bytes);

// The protocol's own descriptors. The numbers 0 and 1 belong to the plugin from now on: what a tool reads is empty,
// and what it prints goes to stderr, so that neither can eat a request or corrupt a reply.
struct Protocol {
    int in;
    int out;
};
Protocol take_stdio();

}  // namespace toolhost
