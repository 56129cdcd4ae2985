/* requests_fuzz.c: callers' lines are read alike at once, one by one and in pieces; and each as yyjson reads it. */
#include "fuzz.h"

#include <yyjson.h>

enum { CAP = 512, DEPTH = 6 };

static const char *const NAMES[TB_MEMBERS] = {
    "id", "aid", "input_json", "inputs", "ds_state", "idempotency_key", "_lease_token", "timeout_ms", "session", "stream",
    "traceparent", "run_id", "request_id",
};

static yyjson_doc *parsed(const char *text, size_t len) {
    return yyjson_read(text, len, YYJSON_READ_NUMBER_AS_RAW);
}

static int known(yyjson_val *name) {
    for (int i = 0; i < TB_MEMBERS; i++)
        if (yyjson_equals_strn(name, NAMES[i], strlen(NAMES[i]))) return i;
    return -1;
}

/* The next member of what the toolhost got is this one. */
static void must_follow(yyjson_obj_iter *sent, yyjson_val *name, yyjson_val *value) {
    yyjson_val *next = yyjson_obj_iter_next(sent);
    MUST(next && yyjson_equals(next, name) && yyjson_equals(yyjson_obj_iter_get_val(next), value));
}

/* What the toolhost gets of a line: the reset first, then what is its own, in the caller's order. */
static void must_be_rewritten(yyjson_val *line, yyjson_val *out) {
    yyjson_obj_iter sent, asked;
    yyjson_val *name;
    MUST(yyjson_obj_iter_init(out, &sent) && yyjson_obj_iter_init(line, &asked));
    if (!yyjson_obj_get(line, "ds_state")) {
        name = yyjson_obj_iter_next(&sent);
        MUST(name && yyjson_equals_str(name, "ds_state"));
        yyjson_val *slots = yyjson_obj_get(yyjson_obj_iter_get_val(name), "slots");
        MUST(yyjson_is_obj(slots) && !yyjson_obj_size(slots));
    }
    while ((name = yyjson_obj_iter_next(&asked))) {
        const int i = known(name);
        yyjson_val *value = yyjson_obj_iter_get_val(name);
        if (i < 0 || i == TB_AID || i == TB_INPUT_JSON) must_follow(&sent, name, value);
        if (i != TB_INPUTS) continue;
        name = yyjson_obj_iter_next(&sent);
        MUST(name && yyjson_equals_str(name, "input_json"));
        yyjson_val *text = yyjson_obj_iter_get_val(name);
        yyjson_doc *inner = parsed(yyjson_get_str(text), yyjson_get_len(text));
        MUST(inner && yyjson_equals(yyjson_doc_get_root(inner), value));
        yyjson_doc_free(inner);
    }
    MUST(!yyjson_obj_iter_next(&sent));
}

/* A member's text, which was cut out of the line or copied, is its value. */
static void must_be_member(yyjson_val *line, int i, const char *text, size_t len) {
    yyjson_doc *doc = parsed(text, len);
    MUST(doc && yyjson_equals(yyjson_doc_get_root(doc), yyjson_obj_get(line, NAMES[i])));
    yyjson_doc_free(doc);
}

static void must_be_read_rightly(const tb_view *v, const int32_t *item, const char *line, size_t len) {
    if (item[TB_I_PROBLEM] == TB_TOO_LONG || item[TB_I_KIND] == TB_CLOSE) return;
    yyjson_doc *doc = parsed(line, len);
    if (item[TB_I_PROBLEM] == TB_INVALID_JSON || item[TB_I_PROBLEM] == TB_TOO_DEEP) {
        yyjson_doc_free(doc); /* json_fuzz.c sees to that */
        return;
    }
    MUST(doc);
    yyjson_val *root = yyjson_doc_get_root(doc);
    MUST(yyjson_is_obj(root) == (item[TB_I_PROBLEM] != TB_NOT_AN_OBJECT));
    if (item[TB_I_KIND] != TB_BAD) {
        MUST(yyjson_get_len(yyjson_obj_get(root, "aid")) > 0);
        MUST(v->out[item[TB_I_OUT] + item[TB_I_OUT_LEN] - 1] == '\n');
        yyjson_doc *out = parsed(v->out + item[TB_I_OUT], (size_t)item[TB_I_OUT_LEN]);
        MUST(out);
        must_be_rewritten(root, yyjson_doc_get_root(out));
        yyjson_doc_free(out);
        MUST(!yyjson_obj_get(root, "id") == !item[TB_I_IDS_LEN]);
        if (item[TB_I_IDS_LEN]) must_be_member(root, TB_ID, v->ids + item[TB_I_IDS], (size_t)item[TB_I_IDS_LEN] - 1);
    }
    for (int i = 0; i < TB_MEMBERS; i++) {
        const int32_t at = item[TB_I_SPANS + 2 * i];
        if (at >= 0) must_be_member(root, i, v->lines + at, (size_t)item[TB_I_SPANS + 2 * i + 1]);
        else MUST(item[TB_I_KIND] != TB_CALL || !yyjson_obj_get(root, NAMES[i]));
    }
    yyjson_doc_free(doc);
}

/* Each call of an item is noted as if it were alone. */
static void note_item(buffer *r, const tb_view *v, const int32_t *item) {
    const char *out = place(v->out, item[TB_I_OUT]), *ids = place(v->ids, item[TB_I_IDS]);
    const char *keys = place(v->keys, item[TB_I_KEYS]);
    size_t out_left = (size_t)item[TB_I_OUT_LEN], ids_left = (size_t)item[TB_I_IDS_LEN];
    size_t keys_left = (size_t)item[TB_I_KEYS_LEN];
    for (int32_t i = 0; i < item[TB_I_COUNT]; i++) {
        const size_t n = first_line(out, out_left), id = first_line(ids, ids_left), key = first_line(keys, keys_left);
        note_number(r, item[TB_I_KIND]);
        note_number(r, item[TB_I_TOOL]);
        note_number(r, item[TB_I_PROBLEM]);
        note_number(r, item[TB_I_MEMBER]);
        for (int k = 0; k < TB_MEMBERS; k++) {
            const int32_t *span = item + TB_I_SPANS + 2 * k;
            note_number(r, span[0] < 0 ? -1 : k);
            if (span[0] >= 0) note(r, v->lines + span[0], (size_t)span[1]);
        }
        note(r, out, n);
        note(r, ids, id);
        note(r, keys, key);
        out = place(out, (int32_t)n);
        ids = place(ids, (int32_t)id);
        keys = place(keys, (int32_t)key);
        out_left -= n;
        ids_left -= id;
        keys_left -= key;
    }
    MUST(!out_left && !ids_left && !keys_left);
}

/* The line behind `at`, as a plain look for its end finds it. */
static size_t line_at(const char *text, size_t size, size_t at, size_t *next) {
    const char *newline = memchr(text + at, '\n', size - at);
    const size_t end = newline ? (size_t)(newline - text) : size;
    *next = newline ? end + 1 : size;
    return end > at && text[end - 1] == '\r' ? end - 1 - at : end - at;
}

enum { LOOK = 1 };

/* Scans the text in pieces of `step`, up to an empty line; with LOOK, which needs one line a scan, yyjson looks, too. */
static void scan_all(buffer *r, const tb_tools *tools, const char *text, size_t size, size_t step, int32_t at_once,
                     int how) {
    tb_framer *f = tb_framer_new(CAP);
    tb_batch *b = tb_batch_new();
    tb_view v;
    size_t place = 0, next = 0;
    for (size_t at = 0, closed = 0; at < size && !closed; at += step) {
        const size_t left = size - at;
        MUST(!tb_framer_feed(f, text + at, left < step ? left : step));
        if (step == size) wall(f, size);
        if (left <= step) tb_framer_end(f);
        do {
            MUST(!tb_scan(f, tools, b, at_once, DEPTH, &v));
            for (int32_t i = 0; i < v.count; i++) {
                const int32_t *item = v.items + (size_t)i * TB_ITEM;
                note_item(r, &v, item);
                closed |= item[TB_I_KIND] == TB_CLOSE;
                if (how != LOOK) continue;
                const size_t len = line_at(text, size, place, &next);
                MUST((len > CAP) == (item[TB_I_PROBLEM] == TB_TOO_LONG));
                must_be_read_rightly(&v, item, text + place, len);
                place = next;
            }
        } while (v.more && !closed);
    }
    tb_batch_free(b);
    tb_framer_free(f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static tb_tools *tools;
    static buffer whole, other;
    if (!tools) {
        tools = tb_tools_new();
        tb_tools_put(tools, "T", 1, 0);
        tb_tools_put(tools, "C", 1, 1);
        tb_tools_open(tools, 0, 1);
    }
    if (!size) return 0;
    char *text = exactly(data, size);
    whole.len = other.len = 0;
    scan_all(&whole, tools, text, size, size, 1000, 0);
    scan_all(&other, tools, text, size, size, 1, LOOK);
    must_be_same(&whole, &other, "one by one");
    for (size_t step = 1; step < size; step = step * 4 + size % 7) {
        other.len = 0;
        scan_all(&other, tools, text, size, step, 1000, 0);
        must_be_same(&whole, &other, "in pieces");
    }
    free(text);
    return 0;
}
