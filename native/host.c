/* host.c: one toolhost's conversation: lines out, replies in, in order, with fences between callers. */
#include "inner.h"

#include <errno.h>
#include <stdio.h>

enum { READS_BEFORE_LATE = 64, KEEP = 64 * 1024, MOST_STRANGERS = 64 };

/* ---- coming and going -------------------------------------------------------------------------------------------- */

tb_host *tb_host_new(tb_board *tb, int64_t name, int in, int out) {
    board *b = of_board(tb);
    host *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    h->seen.name = name;
    h->seen.alone = h->seen.quotes = 1;
    h->seen.last_tool = -1;
    h->seen.mark = clock_now();
    h->peer.kind = HOST;
    h->input.kind = INPUT;
    h->out.fd = in;
    h->out_fd = out;
    h->framer = tb_framer_new(b->seen.limits.reply_bytes);
    h->capacity = 16;
    h->flight = calloc(h->capacity, sizeof *h->flight);
    if (!h->framer || !h->flight || watch_fd(b, out, EPOLLIN, &h->peer)) {
        tb_framer_free(h->framer);
        free(h->flight);
        free(h);
        return NULL;
    }
    h->reading = 1;
    h->next = b->hosts;
    if (h->next) h->next->previous = h;
    b->hosts = h;
    return &h->seen;
}

void tb_host_free(tb_board *tb, tb_host *th) {
    board *b = of_board(tb);
    host *h = of_host(th);
    tb_host_forget(th);
    tb_host_mute(tb, th);
    tb_host_deafen(tb, th);
    if (h->previous) h->previous->next = h->next;
    else b->hosts = h->next;
    if (h->next) h->next->previous = h->previous;
    peer **dirty = &b->dirty;
    while (*dirty && *dirty != &h->peer) dirty = &(*dirty)->next_dirty;
    if (*dirty) *dirty = h->peer.next_dirty;
    tb_framer_free(h->framer);
    free(h->flight);
    free(h->out.bytes.data);
    free(h->ids.data);
    free(h);
}

static void stop_reading(board *b, host *h) {
    if (h->reading) unwatch_fd(b, h->out_fd);
    h->reading = 0;
}

void tb_host_mute(tb_board *b, tb_host *h) {
    of_host(h)->muted = 1;
    stop_reading(of_board(b), of_host(h));
}

void tb_host_deafen(tb_board *tb, tb_host *th) {
    host *h = of_host(th);
    if (h->out.watching) unwatch_fd(of_board(tb), h->out.fd);
    h->out.watching = 0;
    h->out.fd = -1;
    h->out.at = h->out.bytes.len;
    th->unsent = 0;
}

/* ---- runs under way ---------------------------------------------------------------------------------------------- */

static run *nth(const host *h, uint32_t i) { return &h->flight[(h->head + i) & (h->capacity - 1)]; }

static int grow(host *h) {
    run *bigger = calloc(h->capacity * 2, sizeof *bigger);
    if (!bigger) return -1;
    for (int32_t i = 0; i < h->seen.runs; i++) bigger[i] = *nth(h, (uint32_t)i);
    free(h->flight);
    h->flight = bigger;
    h->head = 0;
    h->capacity *= 2;
    return 0;
}

/* Where everything has been answered, and said, the memory starts again from its beginning. */
static void tidy(host *h) {
    if (h->seen.runs || h->out.at < h->out.bytes.len) return;
    buffer_clear(&h->out.bytes, KEEP);
    buffer_clear(&h->ids, KEEP);
    h->out.at = 0;
}

/* Else what has been answered is forgotten when it is the greater part. */
static void compact(host *h) {
    const run *first = nth(h, 0);
    const size_t done = first->from < h->out.at ? first->from : h->out.at;
    if (done < KEEP || done < h->out.bytes.len / 2) return;
    memmove(h->out.bytes.data, h->out.bytes.data + done, h->out.bytes.len - done);
    h->out.bytes.len -= done;
    h->out.at -= done;
    const size_t ids_done = first->ids_from;
    memmove(h->ids.data, h->ids.data + ids_done, h->ids.len - ids_done);
    h->ids.len -= ids_done;
    for (int32_t i = 0; i < h->seen.runs; i++) {
        run *r = nth(h, (uint32_t)i);
        r->from -= done;
        r->to -= done;
        r->ids_from -= ids_done;
        r->ids_to -= ids_done;
    }
}

static void pop(host *h) {
    run *first = nth(h, 0);
    caller_release(first->caller);
    for (int32_t i = 0; first->entries && i < first->count; i++) tb_entry_release(first->entries[first->entries_at + i]);
    free(first->entries);
    if (first->tool >= 0) h->seen.working--;
    h->head = (h->head + 1) & (h->capacity - 1);
    h->seen.runs--;
    tidy(h);
}

int host_send(board *b, host *h, const tb_run *given) {
    if ((uint32_t)h->seen.runs == h->capacity && grow(h)) return -ENOMEM;
    if (h->seen.runs) compact(h);
    if (buffer_reserve(&h->out.bytes, given->len + FENCE_NAME + 16) || buffer_reserve(&h->ids, given->ids_len))
        return -ENOMEM;
    tb_entry **entries = NULL;
    if (given->entries) {
        const size_t size = (size_t)given->count * sizeof *entries;
        if (!(entries = malloc(size))) return -ENOMEM;
        memcpy(entries, given->entries, size);
    }
    run *r = nth(h, (uint32_t)h->seen.runs);
    *r = (run){.who = given->who, .work = given->work, .at = given->at, .tool = given->tool, .suspect = given->suspect,
               .count = given->count, .timeout = given->timeout, .begun = b->seen.now};
    if (given->tool >= 0) {
        if (h->seen.last != given->who) { /* what it may still have to say to that one must not be this one's answer */
            if (h->seen.last && h->seen.quotes) {
                r->fence_len =
                    (size_t)snprintf(r->fence, FENCE_NAME, "%s%llu", b->fence, (unsigned long long)++b->fences);
                r->suspect = h->seen.last_tool;
                buffer_put(&h->out.bytes, "{\"aid\":\"", 8);
                buffer_put(&h->out.bytes, r->fence, r->fence_len);
                buffer_put(&h->out.bytes, "\"}\n", 3);
            }
            h->seen.last = given->who;
        }
        h->seen.last_tool = given->tool;
        h->seen.working++;
    }
    r->from = h->out.bytes.len;
    buffer_put(&h->out.bytes, given->lines, given->len);
    r->to = h->out.bytes.len;
    r->entries = entries;
    r->has_ids = given->ids != NULL;
    r->ids_from = h->ids.len;
    if (given->ids_len) buffer_put(&h->ids, given->ids, given->ids_len);
    r->ids_to = h->ids.len;
    if (given->caller) {
        r->caller = of_caller(given->caller);
        r->caller->refs++;
    }
    h->seen.inflight += given->count;
    h->seen.unsent = outbox_left(&h->out);
    if (!h->seen.runs++) {
        h->seen.mark = b->seen.now;
        arm(b, h);
    }
    make_dirty(b, &h->peer);
    return 0;
}

int tb_host_send(tb_board *tb, tb_host *h, const tb_run *r) {
    board *b = of_board(tb);
    b->seen.now = clock_now();
    return host_send(b, of_host(h), r);
}

int tb_host_peek(const tb_host *th, int32_t i, tb_run *out) {
    const host *h = (const host *)(const void *)th;
    if (i < 0 || i >= th->runs) return -1;
    const run *r = nth(h, (uint32_t)i);
    *out = (tb_run){.who = r->who, .caller = r->caller ? &r->caller->seen : NULL, .work = r->work, .at = r->at,
                    .tool = r->tool, .suspect = r->suspect, .fenced = r->fence_len > 0, .count = r->count,
                    .lines = h->out.bytes.data + r->from, .len = r->to - r->from,
                    .ids = r->has_ids ? h->ids.data + r->ids_from : NULL, .ids_len = r->ids_to - r->ids_from,
                    .entries = r->entries ? r->entries + r->entries_at : NULL, .timeout = r->timeout};
    return 0;
}

/* The first lines have their answer. What is left of the run keeps its place. */
static void answered(host *h, run *r, int32_t lines) {
    for (int32_t i = 0; r->entries && i < lines; i++) tb_entry_release(r->entries[r->entries_at++]);
    r->count -= lines;
    h->seen.inflight -= lines;
    if (!r->count) {
        pop(h);
        return;
    }
    r->from += tb_skip_lines(h->out.bytes.data + r->from, r->to - r->from, (size_t)lines);
    if (r->has_ids)
        r->ids_from += tb_skip_lines(h->ids.data + r->ids_from, r->ids_to - r->ids_from, (size_t)lines);
    if (r->at >= 0) r->at += lines;
}

void tb_host_take(tb_host *h, int32_t lines) { answered(of_host(h), nth(of_host(h), 0), lines); }

void tb_host_forget(tb_host *th) {
    host *h = of_host(th);
    while (th->runs) {
        th->inflight -= nth(h, 0)->count;
        pop(h);
    }
}

/* ---- replies ----------------------------------------------------------------------------------------------------- */

static void blame(board *b, host *h, int what, int32_t tool, const tb_taken *t) {
    int64_t *row = add_row(b, what, h->seen.name);
    h->waiting = what != TB_ROW_STRANGER;
    if (!row) return;
    row[TB_R_TOOL] = tool;
    row[TB_R_VALUE] = h->seen.strangers;
    if (what != TB_ROW_JUNK) return;
    row[TB_R_DATA] = row_data(b, t->junk, t->junk_len);
    row[TB_R_DATA_LEN] = row[TB_R_DATA] < 0 ? 0 : (int64_t)t->junk_len;
}

/* The owner's own run is answered with one line. */
static int tell_owner(board *b, host *h, const run *r, const tb_taken *t, const buffer *out) {
    int64_t *row = add_row(b, TB_ROW_REPLY, h->seen.name);
    if (!row) return -1;
    row[TB_R_TOOL] = r->tool;
    row[TB_R_VALUE] = r->work;
    row[TB_R_ABOUT] = t->succeeded;
    row[TB_R_AT] = (int64_t)((b->seen.now - r->begun) * 1e9);
    row[TB_R_DATA] = row_data(b, out->data, out->len);
    row[TB_R_DATA_LEN] = (int64_t)out->len;
    if (row[TB_R_DATA] >= 0) return 0;
    drop_row(b);
    return -1;
}

static void tally(board *b, host *h, const run *r, const tb_taken *t, size_t bytes) {
    if (r->tool < 0) return;
    tb_tool *tool = tool_of(b, r->tool);
    h->seen.calls += t->lines;
    if (!tool) return;
    tool->size += ((double)bytes / t->lines - tool->size) / 2;
    if (r->work) return; /* its owner counts */
    tb_latency_add(&tool->latency, b->seen.now - r->begun, t->lines);
    if (tool->counted) {
        int64_t *row = add_row(b, TB_ROW_COUNT, h->seen.name);
        if (!row) return;
        row[TB_R_TOOL] = r->tool;
        row[TB_R_COUNT] = t->lines;
        row[TB_R_VALUE] = t->succeeded;
        return;
    }
    tool->passed += t->lines;
    tool->failed += t->lines - t->succeeded;
    tool->used = b->seen.now;
}

/* Answers under a key are kept, whoever is still there to hear them. */
static void keep(board *b, host *h, const run *r, const char *lines, const char *end, int32_t count) {
    for (int32_t i = 0; i < count; i++) {
        tb_entry *e = r->entries[r->entries_at + i];
        const size_t len = line_size(lines, end);
        if (tb_cache_finish(b->cache, e, lines, len, b->seen.now)) b->failed = 1;
        if (e->watched) {
            int64_t *row = add_row(b, TB_ROW_KEPT, h->seen.name);
            if (row) row[TB_R_VALUE] = e->name;
        }
        lines += len;
    }
}

/* As many replies of the first run as there are. Those in turn go straight into their caller's outbox. */
static void take_some(board *b, host *h, run *r, tb_taken *t) {
    caller *c = r->caller;
    const int direct = c && !r->work && caller_in_turn(c, r->at);
    buffer *out = direct ? &c->out.bytes : &b->scratch;
    if (!direct) buffer_clear(out, BATCH_KEEP);
    const size_t before = out->len;
    memset(t, 0, sizeof *t);
    if (take_more(h->framer, out, r->count, r->fence, r->fence_len, b->fence, b->fence_len,
                  r->has_ids ? h->ids.data + r->ids_from : NULL, r->ids_to - r->ids_from, b->seen.limits.depth, t)) {
        b->failed = 1;
        t->stopped = TB_REPLY_SWALLOWED; /* by us */
    }
    if (t->fenced) r->fence_len = 0;
    if (r->work && t->lines && !t->stopped && tell_owner(b, h, r, t, out)) t->stopped = TB_REPLY_SWALLOWED;
    if (t->stopped == TB_REPLY_SWALLOWED) { /* whose the lines before it are, nobody can tell */
        out->len = before;
        t->lines = 0;
    }
    if (!t->lines) return;
    tally(b, h, r, t, out->len - before);
    if (r->entries) keep(b, h, r, out->data + before, out->data + out->len, t->lines);
    if (r->work) return;
    if (direct) caller_settled(b, c, r->at, t->lines);
    else if (c) caller_settle(b, c, r->at, out->data, out->len, t->lines);
}

/* Time moves on: when the next one is late, who may come in. */
static void progress(board *b, host *h, int called) {
    h->seen.mark = b->seen.now;
    if (h->seen.runs) arm(b, h);
    if (!called || (h->seen.runs && h->seen.alone)) return;
    if (h->seen.alone) add_row(b, TB_ROW_REST, h->seen.name);
    else if (h->seen.tell || (h->seen.pool && h->seen.pool->wants) ||
             (h->seen.max_calls && h->seen.calls >= h->seen.max_calls))
        add_row(b, TB_ROW_FREE, h->seen.name);
}

/* Gives each complete reply to the run that it belongs to: the first one. */
static void settle(board *b, host *h) {
    tb_taken t = {0};
    int64_t lines = 0;
    int32_t tool = -1, first = h->seen.runs ? nth(h, 0)->tool : -1;
    int mixed = 0;
    while (h->seen.runs && !h->waiting) {
        run *r = nth(h, 0);
        const int32_t asked = r->count, suspect = r->suspect, mine = r->tool;
        take_some(b, h, r, &t);
        const int ours = r->fence_len || mine < 0; /* the line at fault answers one of our own */
        if (t.lines) {
            lines += t.lines;
            if (mine >= 0) {
                mixed |= tool >= 0 && tool != mine;
                tool = mine;
            }
            answered(h, r, t.lines);
        }
        if (t.stopped == TB_REPLY_STRANGER) {
            if (++h->seen.strangers == 1 || h->seen.strangers == MOST_STRANGERS + 1)
                blame(b, h, TB_ROW_STRANGER, suspect, &t);
        } else if (t.stopped) {
            const int what = t.stopped == TB_REPLY_JUNK ? TB_ROW_JUNK
                             : t.stopped == TB_REPLY_OVERSIZE ? TB_ROW_OVERSIZE : TB_ROW_SWALLOWED;
            blame(b, h, what, ours ? suspect : mine, &t);
        } else if (t.lines < asked) {
            break;
        }
    }
    if (!h->seen.runs && !h->waiting && tb_framer_pending(h->framer)) {
        blame(b, h, TB_ROW_UNASKED, first, &t);
    } else if (lines && !h->waiting) {
        if (tool >= 0 && !mixed && tool_of(b, tool)) tb_learn(tool_of(b, tool), (b->seen.now - h->seen.mark) / (double)lines);
        progress(b, h, tool >= 0);
    }
}

void tb_host_resume(tb_board *tb, tb_host *h) {
    board *b = of_board(tb);
    b->seen.now = h->mark = clock_now();
    of_host(h)->waiting = 0;
    if (h->runs) arm(b, of_host(h));
    settle(b, of_host(h));
    if (!h->runs && !of_host(h)->waiting) progress(b, of_host(h), 1);
}

void host_readable(board *b, host *h) {
    if (h->muted) return;
    const ssize_t got = tb_framer_read(h->framer, h->out_fd);
    if (got > 0) {
        settle(b, h);
    } else if (got != -EAGAIN && got != -EINTR) {
        int64_t *row = add_row(b, got ? TB_ROW_UNREADABLE : TB_ROW_CLOSED, h->seen.name);
        if (row) row[TB_R_VALUE] = -got;
        stop_reading(b, h);
    }
}

int tb_host_read(tb_board *tb, tb_host *th) {
    board *b = of_board(tb);
    host *h = of_host(th);
    int something = 0;
    b->seen.now = clock_now();
    while (th->runs && !h->waiting && !h->muted && tb_framer_read(h->framer, h->out_fd) > 0) {
        something = 1;
        settle(b, h);
    }
    return something;
}

int64_t tb_host_lines(tb_board *tb, tb_host *th) {
    host *h = of_host(th);
    tb_line line;
    int64_t lines = 0;
    tb_host_mute(tb, th);
    do {
        while (tb_framer_next(h->framer, &line) != TB_NONE) lines++;
    } while (tb_framer_read(h->framer, h->out_fd) > 0);
    return lines;
}

/* We may be the ones who are late: what has been said in time counts. */
void host_late(board *b, host *h) {
    const int64_t calls = h->seen.calls;
    const int32_t runs = h->seen.runs;
    for (int i = 0; i < READS_BEFORE_LATE && h->seen.runs == runs && h->seen.calls == calls && !h->waiting; i++) {
        if (h->muted || tb_framer_read(h->framer, h->out_fd) <= 0) break;
        settle(b, h);
    }
    if (h->seen.runs != runs || h->seen.calls != calls || h->waiting) return;
    add_row(b, TB_ROW_LATE, h->seen.name);
    h->waiting = 1;
}

void host_flush(board *b, host *h) {
    const int failed = h->out.fd < 0 ? 0 : outbox_write(&h->out);
    h->seen.unsent = outbox_left(&h->out);
    if (!failed) tidy(h);
    const int watching = failed == -EAGAIN;
    if (watching && !h->out.watching) watch_fd(b, h->out.fd, EPOLLOUT, &h->input);
    if (!watching && h->out.watching) unwatch_fd(b, h->out.fd);
    h->out.watching = watching;
    if (failed && !watching) {
        add_row(b, TB_ROW_BROKEN, h->seen.name);
        tb_host_deafen(&b->seen, &h->seen);
    }
}
