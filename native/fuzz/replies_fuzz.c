/* replies_fuzz.c: toolhosts' lines are taken alike at once, one by one and in pieces; and each as yyjson reads it. */
#define _GNU_SOURCE /* memmem */
#include "fuzz.h"

#include <yyjson.h>

enum { CAP = 512, DEPTH = 6 };
#define FENCE "_f1"

static const char IDS[] = "1\n\"two\"\nnull\n[4]\n{\"five\":5}\n6\n";

typedef struct {
    size_t step;
    int32_t at_once;
    int fenced, with_ids;
} manner;

/* Our reply is the toolhost's: members in its order, our id in the place of its own. */
static void must_be_reply(const char *line, size_t len, const tb_taken *t, const char *id, size_t id_len) {
    yyjson_doc *theirs = yyjson_read(line, len, YYJSON_READ_NUMBER_AS_RAW);
    if (t->stopped == TB_REPLY_JUNK) {
        yyjson_doc_free(theirs);
        return;
    }
    yyjson_doc *ours = yyjson_read(t->data, t->len, YYJSON_READ_NUMBER_AS_RAW);
    yyjson_obj_iter their, our;
    yyjson_val *name, *next, *their_root = yyjson_doc_get_root(theirs);
    MUST(theirs && ours && t->data[t->len - 1] == '\n' && !memchr(t->data, '\n', t->len - 1));
    MUST(yyjson_obj_iter_init(their_root, &their) && yyjson_obj_iter_init(yyjson_doc_get_root(ours), &our));
    if (id) {
        yyjson_doc *asked = yyjson_read(id, id_len, YYJSON_READ_NUMBER_AS_RAW);
        next = yyjson_obj_iter_next(&our);
        MUST(next && yyjson_equals_str(next, "id"));
        MUST(yyjson_equals(yyjson_obj_iter_get_val(next), yyjson_doc_get_root(asked)));
        yyjson_doc_free(asked);
    }
    int ok = 0, status = -1;
    while ((name = yyjson_obj_iter_next(&their))) {
        yyjson_val *value = yyjson_obj_iter_get_val(name);
        if (yyjson_equals_str(name, "id")) continue;
        if (yyjson_equals_str(name, "ok")) ok = yyjson_is_true(value);
        if (yyjson_equals_str(name, "status")) status = yyjson_equals_str(value, "OK");
        next = yyjson_obj_iter_next(&our);
        MUST(next && yyjson_equals(name, next) && yyjson_equals(value, yyjson_obj_iter_get_val(next)));
    }
    MUST(!yyjson_obj_iter_next(&our));
    /* Written with escapes, an OK is none: nobody's own program does that. */
    if (!memchr(line, '\\', len)) MUST(t->succeeded == (status < 0 ? ok : status));
    yyjson_doc_free(theirs);
    yyjson_doc_free(ours);
}

/* The line that ends before `end` in what was fed. */
static const char *line_before(const char *text, const char *end, size_t *len) {
    if (end > text && end[-1] == '\n') end--;
    const char *from = memrchr(text, '\n', (size_t)(end - text));
    from = from ? from + 1 : text;
    *len = (size_t)(end - from);
    return from;
}

static void take_all(buffer *r, const char *text, size_t size, manner how) {
    tb_framer *f = tb_framer_new(CAP);
    tb_batch *b = tb_batch_new();
    tb_taken t;
    const char *ids = how.with_ids ? IDS : NULL;
    size_t ids_left = how.with_ids ? strlen(IDS) : 0;
    int fenced = !how.fenced, ended = 0;
    int64_t succeeded = 0;
    for (size_t at = 0; !ended; at += how.step) {
        const size_t left = size - at, n = left < how.step ? left : how.step;
        MUST(!tb_framer_feed(f, text + at, n));
        if (n == size) wall(f, size);
        if ((ended = left <= how.step)) tb_framer_end(f);
        for (;;) {
            MUST(!tb_take(f, b, how.at_once, FENCE, fenced ? 0 : strlen(FENCE), ids, ids_left, DEPTH, &t));
            MUST(t.lines <= how.at_once && t.succeeded <= t.lines);
            if (how.at_once == 1 && how.step == size && (t.lines || t.stopped == TB_REPLY_JUNK) && !t.fenced) {
                size_t len;
                const char *line = line_before(text, text + size - tb_framer_pending(f), &len);
                const size_t id_len = ids && ids_left ? tb_skip_lines(ids, ids_left, 1) - 1 : 0;
                must_be_reply(line, len, &t, id_len ? ids : NULL, id_len);
            }
            note(r, t.data, t.len);
            succeeded += t.succeeded;
            fenced |= t.fenced;
            if (ids) ids += t.ids_used;
            ids_left -= t.ids_used;
            if (t.stopped) note_number(r, t.stopped);
            if (t.stopped) note(r, t.junk, t.junk_len);
            if (!t.stopped && !t.fenced && t.lines < how.at_once) break;
        }
    }
    note_number(r, succeeded);
    tb_batch_free(b);
    tb_framer_free(f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static buffer whole, other;
    if (!size) return 0;
    char *text = exactly(data, size);
    for (int kind = 0; kind < 4; kind++) {
        const int fenced = kind & 1, with_ids = kind >> 1;
        whole.len = other.len = 0;
        take_all(&whole, text, size, (manner){size, 1000, fenced, with_ids});
        take_all(&other, text, size, (manner){size, 1, fenced, with_ids});
        must_be_same(&whole, &other, "one by one");
        for (size_t step = 1; step < size; step = step * 4 + size % 7) {
            other.len = 0;
            take_all(&other, text, size, (manner){step, 1000, fenced, with_ids});
            must_be_same(&whole, &other, "in pieces");
        }
    }
    free(text);
    return 0;
}
