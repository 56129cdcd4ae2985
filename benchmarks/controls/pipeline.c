/* pipeline.c: a caller in C. Keeps DEPTH calls under way on each of CONNS connections and checks every single reply.
 *
 *   pipeline SOCKET AID CALLS DEPTH CONNS [HOW] [payload bytes]
 *   pipeline - AID CALLS DEPTH 1 HOW PAYLOAD COMMAND [ARGUMENT…]      a child's pipes instead of a socket
 *
 * CALLS is a number, or a time ("0.5s"). HOW is "plain", or some of these with commas between:
 *   ids       every call has an id
 *   keys      and an idempotency key of its own
 *   hot=K     and one of K keys, so that nearly all are hits
 *   session   every call names its connection's session
 *   same      every call has the same input, and every reply has to be the same bytes: the client costs least this way
 *   tools=N   '#' in AID is a number below N, in turn
 * Else each call's input is unique. A reply must carry its input back (the tool has to echo). Prints one JSON object. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "latency.h"

enum { FRAME = 512 };

typedef struct {
    int to, from; /* the same descriptor for a socket */
    long sent, answered, quota;
    char *out, *in;
    size_t out_len, out_at, in_len, in_cap;
    int64_t *born; /* by call, modulo depth */
} conn;

typedef struct {
    int ids, keys, session, same;
    long hot, tools;
} how;

static char *pad;
static size_t pad_len;
static char *usual;          /* the first reply, where all have to be the same */
static size_t usual_len;

static int parse_how(const char *words, how *h) {
    char *list = strdup(words), *rest = list, *word;
    while ((word = strsep(&rest, ","))) {
        if (!strcmp(word, "ids")) h->ids = 1;
        else if (!strcmp(word, "keys")) h->ids = h->keys = 1;
        else if (!strcmp(word, "session")) h->session = 1;
        else if (!strcmp(word, "same")) h->same = 1;
        else if (!strncmp(word, "hot=", 4)) h->hot = atol(word + 4);
        else if (!strncmp(word, "tools=", 6)) h->tools = atol(word + 6);
        else if (strcmp(word, "plain")) return fprintf(stderr, "pipeline: what is %s?\n", word), -1;
    }
    free(list);
    return 0;
}

static char *put(char *to, const char *text, size_t len) { return (char *)memcpy(to, text, len) + len; }
#define PUT(to, text) put(to, text, sizeof text - 1)

static char *put_number(char *to, long n) {
    char digits[24], *p = digits + sizeof digits;
    do *--p = (char)('0' + n % 10);
    while (n /= 10);
    return put(to, p, (size_t)(digits + sizeof digits - p));
}

/* What a call's input says, and its reply has to say: "<connection>-<call>". */
static char *put_mark(char *to, const how *h, int who, long n) {
    to = put_number(to, h->same ? 0 : who);
    *to++ = '-';
    return put_number(to, h->same ? 0 : h->hot ? n % h->hot : n);
}

/* By hand: printf would cost more than the broker does. */
static size_t write_line(char *to, const how *h, const char *aid, int who, long n) {
    char *p = PUT(to, "{");
    if (h->ids) p = PUT(put_number(PUT(p, "\"id\":"), n), ",");
    if (h->keys || h->hot) p += sprintf(p, "\"idempotency_key\":\"%d-%ld-%d\",", who, h->hot ? n % h->hot : n, getpid());
    if (h->session) p += sprintf(p, "\"session\":\"s%d\",", who);
    const char *mark = h->tools ? strchr(aid, '#') : NULL;
    p = PUT(p, "\"aid\":\"");
    if (mark) {
        p = put_number(put(p, aid, (size_t)(mark - aid)), n % h->tools);
        aid = mark + 1;
    }
    p = PUT(put(p, aid, strlen(aid)), "\",\"input_json\":\"{\\\"n\\\":\\\"");
    p = PUT(put_mark(p, h, who, n), "\\\",\\\"p\\\":\\\"");
    p = PUT(put(p, pad, pad_len), "\\\"}\"}\n");
    return (size_t)(p - to);
}

static void check(const how *h, int who, long n, const char *line, size_t len) {
    if (h->same && !h->ids && usual) {
        if (len != usual_len || memcmp(line, usual, len)) {
            if (wrong++ < 5) fprintf(stderr, "expected the first reply again, got: %.200s\n", line);
        }
        return;
    }
    static const char head[] = "{\\\"n\\\":\\\"";
    char mark[64], *end = PUT(put_mark(mark, h, who, n), "\\\"");
    const char *found = memmem(line, len, head, sizeof head - 1);
    const size_t before = found ? (size_t)(found - line) : len;
    if (memmem(line, before, "\"ok\":false", 10)) {
        if (failed++ < 5) fprintf(stderr, "failed: %.300s\n", line);
    } else if (!found || memcmp(found + sizeof head - 1, mark, (size_t)(end - mark))) {
        *end = 0;
        if (wrong++ < 5) fprintf(stderr, "expected %s, got: %.200s\n", mark, line);
    } else if (h->same && !usual) {
        usual = malloc(len);
        memcpy(usual, line, usual_len = len);
    }
}

static int start(char **command, conn *c) {
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC)) return -1;
    const pid_t child = fork();
    if (child < 0) return -1;
    if (!child) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        execv(command[0], command);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    for (int i = 0; i < 2; i++) fcntl(i ? in[1] : out[0], F_SETPIPE_SZ, 1 << 20); /* as the broker does */
    fcntl(in[1], F_SETFL, O_NONBLOCK);
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    c->to = in[1];
    c->from = out[0];
    return 0;
}

static int dial(const char *path, conn *c) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    strncpy(addr.sun_path, path, sizeof addr.sun_path - 1);
    c->to = c->from = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->to < 0 || connect(c->to, (struct sockaddr *)&addr, sizeof addr)) return -1;
    return fcntl(c->to, F_SETFL, O_NONBLOCK);
}

int main(int argc, char **argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: pipeline SOCKET|- AID CALLS DEPTH CONNS [HOW] [payload] [COMMAND…]\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    const char *path = argv[1], *aid = argv[2];
    const int timed = strchr(argv[3], 's') != NULL, child = !strcmp(path, "-");
    const long calls = timed ? 0 : atol(argv[3]), depth = atol(argv[4]);
    const int conns = atoi(argv[5]);
    const size_t payload = argc > 7 ? (size_t)atol(argv[7]) : 0;
    how h = {0};
    if (parse_how(argc > 6 ? argv[6] : "plain", &h)) return 2;
    if (child && (conns != 1 || argc < 9)) return fprintf(stderr, "pipeline: a child has one connection, and a command\n"), 2;
    pad = malloc((pad_len = payload) + 1);
    memset(pad, 'p', payload);
    conn *all = calloc((size_t)conns, sizeof *all);
    struct pollfd *polls = calloc((size_t)conns * 2, sizeof *polls);
    const size_t most = payload + FRAME, room = (size_t)(depth + 1) * most;
    long total = 0, open_conns = conns;
    for (int i = 0; i < conns; i++) {
        if (child ? start(argv + 8, &all[i]) : dial(path, &all[i])) return perror(path), 1;
        all[i].quota = timed ? INT64_MAX / 2 : calls / conns;
        all[i].out = malloc(room);
        all[i].in_cap = room + 65536;
        all[i].in = malloc(all[i].in_cap + 1);
        all[i].born = calloc((size_t)depth, sizeof *all[i].born);
    }
    char *line = malloc(most);
    const int alike = h.same && !h.ids && !h.keys && !h.hot && !h.session && !h.tools;
    size_t len = alike ? write_line(line, &h, aid, 0, 0) : 0;
    const int64_t begin = now(), until = timed ? begin + (int64_t)(atof(argv[3]) * 1e9) : INT64_MAX;
    int over = 0;
    while (open_conns) {
        int64_t clock = now();
        if (!over && clock >= until) {
            over = 1; /* what is under way is waited for */
            for (int i = 0; i < conns; i++) {
                all[i].quota = all[i].sent;
                if (all[i].to >= 0 && all[i].answered == all[i].quota) {
                    close(all[i].to);
                    all[i].to = -1;
                    open_conns--;
                }
            }
            if (!open_conns) break;
        }
        for (int i = 0; i < conns; i++) {
            conn *c = &all[i];
            polls[2 * i].fd = polls[2 * i + 1].fd = -1;
            if (c->to < 0) continue;
            if (c->out_at == c->out_len) c->out_at = c->out_len = 0;
            while (c->sent < c->quota && c->sent - c->answered < depth && c->out_len + most < room) {
                if (alike) memcpy(c->out + c->out_len, line, len);
                else len = write_line(c->out + c->out_len, &h, aid, i, c->sent);
                c->out_len += len;
                c->born[c->sent++ % depth] = clock;
            }
            if (c->out_at < c->out_len) {
                const ssize_t n = write(c->to, c->out + c->out_at, c->out_len - c->out_at);
                if (n > 0) c->out_at += (size_t)n;
                else if (errno != EAGAIN) return perror("write"), 1;
            }
            polls[2 * i] = (struct pollfd){c->from, POLLIN, 0};
            if (c->out_at < c->out_len) polls[2 * i + 1] = (struct pollfd){c->to, POLLOUT, 0};
        }
        if (poll(polls, (nfds_t)conns * 2, 20000) <= 0) {
            fprintf(stderr, "nothing for 20 s: %ld answered\n", total);
            return 1;
        }
        for (int i = 0; i < conns; i++) {
            conn *c = &all[i];
            if (c->to < 0 || !(polls[2 * i].revents & (POLLIN | POLLHUP))) continue;
            const ssize_t n = read(c->from, c->in + c->in_len, c->in_cap - c->in_len);
            if (n == 0) {
                fprintf(stderr, "connection %d closed after %ld\n", i, c->answered);
                return 1;
            }
            if (n < 0) continue;
            c->in_len += (size_t)n;
            char *at = c->in, *end;
            clock = now();
            while ((end = memchr(at, '\n', c->in_len - (size_t)(at - c->in)))) {
                *end = 0;
                long which = c->answered;
                if (h.ids && (sscanf(at, "{\"id\":%ld,", &which) != 1 || which < 0 || which >= c->sent)) {
                    wrong++;
                    which = c->answered;
                }
                check(&h, i, which, at, (size_t)(end - at));
                count(clock - c->born[which % depth]);
                total++;
                c->answered++;
                at = end + 1;
            }
            c->in_len -= (size_t)(at - c->in);
            memmove(c->in, at, c->in_len);
            if (c->answered > c->sent) return fprintf(stderr, "more replies than calls\n"), 1;
            if (c->answered == c->quota) {
                close(c->to);
                c->to = -1;
                open_conns--;
            }
        }
    }
    return tell(total, begin);
}
