/* http.c: an HTTP caller in C. The same POST on each of CONNS connections that are kept alive, the next when the last has
 * its answer; every answer is checked.
 *
 *   http PORT PATH CALLS CONNS BODY EXPECTED      on 127.0.0.1
 *
 * CALLS is a number, or a time ("0.5s"). An answer must have the status 200, and EXPECTED in its body, whose length its
 * head must give. Prints one JSON object. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "latency.h"

enum { ROOM = 1 << 16, EVENTS = 64 };
#define LENGTH "content-length:"

typedef struct {
    int fd;
    size_t len; /* of the answer, so far */
    int64_t born;
    char in[ROOM + 1];
} conn;

static char *request;
static size_t request_len;
static const char *expected;

static int dial(int port, conn *c) {
    const struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    const int yes = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0 || connect(c->fd, (const struct sockaddr *)&at, sizeof at)) return -1;
    return setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

/* One write: a request is small beside what a socket holds. */
static int ask(conn *c) {
    c->len = 0;
    c->born = now();
    if (send(c->fd, request, request_len, MSG_NOSIGNAL) != (ssize_t)request_len) return perror("send"), -1;
    return 0;
}

/* 1: the answer is whole, and checked; 0: it is not; -1: it cannot be one. */
static int check(conn *c) {
    c->in[c->len] = 0;
    const char *end = memmem(c->in, c->len, "\r\n\r\n", 4);
    if (!end) return c->len < ROOM ? 0 : (fprintf(stderr, "an answer's head does not end\n"), -1);
    const char *length = strcasestr(c->in, "\r\n" LENGTH), *body = end + 4;
    if (!length || length > end) return fprintf(stderr, "an answer does not give its length\n"), -1;
    const size_t size = strtoul(length + 2 + sizeof LENGTH - 1, NULL, 10), here = c->len - (size_t)(body - c->in);
    if (here > size) return fprintf(stderr, "more came than the answer\n"), -1;
    if (here < size) return c->len < ROOM ? 0 : (fprintf(stderr, "an answer is over %d bytes\n", ROOM), -1);
    if (strncmp(c->in, "HTTP/1.1 200 ", 13)) {
        if (failed++ < 5) fprintf(stderr, "failed: %.300s\n", c->in);
    } else if (!memmem(body, size, expected, strlen(expected))) {
        if (wrong++ < 5) fprintf(stderr, "expected %s, got: %.200s\n", expected, body);
    }
    return 1;
}

int main(int argc, char **argv) {
    if (argc != 7) return fprintf(stderr, "usage: http PORT PATH CALLS CONNS BODY EXPECTED\n"), 2;
    const int timed = strchr(argv[3], 's') != NULL, conns = atoi(argv[4]);
    const long quota = timed ? INT64_MAX : atol(argv[3]);
    expected = argv[6];
    const int len = asprintf(&request, "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                             argv[2], argv[1], strlen(argv[5]), argv[5]);
    if (len < 0) return perror("http"), 1;
    request_len = (size_t)len;
    conn *all = calloc((size_t)conns, sizeof *all);
    const int epoll = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < conns; i++) {
        struct epoll_event event = {EPOLLIN, {.ptr = &all[i]}};
        if (dial(atoi(argv[1]), &all[i]) || epoll_ctl(epoll, EPOLL_CTL_ADD, all[i].fd, &event)) return perror(argv[1]), 1;
    }
    const int64_t begin = now(), until = timed ? begin + (int64_t)(atof(argv[3]) * 1e9) : INT64_MAX;
    long begun = 0, total = 0;
    for (int i = 0; i < conns && begun < quota; i++, begun++) {
        if (ask(&all[i])) return 1;
    }
    while (total < begun) {
        struct epoll_event events[EVENTS];
        const int ready = epoll_wait(epoll, events, EVENTS, 20000);
        if (ready <= 0) return fprintf(stderr, "nothing for 20 s: %ld answered\n", total), 1;
        for (int i = 0; i < ready; i++) {
            conn *c = events[i].data.ptr;
            const ssize_t n = recv(c->fd, c->in + c->len, ROOM - c->len, MSG_DONTWAIT);
            if (!n) return fprintf(stderr, "a connection was closed after %ld answers\n", total), 1;
            if (n < 0 && errno == EAGAIN) continue;
            if (n < 0) return perror("recv"), 1;
            c->len += (size_t)n;
            const int whole = check(c);
            if (whole < 0) return 1;
            if (!whole) continue;
            const int64_t clock = now();
            count(clock - c->born);
            total++;
            if (clock >= until || begun >= quota) continue; /* what is under way is waited for */
            begun++;
            if (ask(c)) return 1;
        }
    }
    return tell(total, begin);
}
