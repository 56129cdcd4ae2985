/* cache.h: at most one execution a key: results kept for a while, by key. No I/O, the clock is an argument. */
#ifndef TB_CACHE_H
#define TB_CACHE_H

#include <stddef.h>
#include <stdint.h>

/* What follows is read by cffi as well: plain declarations only. */

/* Bounded by entries and bytes: the expired go first, then the least recently used; never one under way. */
typedef struct tb_cache tb_cache;

/* One key: under way, or answered. It stays as long as anybody holds it, also when the cache has forgotten it. */
typedef struct {
    int64_t name;     /* no other entry of the cache has it */
    double until;     /* 0: under way */
    size_t size;      /* bytes that it costs */
    int32_t watched;  /* somebody waits for the answer: whoever brings it has to say so */
    const char *hit;  /* the answer for a duplicate, without the opening brace: `"ok":…}` and a line end */
    size_t hit_len;
} tb_entry;

tb_cache *tb_cache_new(double ttl, size_t most, size_t most_bytes);
void tb_cache_free(tb_cache *c);
size_t tb_cache_entries(const tb_cache *c); /* also those under way */
size_t tb_cache_bytes(const tb_cache *c);

/* The key of a call: who asks, for which tool, under which word (or its digest, where it is long). Into `to`, which has
 * room for tb_key_size. */
size_t tb_key_size(size_t who_len, size_t tool_len, size_t word_len);
void tb_key(char *to, const char *who, size_t who_len, const char *tool, size_t tool_len, const char *word,
            size_t word_len, int digest);

/* Each of these gives an entry that the caller holds until tb_entry_release; or NULL. */
tb_entry *tb_cache_find(tb_cache *c, const char *key, size_t len, double now); /* alive */
tb_entry *tb_entry_new(const char *key, size_t len);                           /* not in the cache yet */
void tb_cache_begin(tb_cache *c, tb_entry *e); /* it is under way. Nobody has used its key: tb_cache_find says so */
/* It has its answer, a reply's line (whatever id it had). 0, or -ENOMEM: then the key is free. */
int tb_cache_finish(tb_cache *c, tb_entry *e, const char *line, size_t len, double now);
void tb_cache_drop(tb_cache *c, tb_entry *e); /* its call has not run: the key is free, as if it had not been used */
void tb_cache_expire(tb_cache *c, double now);
void tb_entry_hold(tb_entry *e);
void tb_entry_release(tb_entry *e); /* by any thread */

#endif
