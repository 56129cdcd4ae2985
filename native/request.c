/* request.c: reads callers' lines and rewrites them for the toolhost: what is ours is taken out, state is reset. */
#include "batch.h"
#include "json.h"

#include <errno.h>

int tb_tools_is_open(const tb_tools *t, int32_t index); /* tools.c */
const char *tb_framer_memory(const tb_framer *f);       /* framer.c: where its bytes are, until the next feed or read */

#define RESET "\"ds_state\":{\"slots\":{}}"

typedef struct {
    const char *name; /* where its name's quote stands; NULL: absent */
    const char *value;
    const char *end;
    int escaped; /* a string value has escapes */
} member;

/* One line while it is read. */
typedef struct {
    member known[TB_MEMBERS];
    int32_t seen; /* a bit a known member */
    int problem;
    int about; /* the member that the problem is about */
} envelope;

static const struct {
    const char *name;
    size_t len;
    char type; /* what the value begins with: a string, an object, a number, a word; '*' for any */
} MEMBERS[TB_MEMBERS] = {
    [TB_ID] = {"id", 2, '*'},
    [TB_AID] = {"aid", 3, '"'},
    [TB_INPUT_JSON] = {"input_json", 10, '"'},
    [TB_INPUTS] = {"inputs", 6, '{'},
    [TB_DS_STATE] = {"ds_state", 8, '{'},
    [TB_IDEMPOTENCY_KEY] = {"idempotency_key", 15, '"'},
    [TB_LEASE_TOKEN] = {"_lease_token", 12, '"'},
    [TB_TIMEOUT_MS] = {"timeout_ms", 10, '0'},
    [TB_SESSION] = {"session", 7, '"'},
    [TB_STREAM] = {"stream", 6, 't'},
    [TB_TRACEPARENT] = {"traceparent", 11, '"'},
    [TB_RUN_ID] = {"run_id", 6, '"'},
    [TB_REQUEST_ID] = {"request_id", 10, '"'},
};

enum { LONG_INPUTS = 1024 * 1024 };
enum { LONGEST_NAME = 15, LONGEST_ESCAPED = LONGEST_NAME * 6 };

/* Known members that a plain call may have: they change nothing about how it is run. */
static const int32_t PLAIN = 1 << TB_ID | 1 << TB_AID | 1 << TB_INPUT_JSON | 1 << TB_INPUTS | 1 << TB_TRACEPARENT |
                             1 << TB_RUN_ID | 1 << TB_REQUEST_ID;

enum { UNKNOWN = -1, HAS_NUL = -2 };

static int has_nul(const char *text, size_t len) {
    for (const char *p = text, *end = text + len; p < end; p++) {
        if (*p != '\\') continue;
        if (p[1] == 'u' && !memcmp(p + 2, "0000", 4)) return 1;
        p++;
    }
    return 0;
}

static int which(const char *text, size_t len, int escaped) {
    char plain[LONGEST_ESCAPED];
    if (escaped) {
        if (has_nul(text, len)) return HAS_NUL;
        if (len > LONGEST_ESCAPED) return UNKNOWN; /* no known name is that long, however it is written */
        len = json_unescape(text, len, plain);
        text = plain;
    }
    for (int i = 0; i < TB_MEMBERS; i++)
        if (MEMBERS[i].len == len && !memcmp(MEMBERS[i].name, text, len)) return i;
    return UNKNOWN;
}

static int right_type(int type, const char *value) {
    switch (type) {
    case '*': return 1;
    case '0': return *value >= '0' && *value <= '9';
    case 't': return *value == 't' || *value == 'f';
    default: return *value == type;
    }
}

static void complain(envelope *e, int problem, int about) {
    if (e->problem) return; /* the first one is told */
    e->problem = problem;
    e->about = about;
}

static void keep(envelope *e, int i, const char *at, const json_reader *r, const char *value) {
    if (e->seen & 1 << i) {
        complain(e, TB_TWICE, i);
        return;
    }
    e->seen |= 1 << i;
    e->known[i] = (member){at, value, r->p, 0};
    if (!right_type(MEMBERS[i].type, value)) complain(e, TB_WRONG_TYPE, i);
    else if (*value == '"') e->known[i].escaped = memchr(value, '\\', (size_t)(r->p - value)) != NULL;
}

/* Reads one whole line. A truncated (oversize) one ends as invalid, with the members that came before the cut. */
static void read_envelope(envelope *e, const char *data, size_t len, int max_depth) {
    json_reader r = {data, data, data + len, max_depth, 0};
    memset(e, 0, sizeof *e);
    e->about = -1;
    json_space(&r);
    if (r.p >= r.end || *r.p != '{') {
        const int valid = json_value(&r, 0) && json_space(&r) && r.p == r.end;
        e->problem = r.too_deep ? TB_TOO_DEEP : valid ? TB_NOT_AN_OBJECT : TB_INVALID_JSON;
        return;
    }
    r.p++;
    json_space(&r);
    int more = !(r.p < r.end && *r.p == '}');
    if (!more) r.p++;
    while (more) {
        int escaped = 0;
        const char *at = r.p;
        if (r.p >= r.end || *r.p != '"' || !json_string(&r, &escaped)) goto invalid;
        const int i = which(at + 1, (size_t)(r.p - at) - 2, escaped);
        json_space(&r);
        if (r.p >= r.end || *r.p++ != ':') goto invalid;
        json_space(&r);
        const char *value = r.p;
        if (!json_value(&r, 1)) goto invalid;
        if (i >= 0) keep(e, i, at, &r, value);
        else if (i == HAS_NUL) complain(e, TB_NUL_NAME, -1);
        json_space(&r);
        if (r.p >= r.end) goto invalid;
        const char next = *r.p++;
        if (next == '}') break;
        if (next != ',') goto invalid;
        json_space(&r);
    }
    json_space(&r);
    if (r.p != r.end) goto invalid;
    if (e->seen & 1 << TB_INPUTS && e->seen & 1 << TB_INPUT_JSON) complain(e, TB_BOTH_INPUTS, TB_INPUTS);
    if (!(e->seen & 1 << TB_AID) || e->known[TB_AID].end - e->known[TB_AID].value == 2) complain(e, TB_NO_AID, TB_AID);
    return;
invalid:
    e->problem = r.too_deep ? TB_TOO_DEEP : TB_INVALID_JSON;
    e->about = -1;
}

/* Writes text as the inside of a JSON string. What is valid JSON has no control characters but white space. */
static void put_escaped(buffer *b, const char *text, size_t len) {
    for (const char *p = text, *end = text + len; p < end; p++) {
        switch (*p) {
        case '"': case '\\':
            buffer_char(b, '\\');
            buffer_char(b, *p);
            break;
        case '\t': buffer_put(b, "\\t", 2); break;
        case '\r': buffer_put(b, "\\r", 2); break;
        default: buffer_char(b, *p);
        }
    }
}

/* Room for the worst case: `inputs` may double when it becomes a string. */
static size_t worst(const envelope *e, size_t len) {
    return (e->seen & 1 << TB_INPUTS ? 2 * len : len) + sizeof RESET + 64;
}

static void comma(buffer *b, size_t from) {
    if (b->len > from + 1) buffer_char(b, ',');
}

/* Copies the members between known ones as they stand: [from, to) is "name":value(,"name":value)* with loose commas. */
static void put_between(buffer *b, size_t open, const char *from, const char *to) {
    while (from < to && (*from == ',' || *from == ' ' || *from == '\t' || *from == '\r')) from++;
    while (to > from && (to[-1] == ',' || to[-1] == ' ' || to[-1] == '\t' || to[-1] == '\r')) to--;
    if (from == to) return;
    comma(b, open);
    buffer_put(b, from, (size_t)(to - from));
}

/* The line that the toolhost gets: the state's reset first (unless the caller sent state: that is the policy's to
 * write), then aid, input_json and what we do not know, in the caller's order and words. */
static void rewrite(buffer *b, const envelope *e, const char *data, size_t len) {
    const size_t open = b->len;
    buffer_char(b, '{');
    if (!(e->seen & 1 << TB_DS_STATE)) buffer_put(b, RESET, sizeof RESET - 1);

    int order[TB_MEMBERS], n = 0; /* known members by position */
    for (int i = 0; i < TB_MEMBERS; i++) {
        if (!(e->seen & 1 << i)) continue;
        int j = n++;
        for (; j > 0 && e->known[order[j - 1]].name > e->known[i].name; j--) order[j] = order[j - 1];
        order[j] = i;
    }
    const char *at = memchr(data, '{', len);
    at++;
    for (int k = 0; k < n; k++) {
        const int i = order[k];
        const member *m = &e->known[i];
        put_between(b, open, at, m->name);
        at = m->end;
        if (i == TB_AID || i == TB_INPUT_JSON) {
            comma(b, open);
            buffer_char(b, '"');
            buffer_put(b, MEMBERS[i].name, MEMBERS[i].len);
            buffer_put(b, "\":", 2);
            buffer_put(b, m->value, (size_t)(m->end - m->value));
        } else if (i == TB_INPUTS) {
            comma(b, open);
            buffer_put(b, "\"input_json\":\"", 14);
            put_escaped(b, m->value, (size_t)(m->end - m->value));
            buffer_char(b, '"');
        }
    }
    const char *end = data + len;
    while (end[-1] != '}') end--;
    put_between(b, open, at, end - 1);
    buffer_put(b, "}\n", 2);
}

static int32_t find_tool(const tb_tools *tools, const envelope *e, char *scratch) {
    const member *m = &e->known[TB_AID];
    const char *text = m->value + 1;
    size_t len = (size_t)(m->end - m->value) - 2;
    if (m->escaped) {
        if (len > 4096) return -1;
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
    for (int i = 0; i < TB_MEMBERS; i++) item[TB_I_SPANS + 2 * i] = -1;
    return item;
}

static int put_id(tb_batch *b, const envelope *e) {
    const member *m = &e->known[TB_ID];
    const size_t len = (size_t)(m->end - m->value);
    if (buffer_reserve(&b->ids, len + 1)) return -1;
    buffer_put(&b->ids, m->value, len);
    buffer_char(&b->ids, '\n');
    return 0;
}

/* Adds a line that goes on as it is, to the run before it where it belongs to one. */
static int add_plain(tb_batch *b, const envelope *e, int32_t tool, const char *data, size_t len) {
    const int has_id = (e->seen & 1 << TB_ID) != 0;
    int32_t *item = b->count ? b->items + (size_t)(b->count - 1) * TB_ITEM : NULL;
    const int joins = item && item[TB_I_KIND] == TB_PLAIN && item[TB_I_TOOL] == tool &&
                      (item[TB_I_IDS_LEN] > 0) == has_id;
    if (joins) {
        item[TB_I_COUNT]++;
    } else {
        item = new_item(b, TB_PLAIN);
        if (!item) return -1;
        item[TB_I_TOOL] = tool;
    }
    if (buffer_reserve(&b->out, worst(e, len)) || (has_id && put_id(b, e))) return -1;
    rewrite(&b->out, e, data, len);
    item[TB_I_OUT_LEN] = (int32_t)b->out.len - item[TB_I_OUT];
    item[TB_I_IDS_LEN] = (int32_t)b->ids.len - item[TB_I_IDS];
    return 0;
}

static void put_span(int32_t *item, const envelope *e, int i, const char *base) {
    item[TB_I_SPANS + 2 * i] = (int32_t)(e->known[i].value - base);
    item[TB_I_SPANS + 2 * i + 1] = (int32_t)(e->known[i].end - e->known[i].value);
}

/* A refusal names the tool where the line does, once and as a string. */
static int has_whole_aid(const envelope *e) {
    const member *m = &e->known[TB_AID];
    return e->seen & 1 << TB_AID && e->about != TB_AID && m->end - m->value >= 2 && *m->value == '"' && m->end[-1] == '"';
}

/* Adds a line that the policy has to see, with the places of its members in the framer's own memory, from `base`. */
static int add_one(tb_batch *b, const envelope *e, int kind, int32_t tool, const tb_line *line, const char *base) {
    int32_t *item = new_item(b, kind);
    if (!item) return -1;
    item[TB_I_TOOL] = tool;
    item[TB_I_PROBLEM] = e->problem;
    item[TB_I_MEMBER] = e->about;
    if (e->seen & 1 << TB_ID && put_id(b, e)) return -1;
    item[TB_I_IDS_LEN] = (int32_t)b->ids.len - item[TB_I_IDS];
    if (kind == TB_BAD) {
        if (has_whole_aid(e)) put_span(item, e, TB_AID, base);
        return 0;
    }
    if (buffer_reserve(&b->out, worst(e, line->len))) return -1;
    rewrite(&b->out, e, line->data, line->len);
    item[TB_I_OUT_LEN] = (int32_t)b->out.len - item[TB_I_OUT];
    for (int i = 0; i < TB_MEMBERS; i++) {
        if (e->seen & 1 << i) put_span(item, e, i, base);
    }
    return 0;
}

int tb_scan(tb_framer *f, const tb_tools *tools, tb_batch *b, int32_t max_lines, int32_t max_depth, tb_view *view) {
    char scratch[4096];
    envelope e;
    tb_line line;
    b->count = 0;
    buffer_clear(&b->out, BATCH_KEEP);
    buffer_clear(&b->ids, BATCH_KEEP);
    int kind = TB_NONE, failed = 0;
    /* A huge line makes its own batch: what it is copied to is given back with the next scan. */
    while (!failed && max_lines-- > 0 && b->out.len < BATCH_KEEP && (kind = tb_framer_next(f, &line)) != TB_NONE) {
        if (line.len == 0 && kind == TB_LINE) {
            failed = !new_item(b, TB_CLOSE);
            kind = TB_NONE; /* what stands behind it is nobody's any more */
            break;
        }
        read_envelope(&e, line.data, line.len, max_depth);
        if (kind == TB_OVERSIZE) {
            e.problem = TB_TOO_LONG;
            if (e.known[TB_ID].end == line.data + line.len) e.seen &= ~(1 << TB_ID); /* a number, perhaps cut */
        }
        if (e.problem) {
            failed = add_one(b, &e, TB_BAD, -1, &line, tb_framer_memory(f));
            continue;
        }
        const int32_t tool = find_tool(tools, &e, scratch);
        /* Long `inputs` grow when they become a string, perhaps past the cap: that is for the policy to see. */
        const int grows = e.seen & 1 << TB_INPUTS && line.len > LONG_INPUTS;
        if (tb_tools_is_open(tools, tool) && !(e.seen & ~PLAIN) && !grows)
            failed = add_plain(b, &e, tool, line.data, line.len);
        else
            failed = add_one(b, &e, TB_CALL, tool, &line, tb_framer_memory(f));
    }
    if (failed) return -ENOMEM;
    view->items = b->items;
    view->count = b->count;
    view->more = kind != TB_NONE;
    view->out = b->out.data;
    view->ids = b->ids.data;
    view->lines = tb_framer_memory(f);
    return 0;
}

tb_batch *tb_batch_new(void) { return calloc(1, sizeof(tb_batch)); }

void tb_batch_free(tb_batch *b) {
    if (!b) return;
    free(b->out.data);
    free(b->ids.data);
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
