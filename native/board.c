/* board.c: what has happened, to whom; the rows for the owner; the clock. */
#define _GNU_SOURCE
#include "inner.h"

#include <errno.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 64, ROWS_KEEP = 4096, MOST_SKIPPED = 1024 };
static const double CROWD_SECONDS = 0.005; /* since another caller was the last to speak */
static const double TURN_SECONDS = 0.001; /* then the loop that we live in has something to say, too */

double clock_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

int watch_fd(const board *b, int fd, uint32_t events, void *p) {
    struct epoll_event event = {events, {.ptr = p}};
    return epoll_ctl(b->poll, EPOLL_CTL_ADD, fd, &event) ? -errno : 0;
}

void unwatch_fd(const board *b, int fd) { epoll_ctl(b->poll, EPOLL_CTL_DEL, fd, NULL); }

tb_board *tb_board_new(const tb_limits *limits) {
    board *b = calloc(1, sizeof *b);
    if (!b) return NULL;
    unsigned char random[8] = {0};
    b->seen.limits = *limits;
    b->poll = epoll_create1(EPOLL_CLOEXEC);
    b->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    b->scanned = tb_batch_new();
    b->seen.now = clock_now();
    b->seen.turn = 1;
    if (b->poll < 0 || b->timer < 0 || !b->scanned || watch_fd(b, b->timer, EPOLLIN, NULL) ||
        getrandom(random, sizeof random, 0) != sizeof random) {
        tb_board_free(&b->seen);
        return NULL;
    }
    b->fence_len = (size_t)snprintf(b->fence, sizeof b->fence, "_fence.");
    for (size_t i = 0; i < sizeof random; i++)
        b->fence_len += (size_t)snprintf(b->fence + b->fence_len, 3, "%02x", random[i]);
    b->fence[b->fence_len++] = '.';
    return &b->seen;
}

/* Callers and hosts must have been closed before. */
void tb_board_free(tb_board *tb) {
    if (!tb) return;
    board *b = of_board(tb);
    if (b->poll >= 0) close(b->poll);
    if (b->timer >= 0) close(b->timer);
    tb_batch_free(b->scanned);
    free(b->scratch.data);
    free(b->entries.data);
    for (int i = 0; i < 2; i++) {
        free(b->rows[i].rows);
        free(b->rows[i].data.data);
    }
    free(b->tools);
    free(b);
}

void tb_board_cache(tb_board *b, tb_cache *cache) { of_board(b)->cache = cache; }

int tb_board_fd(const tb_board *b) { return ((const board *)(const void *)b)->poll; }

int tb_board_tool(tb_board *tb, tb_tool *tool) {
    board *b = of_board(tb);
    if (tool->index >= b->tool_count) {
        const int32_t want = 2 * tool->index + 16;
        tb_tool **grown = realloc(b->tools, (size_t)want * sizeof *grown);
        if (!grown) return -ENOMEM;
        memset(grown + b->tool_count, 0, (size_t)(want - b->tool_count) * sizeof *grown);
        b->tools = grown;
        b->tool_count = want;
    }
    b->tools[tool->index] = tool;
    return 0;
}

void tb_board_forget(tb_board *tb, int32_t index) {
    if (tool_of(of_board(tb), index)) of_board(tb)->tools[index] = NULL;
}

tb_tool *tool_of(const board *b, int32_t index) { return index >= 0 && index < b->tool_count ? b->tools[index] : NULL; }

/* ---- rows -------------------------------------------------------------------------------------------------------- */

int64_t *add_row(board *b, int what, int64_t who) {
    rows *r = &b->rows[b->filling];
    if (r->count == r->capacity) {
        const int32_t want = r->capacity ? 2 * r->capacity : 64;
        int64_t *grown = realloc(r->rows, (size_t)want * TB_ROW * sizeof *grown);
        if (!grown) {
            b->failed = 1;
            return NULL;
        }
        r->rows = grown;
        r->capacity = want;
    }
    int64_t *row = r->rows + (size_t)r->count++ * TB_ROW;
    memset(row, 0, TB_ROW * sizeof *row);
    row[TB_R_WHAT] = what;
    row[TB_R_WHO] = who;
    return row;
}

void drop_row(board *b) { b->rows[b->filling].count--; }

int64_t row_data(board *b, const char *data, size_t len) {
    buffer *to = &b->rows[b->filling].data;
    const int64_t at = (int64_t)to->len;
    if (buffer_reserve(to, len)) {
        b->failed = 1;
        return -1;
    }
    if (len) buffer_put(to, data, len);
    return at;
}

int row_align(board *b, size_t to) {
    static const char nothing[16];
    return row_data(b, nothing, (to - b->rows[b->filling].data.len % to) % to) < 0 ? -1 : 0;
}

void make_dirty(board *b, peer *p) {
    if (p->dirty) return;
    p->dirty = 1;
    p->next_dirty = b->dirty;
    b->dirty = p;
}

static caller *caller_of(peer *p) { return (caller *)(void *)((char *)p - offsetof(caller, peer)); }
static host *host_of(peer *p) { return (host *)(void *)((char *)p - offsetof(host, peer)); }
static host *host_of_input(peer *p) { return (host *)(void *)((char *)p - offsetof(host, input)); }

/* Empties them, and gives back what one crowded turn had made them grow to. */
static void forget(rows *r) {
    r->count = 0;
    buffer_clear(&r->data, BATCH_KEEP);
    if (r->capacity <= ROWS_KEEP) return;
    free(r->rows);
    r->rows = NULL;
    r->capacity = 0;
}

static void write_out(board *b) {
    while (b->dirty) {
        peer *p = b->dirty;
        b->dirty = p->next_dirty;
        p->dirty = 0;
        if (p->kind == CALLER) caller_flush(b, caller_of(p));
        else host_flush(b, host_of(p));
    }
}

int tb_board_fetch(tb_board *tb, tb_rows *view) {
    board *b = of_board(tb);
    write_out(b);
    const rows *full = &b->rows[b->filling];
    *view = (tb_rows){full->rows, full->count, b->resuming != NULL, full->data.data};
    b->filling ^= 1;
    b->seen.turn++;
    forget(&b->rows[b->filling]);
    const int failed = b->failed;
    b->failed = 0;
    return failed ? -ENOMEM : 0;
}

/* ---- the clock --------------------------------------------------------------------------------------------------- */

static void set_timer(board *b, double when) {
    struct itimerspec at = {{0, 0}, {(time_t)when, (long)((when - (double)(time_t)when) * 1e9)}};
    b->armed = when;
    timerfd_settime(b->timer, TFD_TIMER_ABSTIME, &at, NULL);
}

/* The clock of a line starts when it is the first. One timer for all; it is moved only when it must be. */
void arm(board *b, host *h) {
    const run *first = &h->flight[h->head & (h->capacity - 1)];
    h->deadline = b->seen.now + first->timeout;
    if (b->armed <= 0 || h->deadline < b->armed) set_timer(b, h->deadline);
}

static void on_timer(board *b) {
    uint64_t times;
    if (read(b->timer, &times, sizeof times) < 0) return;
    double next = 0;
    b->armed = 0;
    for (host *h = b->hosts; h; h = h->next) {
        if (h->seen.runs && !h->waiting && h->deadline <= b->seen.now) host_late(b, h);
        if (h->seen.runs && !h->waiting && (next <= 0 || h->deadline < next)) next = h->deadline;
    }
    if (next > 0) set_timer(b, next);
}

/* ---- what has happened ------------------------------------------------------------------------------------------- */

static void see_to(board *b, const struct epoll_event *events, int count) {
    b->seen.now = clock_now();
    if (b->resuming) callers_resume(b);
    for (int i = 0; i < count; i++) { /* all reads come first: one look at a plugin's file is enough for all of them */
        peer *p = events[i].data.ptr;
        const uint32_t what = events[i].events;
        if (!p || p->kind != CALLER) continue;
        caller *c = caller_of(p);
        if (what & EPOLLOUT || (c->out.watching && what & (EPOLLHUP | EPOLLERR))) make_dirty(b, p);
        if (what & (EPOLLIN | EPOLLHUP | EPOLLERR)) caller_read(b, c);
    }
    b->seen.round++;
    for (int i = 0; i < count; i++) {
        peer *p = events[i].data.ptr;
        if (!p) {
            on_timer(b);
        } else if (p->kind == CALLER) {
            caller_digest(b, caller_of(p));
        } else if (p->kind == HOST) {
            host_readable(b, host_of(p));
        } else {
            make_dirty(b, &host_of_input(p)->peer);
        }
    }
    write_out(b);
}

/* What has been written may be answered sooner than a sleeper can be woken. Where it is not, this is left off for twice as
 * many turns as before; where several callers talk, others need the processor more. */
static int look_again(board *b, struct epoll_event *events) {
    if (b->seen.limits.spin <= 0 || b->seen.now - b->mixed < CROWD_SECONDS || (b->skip && b->skip--)) return 0;
    const double until = b->seen.now + b->seen.limits.spin;
    int count;
    do {
        count = epoll_wait(b->poll, events, EVENTS, 0);
    } while (!count && clock_now() < until);
    if (count > 0) b->skipped = 0;
    else b->skip = b->skipped = b->skipped ? (b->skipped < MOST_SKIPPED ? 2 * b->skipped : MOST_SKIPPED) : 1;
    return count;
}

int tb_board_turn(tb_board *tb, tb_rows *view) {
    board *b = of_board(tb);
    struct epoll_event events[EVENTS];
    const double begin = clock_now();
    int count = epoll_wait(b->poll, events, EVENTS, 0);
    if (count < 0 && errno != EINTR) return -errno;
    do {
        see_to(b, events, count);
    } while (!b->rows[b->filling].count && !b->resuming && !b->failed && b->seen.now - begin < TURN_SECONDS &&
             (count = look_again(b, events)) > 0);
    return tb_board_fetch(tb, view);
}
