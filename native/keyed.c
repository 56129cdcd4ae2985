/* keyed.c: a caller's calls with idempotency keys: what has been answered is repeated, what is new goes on. */
#include "inner.h"

enum { LONGEST_KEY = 128, MOST_KEY = 1024 }; /* of the caller's own words; with its name and the tool's */

/* One call of a keyed run, and what is left of the run behind it. */
typedef struct {
    const char *line, *id, *key;
    size_t line_len, id_len, key_len; /* the key's without its line end */
    const char *lines_end, *ids_end, *keys_end;
    int64_t at;
} keyed_call;

static void measure(keyed_call *k) {
    k->line_len = line_size(k->line, k->lines_end);
    k->id_len = k->id ? line_size(k->id, k->ids_end) : 0;
    k->key_len = line_size(k->key, k->keys_end) - 1;
}

static void step(keyed_call *k) {
    k->line += k->line_len;
    k->key += k->key_len + 1;
    if (k->id) k->id += k->id_len;
    else k->at++;
}

/* The owner sees to it as to any call with a key. */
static void ask_owner(board *b, caller *c, const int32_t *item, const keyed_call *k) {
    int64_t *row = caller_row(b, c, item, TB_ROW_CALL, k->at);
    if (!row || caller_row_lines(b, row, k->line, k->line_len, k->id, k->id_len)) {
        if (row) drop_row(b);
        caller_lose(b, c);
        return;
    }
    row[TB_R_COUNT] = 1;
    for (int i = 0; i < TB_MEMBERS; i++) row[TB_R_SPANS + 2 * i] = -1;
    const int64_t from = row_data(b, "\"", 1); /* as it stood in the line */
    if (from < 0 || row_data(b, k->key, k->key_len) < 0 || row_data(b, "\"", 1) < 0) {
        drop_row(b);
        caller_lose(b, c);
        return;
    }
    row[TB_R_SPANS + 2 * TB_IDEMPOTENCY_KEY] = from;
    row[TB_R_SPANS + 2 * TB_IDEMPOTENCY_KEY + 1] = (int64_t)k->key_len + 2;
}

static size_t put_key(char key[MOST_KEY], const caller *c, const tb_tool *tool, const keyed_call *k) {
    tb_key(key, c->seen.who, c->seen.who_len, tool->name, tool->name_len, k->key, k->key_len, 0);
    return tb_key_size(c->seen.who_len, tool->name_len, k->key_len);
}

static tb_entry *find(const board *b, const caller *c, const tb_tool *tool, const keyed_call *k) {
    char key[MOST_KEY];
    const size_t len = put_key(key, c, tool, k);
    return tb_cache_find(b->cache, key, len, b->seen.now);
}

static tb_entry *begin(const board *b, const caller *c, const tb_tool *tool, const keyed_call *k) {
    char key[MOST_KEY];
    const size_t len = put_key(key, c, tool, k);
    tb_entry *e = tb_entry_new(key, len);
    if (e) tb_cache_begin(b->cache, e);
    return e;
}

static void repeat(board *b, caller *c, const keyed_call *k, const tb_entry *e) {
    buffer *out = &b->scratch;
    buffer_clear(out, BATCH_KEEP);
    if (buffer_reserve(out, e->hit_len + k->id_len + 16)) {
        caller_lose(b, c);
        return;
    }
    buffer_char(out, '{');
    if (k->id) {
        buffer_put(out, "\"id\":", 5);
        buffer_put(out, k->id, k->id_len - 1);
        buffer_char(out, ',');
    }
    buffer_put(out, e->hit, e->hit_len);
    caller_settle(b, c, k->at, out->data, out->len, 1);
}

static int is_full(const board *b, const caller *c) {
    return (int64_t)(c->seen.outbox + c->seen.held) > b->seen.limits.outbox_bytes;
}

/* Calls with new keys that stand in a row, on their way to one toolhost, or to the owner. */
typedef struct {
    tb_run run;
    host *host;
    int32_t room;
} convoy;

static int tell_owner(board *b, caller *c, const int32_t *item, const tb_run *r) {
    int64_t *row = caller_row(b, c, item, TB_ROW_KEYED, r->at);
    if (!row) return -1;
    row[TB_R_COUNT] = r->count;
    if (!caller_row_lines(b, row, r->lines, r->len, r->ids, r->ids_len) && !row_align(b, sizeof(tb_entry *))) {
        row[TB_R_VALUE] = row_data(b, (const char *)r->entries, (size_t)r->count * sizeof(tb_entry *));
        if (row[TB_R_VALUE] >= 0) return 0;
    }
    drop_row(b);
    return -1;
}

static void hand_over(board *b, caller *c, const int32_t *item, const tb_run *r) {
    if (!tell_owner(b, c, item, r)) {
        tool_of(b, r->tool)->waits = 1; /* until the owner has seen to it */
        return;
    }
    for (int32_t i = 0; i < r->count; i++) { /* they have not run */
        tb_cache_drop(b->cache, r->entries[i]);
        tb_entry_release(r->entries[i]);
    }
    caller_lose(b, c);
}

static void depart(board *b, caller *c, const int32_t *item, convoy *v) {
    if (!v->run.count) return;
    if (!v->host || host_send(b, v->host, &v->run)) hand_over(b, c, item, &v->run);
    v->run.count = 0;
}

/* The next convoy goes to where there is room, or to the owner. */
static int gather(board *b, caller *c, const tb_tool *tool, const keyed_call *k, convoy *v, int32_t left) {
    tb_host *h = may_pass(b, tool) ? tb_pool_pick(tool->pool, c->seen.name) : NULL;
    v->room = h ? tb_room(h, tool) : 0;
    v->host = v->room ? of_host(h) : NULL;
    if (!v->room || v->room > left) v->room = left;
    buffer_clear(&b->entries, BATCH_KEEP);
    if (buffer_reserve(&b->entries, (size_t)v->room * sizeof(tb_entry *))) return -1;
    v->run = (tb_run){.who = c->seen.name, .caller = &c->seen, .tool = tool->index, .at = k->at, .lines = k->line,
                      .ids = k->id, .timeout = timeout_of(b, tool), .entries = (tb_entry **)(void *)b->entries.data};
    return 0;
}

/* A new key: 0, or -1 without memory. */
static int join(board *b, caller *c, const int32_t *item, const tb_tool *tool, const keyed_call *k, convoy *v,
                int32_t left) {
    if (v->run.count && v->run.count == v->room) depart(b, c, item, v);
    if (!v->run.count && gather(b, c, tool, k, v, left)) return -1;
    tb_entry *e = begin(b, c, tool, k);
    if (!e) return -1;
    v->run.entries[v->run.count++] = e;
    v->run.len += k->line_len;
    v->run.ids_len += k->id_len;
    return 0;
}

/* A run of calls with keys: answers that are there are repeated, new keys go on; where a key's call is under way, the
 * owner sees to it. */
void caller_keyed(board *b, caller *c, const int32_t *item, const tb_view *v) {
    const tb_tool *tool = tool_of(b, item[TB_I_TOOL]);
    const size_t len = (size_t)item[TB_I_OUT_LEN], ids_len = (size_t)item[TB_I_IDS_LEN];
    keyed_call k = {.line = v->out + item[TB_I_OUT], .id = ids_len ? v->ids + item[TB_I_IDS] : NULL,
                    .key = v->keys + item[TB_I_KEYS]};
    k.lines_end = k.line + len;
    k.ids_end = k.id ? k.id + ids_len : NULL;
    k.keys_end = k.key + item[TB_I_KEYS_LEN];
    convoy going = {.room = 0};
    k.at = tb_caller_expect(&c->seen, item[TB_I_COUNT], len + ids_len, !k.id);
    const int knows = b->cache && tool && tool->asked != b->seen.turn && !b->seen.draining &&
                      tb_key_size(c->seen.who_len, tool->name_len, LONGEST_KEY) <= MOST_KEY;
    for (int32_t i = 0; i < item[TB_I_COUNT] && !c->told; i++, step(&k)) {
        measure(&k);
        tb_entry *e = knows ? find(b, c, tool, &k) : NULL;
        if (e && e->until > 0 && !is_full(b, c)) {
            depart(b, c, item, &going);
            repeat(b, c, &k, e);
            b->seen.hits++;
        } else if (e || !knows || join(b, c, item, tool, &k, &going, item[TB_I_COUNT] - i)) {
            depart(b, c, item, &going);
            ask_owner(b, c, item, &k);
        }
        tb_entry_release(e);
    }
    depart(b, c, item, &going);
}
