/* envelope.c: reads a caller's line and rewrites it for the toolhost: what is ours is taken out, state is reset. */
#include "envelope.h"
#include "json.h"

#define RESET "\"ds_state\":{\"slots\":{}}"

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

enum { LONGEST_NAME = 15, LONGEST_ESCAPED = LONGEST_NAME * 6 };
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

static void keep(envelope *e, int i, member m) {
    if (e->seen & 1 << i) {
        e->twice |= 1 << i;
        complain(e, TB_TWICE, i);
        return;
    }
    e->seen |= 1 << i;
    e->order[e->count++] = i;
    e->known[i] = m;
    if (!right_type(MEMBERS[i].type, m.value)) complain(e, TB_WRONG_TYPE, i);
}

void envelope_read(envelope *e, const char *data, size_t len, int max_depth) {
    json_reader r = {data, data, data + len, max_depth, 0};
    e->seen = e->twice = e->problem = e->count = 0;
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
        escaped = 0;
        if (!(r.p < r.end && *r.p == '"' ? json_string(&r, &escaped) : json_value(&r, 1))) goto invalid;
        if (i >= 0) keep(e, i, (member){at, value, r.p, escaped});
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

/* What is valid JSON has no control characters but white space. */
static const char LETTER[256] = {['"'] = '"', ['\\'] = '\\', ['\t'] = 't', ['\r'] = 'r'};

void put_escaped(buffer *b, const char *text, size_t len) {
    const char *p = text, *end = text + len;
    char *out = b->data + b->len;
    while (p < end) {
        if (end - p >= BLOCK && !marked(block_at(p))) {
            memcpy(out, p, BLOCK);
            out += BLOCK;
            p += BLOCK;
            continue;
        }
        for (const char *stop = end - p < BLOCK ? end : p + BLOCK; p < stop; p++) {
            const char letter = LETTER[(unsigned char)*p];
            out[0] = '\\'; /* without a branch: which bytes have one is hard to guess */
            out[letter != 0] = letter ? letter : *p;
            out += 1 + (letter != 0);
        }
    }
    b->len = (size_t)(out - b->data);
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

static void put_input(buffer *b, int i, const member *m, rewritten *w) {
    const size_t len = (size_t)(m->end - m->value);
    buffer_put(b, "\"input_json\":\"", i == TB_INPUTS ? 14 : 13);
    w->input = b->len;
    if (i == TB_INPUTS) put_escaped(b, m->value, len);
    else buffer_put(b, m->value, len);
    w->input_end = b->len;
    if (i == TB_INPUTS) buffer_char(b, '"');
}

int envelope_rewrite(buffer *b, const envelope *e, const char *data, size_t len, rewritten *w) {
    const size_t worst = (e->seen & 1 << TB_INPUTS ? 2 * len : len) + sizeof RESET + 64; /* `inputs` may double */
    if (buffer_reserve(b, worst)) return -1;
    const size_t open = w->from = b->len;
    buffer_char(b, '{');
    if (!(e->seen & 1 << TB_DS_STATE)) buffer_put(b, RESET, sizeof RESET - 1);
    const char *at = memchr(data, '{', len);
    at++;
    for (int k = 0; k < e->count; k++) {
        const int i = e->order[k];
        const member *m = &e->known[i];
        put_between(b, open, at, m->name);
        at = m->end;
        if (i != TB_AID && i != TB_INPUT_JSON && i != TB_INPUTS) continue;
        comma(b, open);
        if (i == TB_AID) {
            buffer_put(b, "\"aid\":", 6);
            buffer_put(b, m->value, (size_t)(m->end - m->value));
        } else {
            put_input(b, i, m, w);
        }
    }
    const char *end = data + len;
    while (end[-1] != '}') end--;
    put_between(b, open, at, end - 1);
    buffer_put(b, "}\n", 2);
    w->end = b->len;
    return 0;
}
