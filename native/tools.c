/* tools.c: names to indices, with the bit that lets plain calls through. Open addressing, never shrinks. */
#include "wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char *name;
    size_t len;
    uint64_t hash;
    int32_t index;
} entry;

struct tb_tools {
    entry *table;
    size_t size; /* a power of two */
    size_t used;
    unsigned char *open; /* by index */
    size_t open_size;
};

static uint64_t hash_of(const char *s, size_t len) {
    uint64_t h = 1469598103934665603u ^ len;
    while (len >= 8) {
        uint64_t v;
        memcpy(&v, s, 8);
        h = (h ^ v) * 0x9E3779B97F4A7C15u;
        h ^= h >> 32;
        s += 8;
        len -= 8;
    }
    while (len--) h = (h ^ (unsigned char)*s++) * 1099511628211u;
    return h ^ h >> 29;
}

tb_tools *tb_tools_new(void) {
    tb_tools *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->size = 64;
    t->table = calloc(t->size, sizeof *t->table);
    if (t->table) return t;
    free(t);
    return NULL;
}

void tb_tools_free(tb_tools *t) {
    if (!t) return;
    for (size_t i = 0; i < t->size; i++) free(t->table[i].name);
    free(t->table);
    free(t->open);
    free(t);
}

static entry *place(entry *table, size_t size, const char *name, size_t len, uint64_t hash) {
    size_t i = hash & (size - 1);
    while (table[i].name &&
           (table[i].hash != hash || table[i].len != len || memcmp(table[i].name, name, len)))
        i = (i + 1) & (size - 1);
    return &table[i];
}

static int grow(tb_tools *t) {
    entry *bigger = calloc(t->size * 2, sizeof *bigger);
    if (!bigger) return -ENOMEM;
    for (size_t i = 0; i < t->size; i++) {
        const entry *e = &t->table[i];
        if (e->name) *place(bigger, t->size * 2, e->name, e->len, e->hash) = *e;
    }
    free(t->table);
    t->table = bigger;
    t->size *= 2;
    return 0;
}

int tb_tools_put(tb_tools *t, const char *name, size_t len, int32_t index) {
    if (t->used * 2 >= t->size && grow(t)) return -ENOMEM;
    if (index >= 0 && (size_t)index >= t->open_size) {
        const size_t want = (size_t)index * 2 + 16;
        unsigned char *bits = realloc(t->open, want);
        if (!bits) return -ENOMEM;
        memset(bits + t->open_size, 0, want - t->open_size);
        t->open = bits;
        t->open_size = want;
    }
    const uint64_t hash = hash_of(name, len);
    entry *e = place(t->table, t->size, name, len, hash);
    if (!e->name) {
        char *copy = malloc(len + 1);
        if (!copy) return -ENOMEM;
        memcpy(copy, name, len);
        copy[len] = 0;
        *e = (entry){copy, len, hash, index};
        t->used++;
    }
    e->index = index;
    return 0;
}

void tb_tools_open(tb_tools *t, int32_t index, int open) {
    if (index >= 0 && (size_t)index < t->open_size) t->open[index] = open != 0;
}

int32_t tb_tools_find(const tb_tools *t, const char *name, size_t len) {
    const entry *e = place(t->table, t->size, name, len, hash_of(name, len));
    return e->name ? e->index : -1;
}

int tb_tools_is_open(const tb_tools *t, int32_t index) {
    return index >= 0 && (size_t)index < t->open_size && t->open[index];
}
