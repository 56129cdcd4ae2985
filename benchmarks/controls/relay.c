/* relay.c: the least that a hop through a daemon can cost: Unix socket → pipe → child and back, bytes untouched.
 *
 *   relay SOCKET CHILD [ARG…]      one child, any number of callers (replies go back in the order of the requests) */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { BUF = 1 << 18, LINE = 4 << 20 };

static int owners[1 << 20]; /* whose lines are under way, in order */
static unsigned head, tail;
static char buf[BUF], rest[LINE];
static size_t rest_len;
static int to[2], from[2];

static void put(int fd, const char *data, size_t len) {
    while (len) {
        const ssize_t n = write(fd, data, len);
        if (n <= 0) return;
        data += n;
        len -= (size_t)n;
    }
}

/* What the child has said goes to whoever asked. */
static void take(void) {
    const ssize_t len = read(from[0], rest + rest_len, sizeof rest - rest_len);
    if (len <= 0) exit(0);
    rest_len += (size_t)len;
    char *line = rest, *span = rest, *end;
    while ((end = memchr(line, '\n', rest_len - (size_t)(line - rest)))) {
        line = end + 1;
        const int owner = owners[tail++ & 0xFFFFF];
        if (tail == head || owners[tail & 0xFFFFF] != owner) {
            put(owner, span, (size_t)(line - span));
            span = line;
        }
    }
    if (line > span) put(owners[(tail - 1) & 0xFFFFF], span, (size_t)(line - span));
    rest_len -= (size_t)(line - rest);
    memmove(rest, line, rest_len);
}

/* To the child; one that does not read because nobody reads its replies is relieved of them first. */
static void give(const char *data, size_t len) {
    while (len) {
        const ssize_t n = write(to[1], data, len);
        if (n > 0) {
            data += n;
            len -= (size_t)n;
        } else if (errno == EAGAIN) {
            struct pollfd both[2] = {{to[1], POLLOUT, 0}, {from[0], POLLIN, 0}};
            poll(both, 2, -1);
            if (both[1].revents) take();
        } else {
            exit(1);
        }
    }
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    signal(SIGPIPE, SIG_IGN);
    if (pipe(to) || pipe(from)) return 1;
    if (!fork()) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        close(to[1]);
        close(from[0]);
        execv(argv[2], argv + 2);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    fcntl(to[1], F_SETFL, O_NONBLOCK);
    for (int i = 0; i < 2; i++) fcntl(i ? to[1] : from[0], F_SETPIPE_SZ, 1 << 20); /* as the broker does */
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    strncpy(addr.sun_path, argv[1], sizeof addr.sun_path - 1);
    unlink(argv[1]);
    const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&addr, sizeof addr) || listen(listener, 1024)) return 1;
    const int ep = epoll_create1(0);
    struct epoll_event ev = {.events = EPOLLIN, .data.fd = listener}, got[64];
    epoll_ctl(ep, EPOLL_CTL_ADD, listener, &ev);
    ev.data.fd = from[0];
    epoll_ctl(ep, EPOLL_CTL_ADD, from[0], &ev);
    puts("relay ready");
    fflush(stdout);
    for (;;) {
        const int n = epoll_wait(ep, got, 64, -1);
        for (int i = 0; i < n; i++) {
            const int fd = got[i].data.fd;
            if (fd == listener) {
                ev.data.fd = accept(listener, NULL, NULL);
                epoll_ctl(ep, EPOLL_CTL_ADD, ev.data.fd, &ev);
            } else if (fd == from[0]) {
                take();
            } else {
                const ssize_t len = read(fd, buf, sizeof buf); /* callers of the benchmark write whole lines */
                if (len <= 0) {
                    close(fd);
                    continue;
                }
                for (char *p = buf; (p = memchr(p, '\n', (size_t)(buf + len - p))); p++) owners[head++ & 0xFFFFF] = fd;
                give(buf, (size_t)len);
            }
        }
    }
}
