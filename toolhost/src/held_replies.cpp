// HeldReplies: a fixed buffer, so that adding can neither fail nor move what a crash handler may have to write.
#include "held_replies.h"

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "io.h"
#include "limits.h"

namespace toolhost {
namespace {

struct {
    int fd = -1;
    pid_t owner = 0;
    char bytes[kHeldBytes];
    std::atomic<std::size_t> size{0};  // whole replies only
} held;

// Takes the bytes before they are written, so that two threads, or a crash during a write, never write them twice.
bool write_held() { return write_all(held.fd, {held.bytes, held.size.exchange(0)}); }

// A forked child has a copy of the buffer, but the replies are its parent's to write.
void write_if_owner() {
    if (getpid() == held.owner) write_held();
}

// The handler's disposition was reset on entry: raising the signal again ends the process as it would have ended.
void on_crash(int signal_number) {
    write_if_owner();
    std::raise(signal_number);
}

void install_crash_handlers() {
    static char stack[64 * 1024];  // a stack overflow leaves no other
    stack_t alternate{};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, nullptr);

    struct sigaction action {};
    action.sa_handler = on_crash;
    action.sa_flags = static_cast<int>(SA_ONSTACK | SA_NODEFER | SA_RESETHAND);
    for (const int signal_number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
        sigaction(signal_number, &action, nullptr);
    }
    std::atexit(write_if_owner);
}

}  // namespace

HeldReplies::HeldReplies(int fd) {
    held.fd = fd;
    held.owner = getpid();
    install_crash_handlers();
}

bool HeldReplies::empty() const { return held.size.load(std::memory_order_relaxed) == 0; }

bool HeldReplies::has_room_for(std::string_view line) const {
    return line.size() <= kHeldBytes - held.size.load(std::memory_order_relaxed);
}

bool HeldReplies::add(std::string_view line) {
    if (!has_room_for(line)) return flush() && write_all(held.fd, line);
    const std::size_t size = held.size.load(std::memory_order_relaxed);
    std::memcpy(held.bytes + size, line.data(), line.size());
    held.size.store(size + line.size(), std::memory_order_release);
    return true;
}

bool HeldReplies::flush() { return empty() || write_held(); }

}  // namespace toolhost
