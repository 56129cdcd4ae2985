// Reading and writing a descriptor, and moving the protocol away from stdin and stdout.
#include "io.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

namespace toolhost {
namespace {

void wait_until(int fd, short event) {
    pollfd waiting{fd, event, 0};
    poll(&waiting, 1, -1);
}

// Well away from the low numbers that a plugin might expect to get or close; still below an RLIMIT_NOFILE of 64.
constexpr int kPrivateFd = 40;

int private_copy(int fd) {
    if (fcntl(fd, F_GETFD) < 0) fd = open("/dev/null", O_RDWR | O_CLOEXEC);  // started with the descriptor closed
    const int high = fcntl(fd, F_DUPFD_CLOEXEC, kPrivateFd);
    return high >= 0 ? high : fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
}

}  // namespace

ssize_t read_some(int fd, char* to, std::size_t n) {
    for (;;) {
        const ssize_t got = read(fd, to, n);
        if (got >= 0) return got;
        if (errno == EAGAIN || errno == EWOULDBLOCK) wait_until(fd, POLLIN);
        else if (errno != EINTR) return -1;
    }
}

bool write_all(int fd, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t wrote = write(fd, bytes.data(), bytes.size());
        if (wrote >= 0) bytes.remove_prefix(static_cast<std::size_t>(wrote));
        else if (errno == EAGAIN || errno == EWOULDBLOCK) wait_until(fd, POLLOUT);
        else if (errno != EINTR) return false;
    }
    return true;
}

Protocol take_stdio() {
    const Protocol protocol{private_copy(STDIN_FILENO), private_copy(STDOUT_FILENO)};
    const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (fcntl(STDERR_FILENO, F_GETFD) < 0) dup2(nothing, STDERR_FILENO);
    dup2(nothing, STDIN_FILENO);
    dup2(STDERR_FILENO, STDOUT_FILENO);
    if (nothing > STDERR_FILENO) close(nothing);
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a tool's prints appear in order with its writes to stderr

    // A reader that is gone, or a file that hits its size limit, is an error of one write, not the end of the process.
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ, SIG_IGN);
    return protocol;
}

}  // namespace toolhost
