/* reply.c: checks and counts a toolhost's lines, and makes each caller's id the first member of its reply. */
#define _GNU_SOURCE /* memmem */
#include "batch.h"
#include "shape.h"

#include <errno.h>

enum { JUNK_SHOWN = 160 };

typedef struct {
    int succeeded;
    const char *body;        /* behind the opening brace and white space */
    const char *end;         /* behind the closing brace */
    const char *id, *id_end; /* a member `id` of the toolhost's own, with the comma that goes with it */
} verdict;

/* The reply before, and what was said of it. */
typedef struct {
    int known;
    shape shape;
    verdict verdict;
} example;

static int is(const char *from, const char *to, const char *text) {
    const size_t len = strlen(text);
    return (size_t)(to - from) == len && !memcmp(from, text, len);
}

enum { OTHER, OK, STATUS, ID };

/* Which member it is, by its name with quotes, however that is written. */
static int which(const char *from, const char *to, int escaped) {
    char plain[64];
    if (escaped) {
        const size_t len = (size_t)(to - from);
        if (len > sizeof plain) return OTHER;
        to = plain + json_unescape(from, len, plain);
        from = plain;
    }
    return is(from, to, "\"ok\"") ? OK : is(from, to, "\"status\"") ? STATUS : is(from, to, "\"id\"") ? ID : OTHER;
}

/* One object, whole and valid? What does it say of itself? `status` is read first, `ok` where it is missing. Strings
 * that change nothing about that are noted as holes; an empty one is likely to stay empty. */
static int judge(const tb_line *line, int max_depth, verdict *v, shape *s) {
    json_reader r = {line->data, line->data, line->data + line->len, max_depth, 0};
    int ok = 0, status = -1;
    v->id = v->id_end = NULL;
    s->count = 0;
    json_space(&r);
    if (r.p >= r.end || *r.p != '{') return 0;
    r.p++;
    json_space(&r);
    v->body = r.p;
    int more = !(r.p < r.end && *r.p == '}');
    if (!more) r.p++;
    const char *comma = NULL;
    while (more) {
        int escaped;
        const char *at = r.p;
        if (r.p >= r.end || *r.p != '"' || !json_string(&r, &escaped)) return 0;
        const int name = which(at, r.p, escaped);
        json_space(&r);
        if (r.p >= r.end || *r.p++ != ':') return 0;
        json_space(&r);
        const char *value = r.p;
        if (!json_value(&r, 1)) return 0;
        const char *value_end = r.p;
        json_space(&r);
        if (r.p >= r.end) return 0;
        const char next = *r.p++;
        if (name == OK) ok = *value == 't';
        else if (name == STATUS) status = is(value, value_end, "\"OK\"");
        else if (name == ID) {
            if (v->id) return 0; /* twice: nobody could say which one a reader takes */
            v->id = comma ? comma : at;
            v->id_end = comma || next == '}' ? r.p - 1 : r.p;
        } else if (*value == '"' && value_end - value > 2 && s->count < SHAPE_HOLES) {
            s->holes[s->count++] = (span){value, value_end};
        }
        if (next == '}') break;
        if (next != ',') return 0;
        comma = r.p - 1;
        json_space(&r);
    }
    v->end = r.p;
    json_space(&r);
    v->succeeded = status < 0 ? ok : status;
    return r.p == r.end;
}

/* Judges a line, by the one before where it is like that. */
static int judge_alike(const tb_line *line, int max_depth, example *x, verdict *v) {
    span values[SHAPE_HOLES];
    const char *data = line->data, *end = data + line->len;
    if (x->known && shape_fits(&x->shape, data, line->len, max_depth, values)) {
        const verdict *before = &x->verdict;
        *v = (verdict){before->succeeded, data + (before->body - x->shape.begin), end - (x->shape.end - before->end),
                       NULL, NULL};
        return 1;
    }
    if (!judge(line, max_depth, v, &x->shape)) return x->known = 0;
    x->known = !v->id;
    x->shape.begin = data;
    x->shape.end = end;
    x->verdict = *v;
    return 1;
}

static void put_reply(buffer *b, const verdict *v, const char *id, size_t id_len) {
    buffer_char(b, '{');
    if (id) {
        buffer_put(b, "\"id\":", 5);
        buffer_put(b, id, id_len);
    }
    const char *body = v->body;
    if (v->id == body) body = v->id_end;
    while (body < v->end && (*body == ' ' || *body == '\t')) body++;
    if (id && *body != '}') buffer_char(b, ',');
    if (v->id > body) {
        buffer_put(b, body, (size_t)(v->id - body));
        body = v->id_end;
    }
    buffer_put(b, body, (size_t)(v->end - body));
    buffer_char(b, '\n');
}

/* Lines that pass as they are, one behind the other in the framer: copied all at once, the last line's end is ours. */
static int flush(buffer *out, span *whole) {
    const size_t len = (size_t)(whole->to - whole->from);
    if (!len) return 0;
    if (buffer_reserve(out, len + 1)) return -1;
    buffer_put(out, whole->from, len);
    buffer_char(out, '\n');
    *whole = (span){NULL, NULL};
    return 0;
}

/* Adds a reply, or has it wait in `whole` for its like. 0, or -1 without memory. */
static int add(buffer *out, span *whole, const tb_line *line, const verdict *v, const char *id, size_t id_len) {
    const char *data = line->data, *end = data + line->len;
    if (!id && !v->id && v->body == data + 1 && v->end == end) {
        if (whole->to && whole->to + 1 == data) { /* nothing but '\n' is between them */
            whole->to = end;
            return 0;
        }
        if (flush(out, whole)) return -1;
        *whole = (span){data, end};
        return 0;
    }
    if (flush(out, whole) || buffer_reserve(out, line->len + 16 + id_len)) return -1;
    put_reply(out, v, id, id_len);
    return 0;
}

/* The next reply, judged. TB_REPLY_OK with *found 0: there is none yet. */
static int next_reply(tb_framer *f, int max_depth, example *x, tb_line *line, verdict *v, int *found) {
    const int kind = tb_framer_next(f, line);
    *found = kind != TB_NONE;
    if (kind == TB_OVERSIZE) return TB_REPLY_OVERSIZE;
    return kind == TB_NONE || judge_alike(line, max_depth, x, v) ? TB_REPLY_OK : TB_REPLY_JUNK;
}

static int quotes(const tb_line *line, const char *fence, size_t len) {
    return memmem(line->data, line->len, fence, len) != NULL;
}

int take_more(tb_framer *f, buffer *out, int32_t max_lines, const char *fence, size_t fence_len,
              const char *any_fence, size_t any_fence_len, const char *ids, size_t ids_len, int32_t max_depth,
              tb_taken *taken) {
    tb_line line = {NULL, 0};
    span whole = {NULL, NULL};
    example x;
    verdict v;
    int found;
    const char *id = ids ? ids + taken->ids_used : NULL, *ids_end = ids ? ids + ids_len : NULL;
    x.known = 0;
    taken->stopped = TB_REPLY_OK;
    if (fence_len && !taken->fenced) {
        taken->stopped = next_reply(f, max_depth, &x, &line, &v, &found);
        if (found && !taken->stopped) {
            taken->fenced = quotes(&line, fence, fence_len);
            if (!taken->fenced) taken->stopped = TB_REPLY_STRANGER;
        }
        if (!taken->fenced) max_lines = 0;
    }
    while (taken->lines < max_lines) {
        taken->stopped = next_reply(f, max_depth, &x, &line, &v, &found);
        if (!found || taken->stopped) break;
        if (any_fence_len && !v.succeeded && quotes(&line, any_fence, any_fence_len)) {
            taken->stopped = TB_REPLY_SWALLOWED;
            break;
        }
        const char *id_end = ids ? memchr(id, '\n', (size_t)(ids_end - id)) : NULL;
        if (add(out, &whole, &line, &v, id_end ? id : NULL, id_end ? (size_t)(id_end - id) : 0)) return -ENOMEM;
        if (id_end) id = id_end + 1;
        taken->lines++;
        taken->succeeded += v.succeeded;
    }
    if (flush(out, &whole)) return -ENOMEM;
    taken->junk = line.data;
    taken->junk_len = line.len < JUNK_SHOWN ? line.len : JUNK_SHOWN;
    taken->ids_used = (size_t)(id - ids);
    taken->data = out->data;
    taken->len = out->len;
    return 0;
}

int tb_take(tb_framer *f, tb_batch *b, int32_t max_lines, const char *fence, size_t fence_len, const char *ids,
            size_t ids_len, int32_t max_depth, tb_taken *taken) {
    memset(taken, 0, sizeof *taken);
    buffer_clear(&b->out, 2 * BATCH_KEEP);
    return take_more(f, &b->out, max_lines, fence, fence_len, NULL, 0, ids, ids_len, max_depth, taken);
}
