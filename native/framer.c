/* framer.c: bytes in, lines out, the cap inside. The search for a line's end resumes where it stopped. */
#include "buffer.h"
#include "wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { READ_SIZE = 64 * 1024, LONG_LINE = 1024 * 1024 };

struct tb_framer {
    char *buf;
    size_t cap;      /* longest line, without its end */
    size_t capacity; /* of buf */
    size_t start;    /* first byte not yet taken */
    size_t seen;     /* no '\n' in [start, seen) */
    size_t end;
    int skipping;    /* inside the rest of an oversize line */
    int ended;
};

tb_framer *tb_framer_new(size_t cap) {
    tb_framer *f = calloc(1, sizeof *f);
    if (f) f->cap = cap;
    return f;
}

void tb_framer_free(tb_framer *f) {
    if (!f) return;
    free(f->buf);
    free(f);
}

size_t tb_framer_pending(const tb_framer *f) { return f->end - f->start; }

int tb_framer_skipping(const tb_framer *f) { return f->skipping; }

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

/* Makes room for at least one byte, and for a whole read unless that would pass the bound. */
static int make_room(tb_framer *f) {
    const size_t bound = f->cap + 2 + READ_SIZE;
    const size_t held = f->end - f->start;
    if (held == 0) {
        f->start = f->seen = f->end = 0;
        if (f->capacity > 4 * READ_SIZE) { /* a long line has passed: give its memory back */
            free(f->buf);
            f->buf = NULL;
            f->capacity = 0;
        }
    }
    if (f->capacity - f->end >= READ_SIZE) return 0;
    if (f->start) {
        memmove(f->buf, f->buf + f->start, held);
        f->seen -= f->start;
        f->end = held;
        f->start = 0;
        if (f->capacity - held >= READ_SIZE) return 0;
    }
    size_t want = f->capacity ? f->capacity * 2 : READ_SIZE;
    while (want - held < READ_SIZE) want *= 2;
    if (want > LONG_LINE) want = bound; /* it costs nothing until it is touched, and need not be moved again */
    want = min_size(want, bound);
    if (want <= f->capacity) return 0; /* at the bound: held <= cap + 1 there, so a read fits */
    char *fresh = grown(f->buf, f->end, want);
    if (!fresh) return -ENOMEM;
    f->buf = fresh;
    f->capacity = want;
    return 0;
}

/* Inside an oversize line nothing is kept: what has arrived is dropped up to and with the line's end. */
static void drop_rest(tb_framer *f) {
    char *from = f->buf + f->start;
    char *newline = memchr(from, '\n', f->end - f->start);
    if (newline) {
        f->start = f->seen = (size_t)(newline + 1 - f->buf);
        f->skipping = 0;
    } else {
        f->start = f->seen = f->end = 0;
    }
}

ssize_t tb_framer_read(tb_framer *f, int fd) {
    if (make_room(f)) return -ENOMEM;
    ssize_t n;
    do {
        n = read(fd, f->buf + f->end, f->capacity - f->end);
    } while (n < 0 && errno == EINTR);
    if (n < 0) return -errno;
    f->end += (size_t)n;
    if (f->skipping) drop_rest(f);
    return n;
}

int tb_framer_feed(tb_framer *f, const char *data, size_t len) {
    while (len) {
        if (make_room(f)) return -ENOMEM;
        const size_t free_room = f->capacity - f->end;
        if (!free_room) { /* fed without taking lines: only the bound stops us, so grow past it */
            char *fresh = grown(f->buf, f->end, f->capacity + len);
            if (!fresh) return -ENOMEM;
            f->buf = fresh;
            f->capacity += len;
            continue;
        }
        const size_t n = min_size(len, free_room);
        memcpy(f->buf + f->end, data, n);
        f->end += n;
        data += n;
        len -= n;
        if (f->skipping) drop_rest(f);
    }
    return 0;
}

const char *tb_framer_memory(const tb_framer *f); /* for the scanner: request.c */
const char *tb_framer_memory(const tb_framer *f) { return f->buf; }

void tb_framer_end(tb_framer *f) { f->ended = 1; }

void tb_framer_drop(tb_framer *f) {
    if (f->start == f->end || f->ended) return;
    f->skipping = 1;
    drop_rest(f);
}

static int emit(tb_framer *f, tb_line *line, size_t stop, size_t next) {
    line->data = f->buf + f->start;
    line->len = stop - f->start;
    if (line->len && line->data[line->len - 1] == '\r') line->len--;
    f->start = f->seen = next;
    if (line->len > f->cap) {
        line->len = f->cap;
        return TB_OVERSIZE;
    }
    return TB_LINE;
}

int tb_framer_next(tb_framer *f, tb_line *line) {
    if (f->start == f->end) return TB_NONE;
    char *newline = memchr(f->buf + f->seen, '\n', f->end - f->seen);
    if (newline) {
        const size_t at = (size_t)(newline - f->buf);
        return emit(f, line, at, at + 1);
    }
    f->seen = f->end;
    const size_t held = f->end - f->start;
    /* One byte more may be the '\r' of a line that just fits. */
    if (held > f->cap + 1 || (held == f->cap + 1 && f->buf[f->end - 1] != '\r')) {
        line->data = f->buf + f->start;
        line->len = f->cap;
        f->start = f->seen = f->end; /* the kept part stays in the buffer until the next read */
        f->skipping = !f->ended;
        return TB_OVERSIZE;
    }
    if (f->ended) return emit(f, line, f->end, f->end);
    return TB_NONE;
}
