/* pipeline.c: a caller in C. Keeps DEPTH calls under way on each of CONNS connections and checks every single reply.
 *
 *   pipeline SOCKET AID CALLS DEPTH CONNS [ids|keys|plain] [payload bytes]
 *
 * Each call's input is unique; a reply must carry it back (the tool has to echo). Prints one JSON object. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int fd;
    long sent, answered, quota;
    char *out, *in;
    size_t out_len, out_at, in_len, in_cap;
    double *born; /* by call, modulo depth */
} conn;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: pipeline SOCKET AID CALLS DEPTH CONNS [plain|ids|keys] [payload]\n");
        return 2;
    }
    const char *path = argv[1], *aid = argv[2];
    const long calls = atol(argv[3]), depth = atol(argv[4]);
    const int conns = atoi(argv[5]);
    const char *mode = argc > 6 ? argv[6] : "plain";
    const size_t payload = argc > 7 ? (size_t)atol(argv[7]) : 0;
    const int ids = strcmp(mode, "plain") != 0, keys = !strcmp(mode, "keys");
    char *pad = calloc(payload + 1, 1);
    memset(pad, 'p', payload);
    conn *all = calloc((size_t)conns, sizeof *all);
    struct pollfd *polls = calloc((size_t)conns, sizeof *polls);
    const size_t room = ((size_t)depth + 1) * (payload + 256);
    double *latencies = malloc(sizeof(double) * (size_t)(calls + conns));
    long total = 0, wrong = 0, failed = 0, open_conns = conns;
    for (int i = 0; i < conns; i++) {
        struct sockaddr_un addr = {.sun_family = AF_UNIX};
        strncpy(addr.sun_path, path, sizeof addr.sun_path - 1);
        all[i].fd = socket(AF_UNIX, SOCK_STREAM, 0);
        if (connect(all[i].fd, (struct sockaddr *)&addr, sizeof addr)) {
            perror(path);
            return 1;
        }
        all[i].quota = calls / conns;
        all[i].out = malloc(room);
        all[i].in_cap = room + 65536;
        all[i].in = malloc(all[i].in_cap);
        all[i].born = calloc((size_t)depth, sizeof(double));
        polls[i] = (struct pollfd){all[i].fd, POLLIN, 0};
    }
    const double begin = now();
    while (open_conns) {
        for (int i = 0; i < conns; i++) {
            conn *c = &all[i];
            if (c->fd < 0) continue;
            if (c->out_at == c->out_len) c->out_at = c->out_len = 0;
            while (c->sent < c->quota && c->sent - c->answered < depth && c->out_len + payload + 256 < room) {
                char extra[128] = "";
                if (ids) snprintf(extra, sizeof extra, "\"id\":%ld,", c->sent);
                if (keys) snprintf(extra + strlen(extra), 64, "\"idempotency_key\":\"%d-%ld-%d\",", i, c->sent, getpid());
                c->out_len += (size_t)sprintf(c->out + c->out_len, "{%s\"aid\":\"%s\",\"input_json\":\"{\\\"n\\\":\\\"%d-%ld\\\",\\\"p\\\":\\\"%s\\\"}\"}\n",
                                              extra, aid, i, c->sent, pad);
                c->born[c->sent % depth] = now();
                c->sent++;
            }
            if (c->out_at < c->out_len) {
                const ssize_t n = send(c->fd, c->out + c->out_at, c->out_len - c->out_at, MSG_DONTWAIT | MSG_NOSIGNAL);
                if (n > 0) c->out_at += (size_t)n;
                else if (errno != EAGAIN) {
                    perror("send");
                    return 1;
                }
            }
            polls[i].events = (short)(POLLIN | (c->out_at < c->out_len ? POLLOUT : 0));
        }
        if (poll(polls, (nfds_t)conns, 20000) <= 0) {
            fprintf(stderr, "nothing for 20 s: %ld of %ld answered\n", total, calls);
            return 1;
        }
        for (int i = 0; i < conns; i++) {
            conn *c = &all[i];
            if (c->fd < 0 || !(polls[i].revents & (POLLIN | POLLHUP))) continue;
            const ssize_t n = recv(c->fd, c->in + c->in_len, c->in_cap - c->in_len, MSG_DONTWAIT);
            if (n == 0) {
                fprintf(stderr, "connection %d closed after %ld of %ld\n", i, c->answered, c->quota);
                return 1;
            }
            if (n < 0) continue;
            c->in_len += (size_t)n;
            char *line = c->in, *end;
            while ((end = memchr(line, '\n', c->in_len - (size_t)(line - c->in)))) {
                *end = 0;
                long which = c->answered;
                if (ids && sscanf(line, "{\"id\":%ld,", &which) != 1) wrong++;
                char expect[64];
                snprintf(expect, sizeof expect, "\\\"n\\\":\\\"%d-%ld\\\"", i, which);
                if (strstr(line, "\"ok\":false")) {
                    if (failed++ < 5) fprintf(stderr, "failed: %.300s\n", line);
                } else if (!strstr(line, expect)) {
                    if (wrong++ < 5) fprintf(stderr, "expected %s, got: %.200s\n", expect, line);
                }
                latencies[total++] = now() - c->born[which % depth];
                c->answered++;
                line = end + 1;
            }
            c->in_len -= (size_t)(line - c->in);
            memmove(c->in, line, c->in_len);
            if (c->answered == c->quota) {
                close(c->fd);
                c->fd = -1;
                polls[i].fd = -1;
                open_conns--;
            }
        }
    }
    const double took = now() - begin;
    qsort(latencies, (size_t)total, sizeof *latencies, by_value);
    printf("{\"calls\":%ld,\"seconds\":%.3f,\"per_second\":%.0f,\"p50_us\":%.1f,\"p99_us\":%.1f,\"wrong\":%ld,\"failed\":%ld}\n", total, took,
           (double)total / took, latencies[total / 2] * 1e6, latencies[total * 99 / 100] * 1e6, wrong, failed);
    return wrong != 0;
}
