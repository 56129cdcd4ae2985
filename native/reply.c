/* reply.c: checks and counts a toolhost's lines, and makes each caller's id the first member of its reply. */
#define _GNU_SOURCE /* memmem */
#include "batch.h"
#include "json.h"

#include <errno.h>

enum { JUNK_SHOWN = 160 };

typedef struct {
    int succeeded;
    const char *body;           /* behind the opening brace and white space */
    const char *end;            /* behind the closing brace */
    const char *id, *id_end;    /* a member `id` of the toolhost's own, with the comma that goes with it */
} verdict;

static int is(const char *from, const char *to, const char *text) {
    const size_t len = strlen(text);
    return (size_t)(to - from) == len && !memcmp(from, text, len);
}

/* A member's name, quotes included, however it is written. */
static int named(const char *from, const char *to, int escaped, const char *text) {
    char plain[64];
    const size_t len = (size_t)(to - from);
    if (!escaped) return is(from, to, text);
    return len <= sizeof plain && is(plain, plain + json_unescape(from, len, plain), text);
}

/* One object, whole and valid? What does it say of itself? `status` is read first, `ok` where it is missing. */
static int judge(const tb_line *line, int max_depth, verdict *v) {
    json_reader r = {line->data, line->data, line->data + line->len, max_depth, 0};
    int ok = 0, status = -1;
    memset(v, 0, sizeof *v);
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
        const char *name_end = r.p;
        json_space(&r);
        if (r.p >= r.end || *r.p++ != ':') return 0;
        json_space(&r);
        const char *value = r.p;
        if (!json_value(&r, 1)) return 0;
        const char *value_end = r.p;
        json_space(&r);
        if (r.p >= r.end) return 0;
        const char next = *r.p++;
        if (named(at, name_end, escaped, "\"ok\"")) ok = *value == 't';
        else if (named(at, name_end, escaped, "\"status\"")) status = is(value, value_end, "\"OK\"");
        else if (named(at, name_end, escaped, "\"id\"")) {
            if (v->id) return 0; /* twice: nobody could say which one a reader takes */
            v->id = comma ? comma : at;
            v->id_end = comma || next == '}' ? r.p - 1 : r.p;
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

/* The next reply, judged. TB_REPLY_OK with *found 0: there is none yet. */
static int next_reply(tb_framer *f, int max_depth, tb_line *line, verdict *v, int *found) {
    const int kind = tb_framer_next(f, line);
    *found = kind != TB_NONE;
    if (kind == TB_OVERSIZE) return TB_REPLY_OVERSIZE;
    return kind == TB_NONE || judge(line, max_depth, v) ? TB_REPLY_OK : TB_REPLY_JUNK;
}

int take_more(tb_framer *f, tb_batch *b, int32_t max_lines, const char *fence, size_t fence_len, const char *ids,
              size_t ids_len, int32_t max_depth, tb_taken *taken) {
    tb_line line = {NULL, 0};
    verdict v;
    int found;
    const char *id = ids ? ids + taken->ids_used : NULL, *ids_end = ids + ids_len;
    taken->stopped = TB_REPLY_OK;
    if (fence_len && !taken->fenced) {
        taken->stopped = next_reply(f, max_depth, &line, &v, &found);
        if (found && !taken->stopped) {
            taken->fenced = memmem(line.data, line.len, fence, fence_len) != NULL;
            if (!taken->fenced) taken->stopped = TB_REPLY_STRANGER;
        }
        if (!taken->fenced) max_lines = 0;
    }
    while (taken->lines < max_lines) {
        taken->stopped = next_reply(f, max_depth, &line, &v, &found);
        if (!found || taken->stopped) break;
        const char *id_end = ids ? memchr(id, '\n', (size_t)(ids_end - id)) : NULL;
        if (buffer_reserve(&b->out, line.len + 16 + (id_end ? (size_t)(id_end - id) : 0))) return -ENOMEM;
        put_reply(&b->out, &v, id_end ? id : NULL, id_end ? (size_t)(id_end - id) : 0);
        if (id_end) id = id_end + 1;
        taken->lines++;
        taken->succeeded += v.succeeded;
    }
    taken->junk = line.data;
    taken->junk_len = line.len < JUNK_SHOWN ? line.len : JUNK_SHOWN;
    taken->ids_used = (size_t)(id - ids);
    taken->data = b->out.data;
    taken->len = b->out.len;
    return 0;
}

int tb_take(tb_framer *f, tb_batch *b, int32_t max_lines, const char *fence, size_t fence_len, const char *ids,
            size_t ids_len, int32_t max_depth, tb_taken *taken) {
    memset(taken, 0, sizeof *taken);
    buffer_clear(&b->out, 2 * BATCH_KEEP);
    return take_more(f, b, max_lines, fence, fence_len, ids, ids_len, max_depth, taken);
}
