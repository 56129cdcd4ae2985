/* alike_test.c: a batch of lines, alike or not, is read as each line would be on its own. */
#include "batch.h"
#include "check.h"

#define INPUT "\"aid\":\"T\",\"input_json\":"
#define REST ",\"error\":\"\",\"ds_state\":{\"delta\":true,\"slots\":{},\"removed_slots\":[]}}"
#define DEPTH 6

enum { ROOM = 1 << 17 };

/* What became of the lines of a text, written down: the same text has the same record, however it was cut. */
typedef struct {
    char text[ROOM];
    size_t len;
    int64_t succeeded;
} record;

static void note(record *r, const char *data, size_t len) {
    if (len) memcpy(r->text + r->len, data, len);
    r->len += len;
}

static void note_number(record *r, int64_t n) { r->len += (size_t)sprintf(r->text + r->len, "%lld ", (long long)n); }

/* The members' places in the framer are the same, too: it was not fed in between. */
static void note_item(record *r, const tb_view *v, const int32_t *item) {
    const char *out = v->out + item[TB_I_OUT], *ids = v->ids + item[TB_I_IDS], *keys = v->keys + item[TB_I_KEYS];
    size_t out_left = (size_t)item[TB_I_OUT_LEN], ids_left = (size_t)item[TB_I_IDS_LEN];
    size_t keys_left = (size_t)item[TB_I_KEYS_LEN];
    for (int32_t i = 0; i < item[TB_I_COUNT]; i++) {
        const size_t n = tb_skip_lines(out, out_left, 1), m = tb_skip_lines(ids, ids_left, 1);
        const size_t key = tb_skip_lines(keys, keys_left, 1);
        for (int k = 0; k < TB_ITEM; k++)
            if (k == TB_I_KIND || k == TB_I_TOOL || k == TB_I_PROBLEM || k == TB_I_MEMBER || k >= TB_I_SPANS)
                note_number(r, item[k]);
        note(r, out, n);
        note(r, ids, m);
        note(r, keys, key);
        out += n;
        ids += m;
        keys += key;
        out_left -= n;
        ids_left -= m;
        keys_left -= key;
    }
    CHECK(!out_left && !ids_left && !keys_left);
}

static void scan_all(record *r, tb_framer *f, int32_t at_once) {
    static tb_tools *tools;
    if (!tools) {
        tools = tb_tools_new();
        tb_tools_put(tools, "T", 1, 0);
        tb_tools_put(tools, "C", 1, 1);
        tb_tools_open(tools, 0, 1);
    }
    tb_batch *b = tb_batch_new();
    tb_view v;
    do {
        CHECK(tb_scan(f, tools, b, at_once, DEPTH, &v) == 0);
        for (int32_t i = 0; i < v.count; i++) note_item(r, &v, v.items + (size_t)i * TB_ITEM);
    } while (v.more);
    tb_batch_free(b);
}

static void take_all(record *r, tb_framer *f, int32_t at_once, int with_ids) {
    const char *ids = "1\n\"two\"\nnull\n[4]\n5\n6\n";
    size_t left = strlen(ids);
    tb_batch *b = tb_batch_new();
    tb_taken t;
    do {
        CHECK(tb_take(f, b, at_once, NULL, 0, with_ids ? ids : NULL, with_ids ? left : 0, DEPTH, &t) == 0);
        note(r, t.data, t.len);
        r->succeeded += t.succeeded;
        if (t.stopped) note_number(r, t.stopped);
        if (t.stopped) note(r, t.junk, t.junk_len);
        ids += t.ids_used;
        left -= t.ids_used;
    } while (t.stopped || t.lines == at_once);
    tb_batch_free(b);
}

enum { SCAN, TAKE, TAKE_WITH_IDS };

static void read_all(record *r, const char *text, size_t len, int how, int32_t at_once) {
    tb_framer *f = tb_framer_new(1 << 20);
    r->len = 0;
    r->succeeded = 0;
    tb_framer_feed(f, text, len);
    tb_framer_end(f);
    if (how == SCAN) scan_all(r, f, at_once);
    else take_all(r, f, at_once, how == TAKE_WITH_IDS);
    tb_framer_free(f);
}

static void alike(const char *text, size_t len, int how) {
    static record batch, single;
    read_all(&batch, text, len, how, 100);
    read_all(&single, text, len, how, 1);
    checks++;
    if (batch.succeeded == single.succeeded && batch.len == single.len && !memcmp(batch.text, single.text, batch.len)) return;
    failures++;
    fprintf(stderr, "%.*s\nat once: %.*s\none by one: %.*s\n", (int)len, text, (int)batch.len, batch.text, (int)single.len,
            single.text);
}

/* The line, another one, and the line again, with and without an end. */
static void among(const char *line, const char *other, size_t len, int how) {
    char text[4096];
    const size_t n = strlen(line);
    size_t at = 0;
    for (int i = 0; i < 2; i++) {
        memcpy(text + at, line, n);
        text[at + n] = '\n';
        memcpy(text + at + n + 1, other, len);
        at += n + 1 + len;
        alike(text, at, how);
        text[at++] = '\n';
    }
    alike(text, at, how);
}

static const char *const REQUESTS[] = {
    "{" INPUT "\"{\\\"n\\\":\\\"0-123\\\",\\\"p\\\":\\\"\\\"}\"}",
    "{\"id\":7," INPUT "\"{}\"}",
    "{\"id\":\"seven\"," INPUT "\"\xc3\xa9 \xf0\x9f\x98\x80 \\u00e9\",\"x\":1}",
    "{ \"aid\" : \"T\" , \"id\" : {\"a\":1} , \"inputs\" : {\"a\":\"b\"} }",
    "{\"run_id\":\"r\",\"inputs\":{\"a\":[]},\"aid\":\"T\",\"request_id\":\"q\",\"traceparent\":\"t\",\"id\":0}",
    "{\"aid\":\"T\"}",
    "{\"id\":7,\"idempotency_key\":\"k-1\"," INPUT "\"{}\"}",
    "{" INPUT "\"{}\",\"idempotency_key\":\"k\"}",
    "{\"id\":null,\"aid\":\"T\"}",
    "{\"aid\":\"C\",\"input_json\":\"{}\"}",
};

static const char *const REPLIES[] = {
    "{\"ok\":true,\"status\":\"OK\",\"output_json\":\"{\\\"n\\\":1}\"" REST,
    "{\"ok\":false,\"status\":\"TOOL_ERROR\",\"output_json\":\"\",\"error\":\"no \xc3\xa9\"}",
    "{\"ok\":true}",
    "{}",
    " { \"output_json\" : \"{}\" , \"ok\" : true } ",
    "{\"output_json\":\"{}\",\"id\":1,\"ok\":true}",
};

#define EACH(list) (size_t i = 0; i < sizeof list / sizeof *list; i++)

/* Each byte replaced by, preceded by, and gone for each byte that means something; and the line cut there. */
static void broken_everywhere(const char *line, int how) {
    const char bytes[] = "{}[]:,\"\\/019eE+-.tfnubOK \t\r\n\x01\x1f\x7f\x80\xc3\xa9\xed\xf4\xff";
    const size_t n = strlen(line);
    char other[512];
    for (size_t at = 0; at <= n; at++) {
        memcpy(other, line, n + 1);
        among(line, other, at, how);
        memmove(other + at, line + at + 1, at < n ? n - at : 0);
        if (at < n) among(line, other, n - 1, how);
        for (size_t k = 0; k < sizeof bytes; k++) {
            memcpy(other, line, n);
            other[at] = bytes[k];
            among(line, other, at < n ? n : n + 1, how);
            memcpy(other + at + 1, line + at, n - at);
            among(line, other, n + 1, how);
        }
    }
}

static void a_line_that_breaks_the_shape_is_read_on_its_own(void) {
    for EACH(REQUESTS) broken_everywhere(REQUESTS[i], SCAN);
    for EACH(REPLIES) {
        broken_everywhere(REPLIES[i], TAKE);
        broken_everywhere(REPLIES[i], TAKE_WITH_IDS);
    }
}

static void any_two_lines_may_follow_each_other(void) {
    for EACH(REQUESTS)
        for (size_t k = 0; k < sizeof REQUESTS / sizeof *REQUESTS; k++)
            among(REQUESTS[i], REQUESTS[k], strlen(REQUESTS[k]), SCAN);
    for EACH(REPLIES)
        for (size_t k = 0; k < sizeof REPLIES / sizeof *REPLIES; k++) {
            among(REPLIES[i], REPLIES[k], strlen(REPLIES[k]), TAKE);
            among(REPLIES[i], REPLIES[k], strlen(REPLIES[k]), TAKE_WITH_IDS);
        }
}

static void values_of_every_kind_stand_in_every_place(void) {
    static const char *const values[] = {
        "0", "-1", "01", "1.5", "1e3", "1e999", "123456789012345678", "1234567890123456789", "00", "true", "null", "[]",
        "[1]", "{}", "{\"a\":{}}", "{\"a\":[[[1]]]}", "{\"a\":[[[[1]]]]}", "{\"a\":[[[[[1]]]]]}", "{\"a\":01}", "{\"\x01\":1}",
        "\"\"", "\"T\"", "\"C\"", "\"OK\"", "\"\\u0054\"", "\"a\\tb\"", "\"\\ud83d\\ude00\"", "\"\\ud83d\"", "\"\\x\"",
        "\"\xff\"", "\"\t\"", " 1", "\"x\" ", "\"x\",\"aid\":\"C\"", "\"x\",\"y\":2", "1,\"id\":2", "\"x\",\"\\u0069d\":2",
        "\"x\",\"status\":\"BAD\"", "\"x", "x\"", "", "{\"long\":\"text without anything to mark, for more than a block\\t\"}",
    };
    static const struct {
        const char *before, *behind;
    } places[] = {
        {"{\"id\":", "," INPUT "\"{}\"}"},
        {"{" INPUT, "}"},
        {"{\"aid\":\"T\",\"inputs\":", "}"},
        {"{" INPUT "\"{}\",\"id\":", "}"},
        {"{" INPUT "\"{}\",\"run_id\":", "}"},
        {"{\"aid\":", ",\"input_json\":\"{}\"}"},
        {"{" INPUT "\"{}\",\"x\":", "}"},
        {"{\"ok\":true,\"status\":\"OK\",\"output_json\":", REST},
        {"{\"ok\":", ",\"output_json\":\"{}\"}"},
        {"{\"ok\":true,\"status\":", ",\"output_json\":\"{}\"}"},
        {"{\"output_json\":\"{}\",\"id\":", "}"},
    };
    char line[512], other[512];
    for EACH(places)
        for (size_t a = 0; a < sizeof values / sizeof *values; a++)
            for (size_t b = 0; b < sizeof values / sizeof *values; b++) {
                snprintf(line, sizeof line, "%s%s%s", places[i].before, values[a], places[i].behind);
                const int n = snprintf(other, sizeof other, "%s%s%s", places[i].before, values[b], places[i].behind);
                among(line, other, (size_t)n, SCAN);
                among(line, other, (size_t)n, TAKE);
            }
}

/* A string of every length up to a few blocks, with everything that needs a look in it; the last of these are wrong. */
static void strings_are_read_alike_wherever_a_block_ends(void) {
    enum { GOOD = 10 };
    static const char *const specials[] = {"", "\\\"", "\\\\", "\\\\\\\"", "\\n", "\\u00e9", "\\ud83d\\ude00", "\xc3\xa9",
                                           "\xe4\xb8\x96", "\xf0\x9f\x98\x80", "\x01", "\xff", "\xc3", "\\", "\\u12", "\"",
                                           "\\x", "\\\x80", "\\ud83d", "\\\\\\", "\x1f", "\xed\xa0\x80", "\xc0\x80"};
    static record r;
    char line[256], other[256], expected[32];
    for (int len = 0; len < 36; len++)
        for EACH(specials)
            for (int at = 0; at <= len; at++) {
                snprintf(line, sizeof line, "{" INPUT "\"%.*s\"}", len, "plain text plain text plain text plain text");
                const int n = snprintf(other, sizeof other, "{" INPUT "\"%.*s%s%.*s\"}", at,
                                       "................................................", specials[i], len - at,
                                       "________________________________________________");
                read_all(&r, other, (size_t)n, SCAN, 1);
                const int good = i < GOOD; /* kind, tool, problem */
                snprintf(expected, sizeof expected, "%d %d %d ", good ? TB_PLAIN : TB_BAD, good ? 0 : -1,
                         good ? TB_OK : TB_INVALID_JSON);
                CHECK(!memcmp(r.text, expected, strlen(expected)));
                among(line, other, (size_t)n, SCAN);
                among(line, other, (size_t)n, TAKE);
            }
}

/* The framer's first memory is 64 KiB: a text of just that ends where reading on would be a mistake (ASan tells). */
static void at_the_end(const char *line, size_t len) {
    enum { MEMORY = 64 * 1024 };
    static char text[MEMORY];
    memset(text, 'x', MEMORY);
    memcpy(text + MEMORY - len, line, len);
    text[MEMORY - len - 1] = '\n';
    alike(text, MEMORY, SCAN); /* behind junk, so on its own */
    memcpy(text, "{" INPUT "\"", strlen("{" INPUT "\""));
    memcpy(text + MEMORY - len - 3, "\"}", 2);
    alike(text, MEMORY, SCAN);
    alike(text, MEMORY, TAKE);
}

static void the_last_byte_of_memory_is_the_last_that_is_read(void) {
    static const char *const tails[] = {"x\"}", "\\\\\"}", "\xc3\xa9\"}", "\"", "\\", "\\u00e", "\xf0\x9f", "x", "\"}}"};
    char line[128];
    for EACH(tails)
        for (int len = 0; len < 40; len++) {
            const int n = snprintf(line, sizeof line, "{" INPUT "\"%.*s%s", len, "................................", tails[i]);
            at_the_end(line, (size_t)n);
            const int m = snprintf(line, sizeof line, "{\"%.*s", len, tails[i]); /* shorter than a block */
            at_the_end(line, (size_t)m);
        }
    for EACH(REQUESTS)
        for (size_t cut = 1; cut <= strlen(REQUESTS[i]); cut++) at_the_end(REQUESTS[i], cut);
}

static tb_taken taken_more(tb_framer *f, buffer *out, const char *next_fence) {
    tb_taken t = {0};
    CHECK(take_more(f, out, 3, "_f1", 3, next_fence, next_fence ? strlen(next_fence) : 0, NULL, 0, DEPTH, &t) == 0);
    return t;
}

static void a_reply_to_the_next_fence_ends_the_run(void) {
    const char text[] = "{\"error\":\"no _f1\"}\n{\"ok\":true,\"out\":\"_f2\"}\n{\"ok\":false,\"error\":\"no _f2\"}\n{\"ok\":true}\n";
    buffer out = {0};
    tb_framer *f = tb_framer_new(1000);
    buffer_reserve(&out, 1);
    buffer_char(&out, '>');
    tb_framer_feed(f, text, sizeof text - 1);
    tb_taken t = taken_more(f, &out, "_f2");
    CHECK(t.fenced && t.lines == 1 && t.succeeded == 1 && t.stopped == TB_REPLY_SWALLOWED);
    CHECK(same(t.data, t.len, ">{\"ok\":true,\"out\":\"_f2\"}\n"));
    CHECK(same(t.junk, t.junk_len, "{\"ok\":false,\"error\":\"no _f2\"}"));
    tb_line line;
    CHECK(tb_framer_next(f, &line) == TB_LINE && same(line.data, line.len, "{\"ok\":true}"));
    tb_framer_feed(f, text, sizeof text - 1);
    t = taken_more(f, &out, NULL);
    CHECK(t.fenced && t.lines == 3 && t.succeeded == 2 && t.stopped == TB_REPLY_OK);
    tb_framer_free(f);
    free(out.data);
}

int main(void) {
    a_line_that_breaks_the_shape_is_read_on_its_own();
    any_two_lines_may_follow_each_other();
    values_of_every_kind_stand_in_every_place();
    strings_are_read_alike_wherever_a_block_ends();
    the_last_byte_of_memory_is_the_last_that_is_read();
    a_reply_to_the_next_fence_ends_the_run();
    printf("%d checks, %d failures\n", checks, failures);
    return failures != 0;
}
