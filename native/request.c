/* request.c: takes callers' lines from the framer, and sorts them: runs of plain calls, calls to judge, refusals. */
#include "batch.h"
#include "envelope.h"
#include "shape.h"

#include <errno.h>

int tb_tools_is_open(const tb_tools *t, int32_t index); /* tools.c */
const char *tb_framer_memory(const tb_framer *f);       /* framer.c: where its bytes are, until the next feed or read */

enum { LONG_INPUTS = 1024 * 1024, LONGEST_AID = 4096, LONGEST_KEY = 128 };

/* Known members that a plain call may have: they change nothing about how it is run. */
static const int32_t PLAIN = 1 << TB_ID | 1 << TB_AID | 1 << TB_INPUT_JSON | 1 << TB_INPUTS | 1 << TB_TRACEPARENT |
                             1 << TB_RUN_ID | 1 << TB_REQUEST_ID;

static int32_t find_tool(const tb_tools *tools, const envelope *e, char *scratch) {
    const member *m = &e->known[TB_AID];
    const char *text = m->value + 1;
    size_t len = (size_t)(m->end - m->value) - 2;
    if (m->escaped) {
        if (len > LONGEST_AID) return -1;
        len = json_unescape(text, len, scratch);
        text = scratch;
    }
    return tb_tools_find(tools, text, len);
}

static int32_t *new_item(tb_batch *b, int kind) {
    if (b->count == b->capacity) {
        const int32_t want = b->capacity ? b->capacity * 2 : 64;
        int32_t *grown = realloc(b->items, (size_t)want * TB_ITEM * sizeof *grown);
        if (!grown) return NULL;
        b->items = grown;
        b->capacity = want;
    }
    int32_t *item = b->items + (size_t)b->count++ * TB_ITEM;
    memset(item, 0, TB_ITEM * sizeof *item);
    item[TB_I_KIND] = kind;
    item[TB_I_COUNT] = 1;
    item[TB_I_TOOL] = item[TB_I_MEMBER] = -1;
    item[TB_I_OUT] = (int32_t)b->out.len;
    item[TB_I_IDS] = (int32_t)b->ids.len;
    item[TB_I_KEYS] = (int32_t)b->keys.len;
    for (int i = 0; i < TB_MEMBERS; i++) item[TB_I_SPANS + 2 * i] = -1;
    return item;
}

static int put_line(buffer *to, const char *text, size_t len) {
    if (buffer_reserve(to, len + 1)) return -1;
    buffer_put(to, text, len);
    buffer_char(to, '\n');
    return 0;
}

static int put_id(tb_batch *b, const char *from, const char *to) { return put_line(&b->ids, from, (size_t)(to - from)); }

/* A key, quotes included, that can be kept as it stands. */
static int is_simple_key(const char *from, const char *to) {
    const size_t len = (size_t)(to - from) - 2;
    return len && len <= LONGEST_KEY && !memchr(from, '\\', len + 2);
}

static int put_key(tb_batch *b, const char *from, const char *to) {
    return put_line(&b->keys, from + 1, (size_t)(to - from) - 2);
}

/* The item of a plain line: the run before it, where it belongs to one, or its own. NULL without memory. */
static int32_t *run_of(tb_batch *b, int kind, int32_t tool, int has_id) {
    int32_t *item = b->count ? b->items + (size_t)(b->count - 1) * TB_ITEM : NULL;
    if (item && item[TB_I_KIND] == kind && item[TB_I_TOOL] == tool && (item[TB_I_IDS_LEN] > 0) == has_id) {
        item[TB_I_COUNT]++;
        return item;
    }
    item = new_item(b, kind);
    if (item) item[TB_I_TOOL] = tool;
    return item;
}

static void measure(const tb_batch *b, int32_t *item) {
    item[TB_I_OUT_LEN] = (int32_t)b->out.len - item[TB_I_OUT];
    item[TB_I_IDS_LEN] = (int32_t)b->ids.len - item[TB_I_IDS];
    item[TB_I_KEYS_LEN] = (int32_t)b->keys.len - item[TB_I_KEYS];
}

/* A plain line and what became of it. It is forgotten at the scan's end: it points into framer and batch. */
typedef struct {
    int known;
    shape shape;
    int id, input, key; /* which hole is the line's id, its input, its key; or -1 */
    int escapes;   /* the input is `inputs` */
    int32_t tool;
    rewritten out;
} example;

static void learn(example *x, const envelope *e, int32_t tool, const rewritten *w, const char *data, size_t len) {
    shape *s = &x->shape;
    s->begin = data;
    s->end = data + len;
    x->known = s->count = 0;
    x->id = x->input = x->key = -1;
    for (int k = 0; k < e->count; k++) {
        const int i = e->order[k];
        if (i == TB_AID) continue;
        if (!shape_can_hole(e->known[i].value) || s->count == SHAPE_HOLES) return;
        if (i == TB_ID) x->id = s->count;
        if (i == TB_INPUT_JSON || i == TB_INPUTS) x->input = s->count;
        if (i == TB_IDEMPOTENCY_KEY) x->key = s->count;
        s->holes[s->count++] = (span){e->known[i].value, e->known[i].end};
    }
    x->escapes = (e->seen & 1 << TB_INPUTS) != 0;
    x->tool = tool;
    x->out = *w;
    x->known = 1;
}

/* Adds a line that goes on as it is. */
static int add_plain(tb_batch *b, example *x, const envelope *e, int32_t tool, const tb_line *line) {
    const member *id = &e->known[TB_ID];
    const member *key = &e->known[TB_IDEMPOTENCY_KEY];
    const int has_id = (e->seen & 1 << TB_ID) != 0, has_key = (e->seen & 1 << TB_IDEMPOTENCY_KEY) != 0;
    rewritten w = {0, 0, 0, 0};
    int32_t *item = run_of(b, has_key ? TB_KEYED : TB_PLAIN, tool, has_id);
    if (!item || envelope_rewrite(&b->out, e, line->data, line->len, &w)) return -1;
    if (has_id && put_id(b, id->value, id->end)) return -1;
    if (has_key && put_key(b, key->value, key->end)) return -1;
    measure(b, item);
    learn(x, e, tool, &w, line->data, line->len);
    return 0;
}

/* Adds a line that is like the example but for these values: what became of that becomes of this one. */
static int add_alike(tb_batch *b, const example *x, const span *values) {
    const rewritten *w = &x->out;
    const span input = x->input < 0 ? (span){NULL, NULL} : values[x->input];
    const size_t len = (size_t)(input.to - input.from);
    int32_t *item = run_of(b, x->key >= 0 ? TB_KEYED : TB_PLAIN, x->tool, x->id >= 0);
    if (!item || buffer_reserve(&b->out, w->end - w->from + 2 * len)) return -1;
    if (x->input < 0) {
        buffer_put(&b->out, b->out.data + w->from, w->end - w->from);
    } else {
        buffer_put(&b->out, b->out.data + w->from, w->input - w->from);
        if (x->escapes) put_escaped(&b->out, input.from, len);
        else buffer_put(&b->out, input.from, len);
        buffer_put(&b->out, b->out.data + w->input_end, w->end - w->input_end);
    }
    if (x->id >= 0 && put_id(b, values[x->id].from, values[x->id].to)) return -1;
    if (x->key >= 0 && put_key(b, values[x->key].from, values[x->key].to)) return -1;
    measure(b, item);
    return 0;
}

static void put_span(int32_t *item, const envelope *e, int i, const char *base) {
    item[TB_I_SPANS + 2 * i] = (int32_t)(e->known[i].value - base);
    item[TB_I_SPANS + 2 * i + 1] = (int32_t)(e->known[i].end - e->known[i].value);
}

/* A refusal names the tool where the line does, once and as a string. */
static int has_whole_aid(const envelope *e) {
    const member *m = &e->known[TB_AID];
    return e->seen & ~e->twice & 1 << TB_AID && m->end - m->value > 2 && *m->value == '"';
}

/* Adds a line that the policy has to see, with the places of its members in the framer's own memory, from `base`. */
static int add_one(tb_batch *b, const envelope *e, int kind, int32_t tool, const tb_line *line, const char *base) {
    int32_t *item = new_item(b, kind);
    if (!item) return -1;
    item[TB_I_TOOL] = tool;
    item[TB_I_PROBLEM] = e->problem;
    item[TB_I_MEMBER] = e->about;
    if (e->seen & 1 << TB_ID && put_id(b, e->known[TB_ID].value, e->known[TB_ID].end)) return -1;
    item[TB_I_IDS_LEN] = (int32_t)b->ids.len - item[TB_I_IDS];
    if (kind == TB_BAD) {
        if (has_whole_aid(e)) put_span(item, e, TB_AID, base);
        return 0;
    }
    rewritten w;
    if (envelope_rewrite(&b->out, e, line->data, line->len, &w)) return -1;
    item[TB_I_OUT_LEN] = (int32_t)b->out.len - item[TB_I_OUT];
    for (int i = 0; i < TB_MEMBERS; i++) {
        if (e->seen & 1 << i) put_span(item, e, i, base);
    }
    return 0;
}

/* Reads a line the full way. 0, or -1 without memory. */
static int add_line(tb_batch *b, example *x, const tb_tools *tools, int oversize, const tb_line *line, int max_depth,
                    const char *base) {
    char scratch[LONGEST_AID];
    envelope e;
    envelope_read(&e, line->data, line->len, max_depth);
    if (oversize) {
        e.problem = TB_TOO_LONG;
        e.about = -1;
        if (e.seen & 1 << TB_ID && e.known[TB_ID].end == line->data + line->len)
            e.seen &= ~(1 << TB_ID); /* a number, perhaps cut */
    }
    if (e.problem) return add_one(b, &e, TB_BAD, -1, line, base);
    const int32_t tool = find_tool(tools, &e, scratch);
    /* Long `inputs` grow when they become a string, perhaps past the cap: that is for the policy to see. */
    const int grows = e.seen & 1 << TB_INPUTS && line->len > LONG_INPUTS;
    const member *key = &e.known[TB_IDEMPOTENCY_KEY];
    const int32_t keyed = e.seen & 1 << TB_IDEMPOTENCY_KEY;
    if (tb_tools_is_open(tools, tool) && !(e.seen & ~(PLAIN | keyed)) && !grows &&
        (!keyed || is_simple_key(key->value, key->end)))
        return add_plain(b, x, &e, tool, line);
    return add_one(b, &e, TB_CALL, tool, line, base);
}

static int is_alike(const example *x, const tb_line *line, int max_depth, span *values) {
    return x->known && line->len <= LONG_INPUTS && shape_fits(&x->shape, line->data, line->len, max_depth, values) &&
           (x->key < 0 || is_simple_key(values[x->key].from, values[x->key].to));
}

int tb_scan(tb_framer *f, const tb_tools *tools, tb_batch *b, int32_t max_lines, int32_t max_depth, tb_view *view) {
    example x;
    span values[SHAPE_HOLES];
    tb_line line;
    x.known = 0;
    b->count = 0;
    buffer_clear(&b->out, BATCH_KEEP);
    buffer_clear(&b->ids, BATCH_KEEP);
    buffer_clear(&b->keys, BATCH_KEEP);
    int kind = TB_NONE, failed = 0;
    /* A huge line makes its own batch: what it is copied to is given back with the next scan. */
    while (!failed && max_lines-- > 0 && b->out.len < BATCH_KEEP && (kind = tb_framer_next(f, &line)) != TB_NONE) {
        if (line.len == 0 && kind == TB_LINE) {
            failed = !new_item(b, TB_CLOSE);
            kind = TB_NONE; /* what stands behind it is nobody's any more */
            break;
        }
        if (kind == TB_LINE && is_alike(&x, &line, max_depth, values)) failed = add_alike(b, &x, values);
        else failed = add_line(b, &x, tools, kind == TB_OVERSIZE, &line, max_depth, tb_framer_memory(f));
    }
    if (failed) return -ENOMEM;
    view->items = b->items;
    view->count = b->count;
    view->more = kind != TB_NONE;
    view->out = b->out.data;
    view->ids = b->ids.data;
    view->keys = b->keys.data;
    view->lines = tb_framer_memory(f);
    return 0;
}

tb_batch *tb_batch_new(void) { return calloc(1, sizeof(tb_batch)); }

void tb_batch_free(tb_batch *b) {
    if (!b) return;
    free(b->out.data);
    free(b->ids.data);
    free(b->keys.data);
    free(b->items);
    free(b);
}

size_t tb_skip_lines(const char *data, size_t len, size_t n) {
    const char *p = data, *end = data + len;
    while (n-- && p < end) {
        const char *newline = memchr(p, '\n', (size_t)(end - p));
        p = newline ? newline + 1 : end;
    }
    return (size_t)(p - data);
}
