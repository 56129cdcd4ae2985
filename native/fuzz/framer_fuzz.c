/* framer_fuzz.c: the framer against a model that looks at one byte at a time; and its bound on memory.
 * Input: the cap (its square), the size of a piece, and what arrives. In it, 1 drops the line that has begun, 2 and a
 * byte n are n KiB of text. Behind an odd piece one line at most is taken, and the others wait. */
#include "fuzz.h"


typedef struct {
    char *line; /* a byte more than the cap */
    size_t len, cap;
    buffer said;
    int skipping;
} model;

static void say(buffer *said, int kind, const char *data, size_t len) {
    note_number(said, kind);
    note(said, data, len);
    note(said, "\n", 1);
}

static void model_line(model *m) {
    if (m->len && m->line[m->len - 1] == '\r') m->len--;
    say(&m->said, TB_LINE, m->line, m->len);
    m->len = 0;
}

static void model_feed(model *m, const char *data, size_t len) {
    for (const char *end = data + len; data < end; data++) {
        if (m->skipping) {
            m->skipping = *data != '\n';
        } else if (*data == '\n') {
            model_line(m);
        } else {
            if (m->len < m->cap || (m->len == m->cap && *data == '\r')) {
                m->line[m->len++] = *data;
                continue;
            }
            say(&m->said, TB_OVERSIZE, m->line, m->cap);
            m->len = 0;
            m->skipping = 1;
        }
    }
}

static void take_line(tb_framer *f, buffer *said) {
    tb_line line;
    const int kind = tb_framer_next(f, &line);
    if (kind != TB_NONE) say(said, kind, line.data, line.len);
}

static void take_all(tb_framer *f, const model *m, buffer *said) {
    size_t before;
    do {
        before = said->len;
        take_line(f, said);
    } while (said->len > before);
    MUST(tb_framer_pending(f) == m->len);
    MUST(tb_framer_skipping(f) == m->skipping);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static char text[255 * 1024];
    if (size < 2) return 0;
    memset(text, 'x', sizeof text);
    const size_t cap = 1 + (size_t)data[0] * data[0] * 5, step = 1 + data[1];
    tb_framer *f = tb_framer_new(cap);
    model m = {.cap = cap, .line = malloc(cap + 1)};
    MUST(m.line);
    buffer said = {0};
    size_t at = 2;
    while (at < size) {
        if (data[at] == 1) {
            take_all(f, &m, &said);
            tb_framer_drop(f);
            m.skipping |= m.len > 0;
            m.len = 0;
            at++;
            continue;
        }
        size_t n = 0;
        if (data[at] == 2 && at + 1 < size) {
            n = (size_t)data[at + 1] * 1024;
            at += 2;
            MUST(!tb_framer_feed(f, text, n));
            model_feed(&m, text, n);
        } else {
            while (n < step && at + n < size && data[at + n] != 1 && (n == 0 || data[at + n] != 2)) n++;
            char *piece = exactly(data + at, n);
            MUST(!tb_framer_feed(f, piece, n));
            model_feed(&m, piece, n);
            free(piece);
            at += n;
        }
        if (step & 1) take_line(f, &said);
        else take_all(f, &m, &said);
    }
    take_all(f, &m, &said);
    tb_framer_end(f);
    if (m.len) model_line(&m);
    take_all(f, &m, &said);
    must_be_same(&m.said, &said, "framer");
    tb_framer_free(f);
    free(m.line);
    free(m.said.data);
    free(said.data);
    return 0;
}
