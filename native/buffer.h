/* buffer.h: a growing byte buffer. Internal. */
#ifndef TB_BUFFER_H
#define TB_BUFFER_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct {
    char *data;
    size_t len;
    size_t capacity;
} buffer;

enum { LARGE_PAGE = 2 * 1024 * 1024 };

/* realloc, but something long comes in large pages, where the system has them: to touch 10 MB in small ones takes longer
 * than all that is done with it. NULL without memory; `data` is as it was then. */
static inline char *grown(char *data, size_t len, size_t want) {
    if (want < 2 * LARGE_PAGE) return realloc(data, want);
    void *fresh;
    want = (want + LARGE_PAGE - 1) & ~(size_t)(LARGE_PAGE - 1);
    if (posix_memalign(&fresh, LARGE_PAGE, want)) return NULL;
    madvise(fresh, want, MADV_HUGEPAGE);
    if (len) memcpy(fresh, data, len);
    free(data);
    return fresh;
}

/* Room for `more` bytes behind what is there; 0, or -1 without memory. */
static inline int buffer_reserve(buffer *b, size_t more) {
    if (b->capacity - b->len >= more) return 0;
    size_t want = b->capacity ? b->capacity : 4096;
    while (want - b->len < more) want *= 2;
    char *fresh = grown(b->data, b->len, want);
    if (!fresh) return -1;
    b->data = fresh;
    b->capacity = want;
    return 0;
}

/* These assume that the room was reserved. */
static inline void buffer_put(buffer *b, const char *data, size_t len) {
    memcpy(b->data + b->len, data, len);
    b->len += len;
}

static inline void buffer_char(buffer *b, char c) { b->data[b->len++] = c; }

/* The length of a line that is known to end before `to`, its end included. */
static inline size_t line_size(const char *line, const char *to) {
    return (size_t)((const char *)memchr(line, '\n', (size_t)(to - line)) - line) + 1;
}

/* Empties it, and gives back what one huge line had made it grow to. */
static inline void buffer_clear(buffer *b, size_t keep) {
    b->len = 0;
    if (b->capacity > keep) {
        free(b->data);
        b->data = NULL;
        b->capacity = 0;
    }
}

#endif
