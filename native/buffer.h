/* buffer.h: a growing byte buffer. Internal. */
#ifndef TB_BUFFER_H
#define TB_BUFFER_H

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char *data;
    size_t len;
    size_t capacity;
} buffer;

/* Room for `more` bytes behind what is there; 0, or -1 without memory. */
static inline int buffer_reserve(buffer *b, size_t more) {
    if (b->capacity - b->len >= more) return 0;
    size_t want = b->capacity ? b->capacity : 4096;
    while (want - b->len < more) want *= 2;
    char *grown = realloc(b->data, want);
    if (!grown) return -1;
    b->data = grown;
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
