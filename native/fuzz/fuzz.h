/* fuzz.h: what the fuzz targets share: a promise that must hold, and a record of what was read. */
#ifndef TB_FUZZ_H
#define TB_FUZZ_H

#include "batch.h"

#include <sanitizer/asan_interface.h>
#include <stdio.h>

const char *tb_framer_memory(const tb_framer *f); /* framer.c */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(cond) \
    do { \
        if (!(cond)) { \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #cond); \
            abort(); \
        } \
    } while (0)

/* What was read, written down: what is read alike has the same record. */
static inline void note(buffer *r, const char *data, size_t len) {
    if (!len) return;
    MUST(!buffer_reserve(r, len));
    buffer_put(r, data, len);
}

static inline void note_number(buffer *r, int64_t n) {
    char text[24];
    note(r, text, (size_t)snprintf(text, sizeof text, "%lld ", (long long)n));
}

static inline void must_be_same(const buffer *a, const buffer *b, const char *how) {
    if (a->len == b->len && (!a->len || !memcmp(a->data, b->data, a->len))) return;
    fprintf(stderr, "whole:\n%.*s\n%s:\n%.*s\n", (int)a->len, a->data, how, (int)b->len, b->data);
    abort();
}

/* A batch that was never written to has no memory: then nothing stands there. */
static inline const char *place(const char *text, int32_t at) { return text ? text + at : NULL; }

static inline size_t first_line(const char *text, size_t len) { return text ? tb_skip_lines(text, len, 1) : 0; }

/* Bytes in memory of just their size, so that ASan sees who reads beyond them. */
static inline char *exactly(const uint8_t *data, size_t size) {
    char *copy = malloc(size ? size : 1);
    MUST(copy);
    if (size) memcpy(copy, data, size);
    return copy;
}

/* What a fresh framer was fed ends where its memory does, as far as ASan can tell. */
static inline void wall(const tb_framer *f, size_t size) {
    enum { MEMORY = 64 * 1024 };
    if (size < MEMORY) ASAN_POISON_MEMORY_REGION(tb_framer_memory(f) + size, MEMORY - size);
}

#endif
