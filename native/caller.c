/* caller.c: a caller's lines in, its replies out: exactly one a line, in order unless they carry an id. */
#include "inner.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

enum { LINES_A_SCAN = 512, ROWS_A_TURN = 128, LONG_READ = 65536, READS_AT_THE_END = 64, OUTBOX_KEEP = 256 * 1024 };

/* ---- coming and going -------------------------------------------------------------------------------------------- */

tb_caller *tb_caller_new(tb_board *tb, int64_t name, int fd, const tb_tools *tools) {
    board *b = of_board(tb);
    caller *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->framer = tb_framer_new(b->seen.limits.request_bytes);
    c->seen.name = name;
    c->seen.fd = c->out.fd = fd;
    c->seen.since = clock_now();
    c->peer.kind = CALLER;
    c->tools = tools;
    c->refs = 1;
    c->got = -EAGAIN;
    if (!c->framer || watch_fd(b, fd, EPOLLIN, &c->peer)) {
        tb_framer_free(c->framer);
        free(c);
        return NULL;
    }
    c->seen.reading = 1;
    b->seen.callers++;
    return &c->seen;
}

void caller_release(caller *c) {
    if (!c || --c->refs) return;
    free(c);
}

/* Its memory goes at once; the rest stays until no run is under way for it. */
void tb_caller_close(tb_board *tb, tb_caller *tc) {
    board *b = of_board(tb);
    caller *c = of_caller(tc);
    if (c->closed) return;
    c->closed = 1;
    unwatch_fd(b, c->seen.fd);
    b->seen.callers--;
    b->seen.partial_bytes -= (int64_t)c->seen.partial;
    tb_framer_free(c->framer);
    free(c->out.bytes.data);
    for (int32_t i = 0; i < c->held_count; i++) free(c->held[i].data);
    free(c->held);
    peer **dirty = &b->dirty;
    while (*dirty && *dirty != &c->peer) dirty = &(*dirty)->next_dirty;
    if (*dirty) *dirty = c->peer.next_dirty;
    caller **resuming = &b->resuming;
    while (*resuming && *resuming != c) resuming = &(*resuming)->next_resuming;
    if (*resuming) *resuming = c->next_resuming;
    caller_release(c);
}

void tb_caller_tools(tb_caller *c, const tb_tools *tools) { of_caller(c)->tools = tools; }

size_t tb_caller_pending(const tb_caller *c) { return tb_framer_pending(((const caller *)(const void *)c)->framer); }

int tb_caller_vanished(const tb_caller *c) {
    struct pollfd p = {c->fd, 0, 0};
    return poll(&p, 1, 0) > 0 && p.revents & (POLLHUP | POLLERR);
}

/* What is watched for: lines while we read, room while something is left to be written. */
static void watch(board *b, caller *c, int reading, int writing) {
    if (c->seen.reading == reading && c->out.watching == writing) return;
    const uint32_t before = (c->seen.reading ? EPOLLIN : 0u) | (c->out.watching ? EPOLLOUT : 0u);
    const uint32_t events = (reading ? EPOLLIN : 0u) | (writing ? EPOLLOUT : 0u);
    c->seen.reading = reading;
    c->out.watching = writing;
    if (!events) unwatch_fd(b, c->seen.fd); /* even with no events asked for, epoll would tell of its end for ever */
    else if (!before) watch_fd(b, c->seen.fd, events, &c->peer);
    else {
        struct epoll_event event = {events, {.ptr = &c->peer}};
        epoll_ctl(b->poll, EPOLL_CTL_MOD, c->seen.fd, &event);
    }
}

/* Where not even that can be said, its owner finds out for himself that it has vanished. */
static void gone(board *b, caller *c) {
    if (!c->told && !add_row(b, TB_ROW_GONE, c->seen.name)) shutdown(c->seen.fd, SHUT_RDWR);
    c->told = 1;
    c->seen.ending = 1;
    watch(b, c, 0, 0);
}

/* Without memory for a line, or for its answer: better the end than an answer that never comes, or is the next one's. */
void caller_lose(board *b, caller *c) {
    b->failed = 1;
    gone(b, c);
}

void tb_caller_end(tb_board *tb, tb_caller *tc) {
    board *b = of_board(tb);
    caller *c = of_caller(tc);
    if (c->seen.ending || c->closed) return;
    c->seen.ending = 1;
    watch(b, c, 0, c->out.watching);
    if (tb_caller_vanished(tc)) gone(b, c);
    else make_dirty(b, &c->peer);
}

/* ---- lines in ---------------------------------------------------------------------------------------------------- */

int64_t tb_caller_expect(tb_caller *c, int64_t lines, size_t bytes, int ordered) {
    c->unanswered += lines;
    c->unanswered_bytes += (double)bytes;
    if (!ordered) return -1;
    const int64_t at = c->next_in;
    c->next_in += lines;
    return at;
}

/* The queue of all is full, and more than a fair share of it is this caller's. */
static int fills_the_queue(const board *b, const caller *c) {
    const double most = (double)b->seen.limits.queue_bytes;
    if ((double)b->seen.queued_bytes < most || !c->seen.unanswered) return 0;
    return c->seen.unanswered_bytes * b->seen.callers >= most;
}

/* While draining, all that comes is refused at once: only what it does not read stands against that. */
static int choked(const board *b, const caller *c) {
    const tb_limits *limits = &b->seen.limits;
    if ((int64_t)(c->seen.outbox + c->seen.held) > limits->outbox_bytes) return 1;
    return !b->seen.draining &&
           (c->seen.unanswered >= limits->connection_calls ||
            c->seen.unanswered_bytes >= (double)limits->connection_bytes || fills_the_queue(b, c));
}

int64_t *caller_row(board *b, const caller *c, const int32_t *item, int what, int64_t at) {
    const tb_tool *tool = tool_of(b, item[TB_I_TOOL]);
    if (tool && tool->pool && !tb_shares(tool)) tool->pool->yields = b->seen.turn;
    int64_t *row = add_row(b, what, c->seen.name);
    if (!row) return NULL;
    row[TB_R_TOOL] = item[TB_I_TOOL];
    row[TB_R_COUNT] = item[TB_I_COUNT];
    row[TB_R_AT] = at;
    row[TB_R_VALUE] = item[TB_I_PROBLEM];
    row[TB_R_ABOUT] = item[TB_I_MEMBER];
    return row;
}

int caller_row_lines(board *b, int64_t *row, const char *lines, size_t len, const char *ids, size_t ids_len) {
    row[TB_R_DATA] = row_data(b, lines, len);
    row[TB_R_DATA_LEN] = (int64_t)len;
    row[TB_R_IDS] = row_data(b, ids, ids_len);
    row[TB_R_IDS_LEN] = (int64_t)ids_len;
    return row[TB_R_DATA] < 0 || row[TB_R_IDS] < 0;
}

static int put_members(board *b, int64_t *row, const int32_t *item, const tb_view *v) {
    for (int i = 0; i < TB_MEMBERS; i++) {
        const int32_t from = item[TB_I_SPANS + 2 * i], size = item[TB_I_SPANS + 2 * i + 1];
        row[TB_R_SPANS + 2 * i] = -1;
        if (from < 0 || i == TB_ID || i == TB_INPUT_JSON || i == TB_INPUTS) continue; /* in the lines, or the ids */
        row[TB_R_SPANS + 2 * i] = row_data(b, v->lines + from, (size_t)size);
        row[TB_R_SPANS + 2 * i + 1] = size;
        if (row[TB_R_SPANS + 2 * i] < 0) return -1;
    }
    return 0;
}

/* A line that the policy has to look at, or to refuse, with its members as they stand in it. */
static void one(board *b, caller *c, const int32_t *item, const tb_view *v) {
    const size_t len = (size_t)item[TB_I_OUT_LEN], ids_len = (size_t)item[TB_I_IDS_LEN];
    const int bad = item[TB_I_KIND] == TB_BAD;
    const int64_t at = tb_caller_expect(&c->seen, 1, bad ? 0 : len + ids_len, !ids_len);
    int64_t *row = caller_row(b, c, item, bad ? TB_ROW_BAD : TB_ROW_CALL, at);
    tb_tool *tool = tool_of(b, item[TB_I_TOOL]);
    if (tool && item[TB_I_SPANS + 2 * TB_IDEMPOTENCY_KEY] >= 0) tool->asked = b->seen.turn;
    if (row && !caller_row_lines(b, row, v->out + item[TB_I_OUT], len, v->ids + item[TB_I_IDS], ids_len) &&
        !put_members(b, row, item, v))
        return;
    if (row) drop_row(b);
    caller_lose(b, c);
}

double timeout_of(const board *b, const tb_tool *tool) {
    return tool->timeout < b->seen.limits.max_timeout ? tool->timeout : b->seen.limits.max_timeout;
}

/* A run of plain calls: on to its toolhosts as far as there is room, the rest is the owner's. */
static void plain(board *b, caller *c, const int32_t *item, const tb_view *v) {
    tb_tool *tool = tool_of(b, item[TB_I_TOOL]);
    const char *ids = v->ids + item[TB_I_IDS];
    size_t ids_left = (size_t)item[TB_I_IDS_LEN];
    tb_run r = {.who = c->seen.name,
                .caller = &c->seen,
                .tool = item[TB_I_TOOL],
                .count = item[TB_I_COUNT],
                .lines = v->out + item[TB_I_OUT],
                .len = (size_t)item[TB_I_OUT_LEN],
                .ids = ids_left ? ids : NULL,
                .ids_len = ids_left};
    int64_t at = tb_caller_expect(&c->seen, r.count, r.len + r.ids_len, !r.ids);
    int32_t left = r.count;
    size_t bytes = r.len;
    if (may_pass(b, tool)) {
        r.timeout = timeout_of(b, tool);
        while (left) {
            tb_host *h = tb_pool_pick(tool->pool, r.who);
            const int32_t room = h ? tb_room(h, tool) : 0;
            if (!room) break;
            r.at = at;
            r.count = room < left ? room : left;
            r.len = r.count == left ? bytes : tb_skip_lines(r.lines, bytes, (size_t)r.count);
            r.ids_len = !r.ids ? 0 : r.count == left ? ids_left : tb_skip_lines(r.ids, ids_left, (size_t)r.count);
            if (host_send(b, of_host(h), &r)) break;
            left -= r.count;
            bytes -= r.len;
            r.lines += r.len;
            if (r.ids) r.ids += r.ids_len;
            ids_left -= r.ids_len;
            if (at >= 0) at += r.count;
        }
        if (!left) return;
    }
    int64_t *row = caller_row(b, c, item, TB_ROW_PLAIN, at);
    if (!row || caller_row_lines(b, row, r.lines, bytes, r.ids, ids_left)) {
        if (row) drop_row(b);
        caller_lose(b, c);
        return;
    }
    row[TB_R_COUNT] = left;
    if (tool) tool->waits = 1; /* until the owner has seen to it */
}

/* As many as pass, or until there are enough rows of one caller for one turn: others have something to say, too. */
static void take_lines(board *b, caller *c) {
    tb_view v;
    const int32_t *so_far = &b->rows[b->filling].count, before = *so_far;
    while (!c->seen.ending && !c->closed) {
        if (tb_scan(c->framer, c->tools, b->scanned, LINES_A_SCAN, b->seen.limits.depth, &v)) {
            caller_lose(b, c);
            return;
        }
        if (v.count) c->seen.since = b->seen.now;
        for (int32_t i = 0; i < v.count && !c->told; i++) {
            const int32_t *item = v.items + (size_t)i * TB_ITEM;
            if (item[TB_I_KIND] == TB_PLAIN) plain(b, c, item, &v);
            else if (item[TB_I_KIND] == TB_KEYED) caller_keyed(b, c, item, &v);
            else if (item[TB_I_KIND] == TB_CLOSE) tb_caller_end(&b->seen, &c->seen);
            else one(b, c, item, &v);
        }
        c->more = v.more;
        if (choked(b, c) || (v.more && *so_far - before > ROWS_A_TURN)) {
            watch(b, c, 0, c->out.watching);
            make_dirty(b, &c->peer); /* what choked it may be over before anything else happens */
            return;
        }
        if (!v.more) return;
    }
    c->more = 0;
}

/* Long lines on their way count for everybody's bound: whoever passes it has to come again. */
static void weigh(board *b, caller *c) {
    const size_t pending = tb_framer_pending(c->framer);
    b->seen.partial_bytes += (int64_t)pending - (int64_t)c->seen.partial;
    c->seen.partial = pending;
    if (pending >= LONG_READ && b->seen.partial_bytes > b->seen.limits.queue_bytes)
        add_row(b, TB_ROW_LONG, c->seen.name);
}

void tb_caller_drop(tb_board *b, tb_caller *tc) {
    tb_framer_drop(of_caller(tc)->framer);
    b->partial_bytes -= (int64_t)tc->partial;
    tc->partial = 0;
}

void caller_read(board *b, caller *c) {
    if (!c->seen.reading) return;
    c->got = tb_framer_read(c->framer, c->seen.fd);
    if (b->spoke == c->seen.name) return;
    b->spoke = c->seen.name;
    b->mixed = b->seen.now;
}

void caller_digest(board *b, caller *c) {
    const ssize_t got = c->got;
    c->got = -EAGAIN;
    if (got > 0) {
        take_lines(b, c);
        if (got >= LONG_READ || c->seen.partial) weigh(b, c);
    } else if (got == 0) {
        tb_framer_end(c->framer);
        take_lines(b, c);
        tb_caller_end(&b->seen, &c->seen);
    } else if (got != -EAGAIN && got != -EINTR) {
        gone(b, c);
    }
}

void callers_resume(board *b) {
    b->seen.round++;
    caller *next = b->resuming;
    b->resuming = NULL;
    for (caller *c; (c = next);) {
        next = c->next_resuming;
        c->resuming = 0;
        take_lines(b, c);
        make_dirty(b, &c->peer);
    }
}

void tb_caller_rest(tb_board *tb, tb_caller *tc) {
    board *b = of_board(tb);
    caller *c = of_caller(tc);
    b->seen.now = clock_now();
    b->seen.round++;
    make_dirty(b, &c->peer); /* also where nothing is here: it may leave */
    for (int i = 0; i < READS_AT_THE_END; i++) {
        do take_lines(b, c);
        while (c->more && !choked(b, c));
        if (c->seen.ending || choked(b, c)) return;
        const ssize_t got = tb_framer_read(c->framer, c->seen.fd);
        if (got == 0) tb_caller_end(tb, tc);
        if (got <= 0) return;
    }
    take_lines(b, c);
}

/* ---- replies out ------------------------------------------------------------------------------------------------- */

static void hold(board *b, caller *c, int64_t at, const char *data, size_t len, int64_t lines) {
    if (c->held_count == c->held_capacity) {
        const int32_t want = c->held_capacity ? 2 * c->held_capacity : 16;
        held_reply *grown = realloc(c->held, (size_t)want * sizeof *grown);
        if (!grown) {
            caller_lose(b, c);
            return;
        }
        c->held = grown;
        c->held_capacity = want;
    }
    char *copy = malloc(len ? len : 1);
    if (!copy) {
        caller_lose(b, c);
        return;
    }
    memcpy(copy, data, len);
    int32_t i = c->held_count++;
    for (; i > 0 && c->held[(i - 1) / 2].at > at; i = (i - 1) / 2) c->held[i] = c->held[(i - 1) / 2];
    c->held[i] = (held_reply){at, lines, copy, len};
    c->seen.held += len;
}

static held_reply lowest(caller *c) {
    const held_reply first = c->held[0], last = c->held[--c->held_count];
    int32_t i = 0;
    for (int32_t child; (child = 2 * i + 1) < c->held_count; i = child) {
        if (child + 1 < c->held_count && c->held[child + 1].at < c->held[child].at) child++;
        if (c->held[child].at >= last.at) break;
        c->held[i] = c->held[child];
    }
    c->held[i] = last;
    c->seen.held -= first.len;
    return first;
}

static void write_down(board *b, caller *c, const char *data, size_t len) {
    if (buffer_reserve(&c->out.bytes, len)) caller_lose(b, c);
    else buffer_put(&c->out.bytes, data, len);
}

int caller_in_turn(const caller *c, int64_t at) { return !c->closed && (at < 0 || at == c->seen.next_out); }

void caller_settled(board *b, caller *c, int64_t at, int64_t lines) {
    c->seen.unanswered_bytes -= c->seen.unanswered_bytes * (double)lines / (double)c->seen.unanswered;
    c->seen.unanswered -= lines;
    if (at >= 0) {
        c->seen.next_out += lines;
        while (c->held_count && c->held[0].at == c->seen.next_out) {
            const held_reply next = lowest(c);
            write_down(b, c, next.data, next.len);
            free(next.data);
            c->seen.next_out += next.lines;
        }
    }
    c->seen.outbox = outbox_left(&c->out);
    make_dirty(b, &c->peer);
}

void caller_settle(board *b, caller *c, int64_t at, const char *data, size_t len, int64_t lines) {
    if (c->closed) return;
    if (caller_in_turn(c, at)) {
        write_down(b, c, data, len);
        caller_settled(b, c, at, lines);
    } else {
        hold(b, c, at, data, len, lines);
        caller_settled(b, c, -1, lines);
    }
}

int tb_caller_put(tb_board *tb, tb_caller *c, int64_t at, const char *data, size_t len, int64_t lines) {
    board *b = of_board(tb);
    caller_settle(b, of_caller(c), at, data, len, lines);
    return b->failed ? -ENOMEM : 0;
}

/* After each round: read on, stop reading, or leave. */
static void turn(board *b, caller *c) {
    const int answered = !c->seen.unanswered && !c->seen.outbox;
    if (c->seen.ending) {
        if (answered && !c->told) add_row(b, TB_ROW_FINISHED, c->seen.name);
        c->told |= answered;
    } else if (b->seen.draining && answered) {
        add_row(b, TB_ROW_IDLE, c->seen.name);
    } else if (choked(b, c)) {
        watch(b, c, 0, c->out.watching);
    } else if (!c->seen.reading) {
        if (!c->more) {
            watch(b, c, 1, c->out.watching);
        } else if (!c->resuming) { /* its next turn is in the next round */
            c->resuming = 1;
            c->next_resuming = b->resuming;
            b->resuming = c;
        }
    }
}

void caller_flush(board *b, caller *c) {
    const int waited = c->out.watching;
    const int failed = outbox_write(&c->out);
    if (failed && failed != -EAGAIN) {
        gone(b, c);
        return;
    }
    if (failed) {
        outbox_compact(&c->out);
    } else {
        buffer_clear(&c->out.bytes, OUTBOX_KEEP);
        c->out.at = 0;
    }
    c->seen.outbox = outbox_left(&c->out);
    watch(b, c, c->seen.reading, failed != 0);
    if ((waited && !failed) || (c->seen.wants_room && (int64_t)c->seen.outbox <= b->seen.limits.outbox_bytes))
        add_row(b, TB_ROW_ROOM, c->seen.name);
    turn(b, c);
}
