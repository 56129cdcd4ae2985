/* cache.c: entries by key in a hash table, in order of use and in order of their end. */
#include "cache.h"

#include "buffer.h"
#include "json.h"

#include <errno.h>
#include <stdatomic.h>

enum { LEAST_BUCKETS = 64, OVERHEAD = 200 };

typedef struct entry {
    tb_entry seen; /* first */
    atomic_int refs;
    int gone;                             /* it is not in the cache */
    uint64_t hash;
    struct entry *next;                   /* in its bucket */
    struct entry *newer, *older;          /* by use; only answered ones */
    struct entry *later, *sooner;         /* by the end of their time; likewise */
    size_t key_len;
    char key[];
} entry;

struct tb_cache {
    double ttl;
    size_t most, most_bytes;
    entry **buckets;
    size_t size;  /* a power of two */
    size_t count; /* of all entries, */
    size_t done;  /* and of those that are answered */
    size_t bytes;
    entry *oldest, *newest;
    entry *first, *last; /* to end */
    int64_t names;
};

static entry *of_entry(tb_entry *e) { return (entry *)(void *)e; }

static uint64_t hash_of(const char *s, size_t len) {
    uint64_t h = 0x9E3779B97F4A7C15u ^ len;
    for (; len >= 8; s += 8, len -= 8) {
        uint64_t v;
        memcpy(&v, s, 8);
        h = (h ^ v) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
    }
    while (len--) h = (h ^ (unsigned char)*s++) * 0x100000001B3u;
    return h ^ h >> 31;
}

tb_cache *tb_cache_new(double ttl, size_t most, size_t most_bytes) {
    tb_cache *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->ttl = ttl;
    c->most = most;
    c->most_bytes = most_bytes;
    c->size = LEAST_BUCKETS;
    c->buckets = calloc(c->size, sizeof *c->buckets);
    if (c->buckets) return c;
    free(c);
    return NULL;
}

void tb_cache_free(tb_cache *c) {
    if (!c) return;
    for (size_t i = 0; i < c->size; i++) {
        for (entry *e = c->buckets[i], *next; e; e = next) {
            next = e->next;
            tb_entry_release(&e->seen);
        }
    }
    free(c->buckets);
    free(c);
}

size_t tb_cache_entries(const tb_cache *c) { return c->count; }

size_t tb_cache_bytes(const tb_cache *c) { return c->bytes; }

void tb_entry_hold(tb_entry *e) { atomic_fetch_add(&of_entry(e)->refs, 1); }

void tb_entry_release(tb_entry *e) {
    if (!e || atomic_fetch_sub(&of_entry(e)->refs, 1) > 1) return;
    free((char *)(uintptr_t)e->hit);
    free(e);
}

/* ---- keys -------------------------------------------------------------------------------------------------------- */

size_t tb_key_size(size_t who_len, size_t tool_len, size_t word_len) { return 9 + who_len + tool_len + word_len; }

/* With the lengths in front, no two calls have one key by chance. */
void tb_key(char *to, const char *who, size_t who_len, const char *tool, size_t tool_len, const char *word,
            size_t word_len, int digest) {
    const uint32_t lengths[2] = {(uint32_t)who_len, (uint32_t)tool_len};
    memcpy(to, lengths, sizeof lengths);
    to[8] = digest ? 1 : 0;
    memcpy(to + 9, who, who_len);
    memcpy(to + 9 + who_len, tool, tool_len);
    memcpy(to + 9 + who_len + tool_len, word, word_len);
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

static void grow(tb_cache *c) {
    entry **bigger = calloc(2 * c->size, sizeof *bigger);
    if (!bigger) return; /* longer chains, no more */
    for (size_t i = 0; i < c->size; i++) {
        for (entry *e = c->buckets[i], *next; e; e = next) {
            next = e->next;
            entry **bucket = &bigger[e->hash & (2 * c->size - 1)];
            e->next = *bucket;
            *bucket = e;
        }
    }
    free(c->buckets);
    c->buckets = bigger;
    c->size *= 2;
}

static void unlink_use(tb_cache *c, entry *e) {
    *(e->older ? &e->older->newer : &c->oldest) = e->newer;
    *(e->newer ? &e->newer->older : &c->newest) = e->older;
    e->newer = e->older = NULL;
}

static void link_use(tb_cache *c, entry *e) {
    e->older = c->newest;
    *(c->newest ? &c->newest->newer : &c->oldest) = e;
    c->newest = e;
}

static void forget(tb_cache *c, entry *e) {
    if (e->gone) return;
    entry **at = &c->buckets[e->hash & (c->size - 1)];
    while (*at != e) at = &(*at)->next;
    *at = e->next;
    e->gone = 1;
    c->count--;
    if (e->seen.until > 0) {
        unlink_use(c, e);
        *(e->sooner ? &e->sooner->later : &c->first) = e->later;
        *(e->later ? &e->later->sooner : &c->last) = e->sooner;
        c->done--;
        c->bytes -= e->seen.size;
    }
    tb_entry_release(&e->seen);
}

tb_entry *tb_cache_find(tb_cache *c, const char *key, size_t len, double now) {
    const uint64_t hash = hash_of(key, len);
    entry *e = c->buckets[hash & (c->size - 1)];
    while (e && (e->hash != hash || e->key_len != len || memcmp(e->key, key, len))) e = e->next;
    if (!e) return NULL;
    if (e->seen.until > 0) {
        if (e->seen.until <= now) {
            forget(c, e);
            return NULL;
        }
        unlink_use(c, e);
        link_use(c, e);
    }
    tb_entry_hold(&e->seen);
    return &e->seen;
}

tb_entry *tb_entry_new(const char *key, size_t len) {
    entry *e = calloc(1, sizeof *e + len);
    if (!e) return NULL;
    memcpy(e->key, key, len);
    e->key_len = len;
    e->hash = hash_of(key, len);
    e->gone = 1;
    atomic_init(&e->refs, 1);
    return &e->seen;
}

void tb_cache_begin(tb_cache *c, tb_entry *te) {
    entry *e = of_entry(te);
    te->name = ++c->names;
    tb_entry_hold(te);
    e->gone = 0;
    if (++c->count > c->size) grow(c);
    entry **bucket = &c->buckets[e->hash & (c->size - 1)];
    e->next = *bucket;
    *bucket = e;
}

void tb_cache_drop(tb_cache *c, tb_entry *e) { forget(c, of_entry(e)); }

void tb_cache_expire(tb_cache *c, double now) {
    while (c->first && c->first->seen.until <= now) forget(c, c->first);
}

/* ---- answers ----------------------------------------------------------------------------------------------------- */

static const char *const REPEATED[] = {"\"ok\"", "\"status\"", "\"output_json\"", "\"error\"", "\"type\"",
                                       "\"code\"", "\"aid\""};
enum { REPEATED_COUNT = sizeof REPEATED / sizeof *REPEATED };
static const char MARK[] = "\"idempotent_hit\":true,\"ds_state\":{}}\n";

typedef struct {
    const char *from;
    size_t len;
} text;

/* The members of a (valid) reply that a hit repeats. Of one that stands twice, the last counts. */
static void find_members(const char *line, size_t len, text found[REPEATED_COUNT]) {
    json_reader r = {.p = line, .end = line + len, .begin = line, .max_depth = JSON_MAX_DEPTH};
    json_space(&r);
    if (r.p < r.end) r.p++;
    for (;;) {
        int escaped;
        char plain[64];
        json_space(&r);
        if (r.p >= r.end || *r.p != '"') return;
        const char *name = r.p;
        if (!json_string(&r, &escaped)) return;
        size_t name_len = (size_t)(r.p - name);
        if (escaped && name_len <= sizeof plain) {
            name_len = json_unescape(name, name_len, plain);
            name = plain;
        }
        json_space(&r);
        r.p++;
        json_space(&r);
        const char *value = r.p;
        if (!json_value(&r, 1)) return;
        for (int i = 0; i < REPEATED_COUNT; i++)
            if (name_len == strlen(REPEATED[i]) && !memcmp(name, REPEATED[i], name_len))
                found[i] = (text){value, (size_t)(r.p - value)};
        json_space(&r);
        if (r.p >= r.end || *r.p++ != ',') return;
    }
}

static int make_hit(tb_entry *e, const char *line, size_t len) {
    text found[REPEATED_COUNT] = {{"false", 5}};
    find_members(line, len, found);
    size_t room = sizeof MARK;
    for (int i = 0; i < REPEATED_COUNT; i++)
        if (found[i].len) room += strlen(REPEATED[i]) + 2 + found[i].len;
    buffer hit = {malloc(room), 0, room};
    if (!hit.data) return -ENOMEM;
    for (int i = 0; i < REPEATED_COUNT; i++) {
        if (!found[i].len) continue;
        buffer_put(&hit, REPEATED[i], strlen(REPEATED[i]));
        buffer_char(&hit, ':');
        buffer_put(&hit, found[i].from, found[i].len);
        buffer_char(&hit, ',');
    }
    buffer_put(&hit, MARK, sizeof MARK - 1);
    e->hit = hit.data;
    e->hit_len = hit.len;
    return 0;
}

int tb_cache_finish(tb_cache *c, tb_entry *te, const char *line, size_t len, double now) {
    entry *e = of_entry(te);
    if (te->until > 0) return 0; /* the first answer counts */
    if (make_hit(te, line, len)) {
        forget(c, e);
        return -ENOMEM;
    }
    te->until = now + c->ttl;
    te->size = te->hit_len + e->key_len + OVERHEAD;
    if (e->gone) return 0; /* for those who hold it */
    c->bytes += te->size;
    c->done++;
    link_use(c, e);
    e->sooner = c->last;
    *(c->last ? &c->last->later : &c->first) = e;
    c->last = e;
    if (c->done > c->most || c->bytes > c->most_bytes) tb_cache_expire(c, now);
    while (c->oldest && (c->done > c->most || c->bytes > c->most_bytes)) forget(c, c->oldest);
    return 0;
}
