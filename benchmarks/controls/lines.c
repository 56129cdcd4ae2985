/* lines.c: the best single-threaded line server: what a toolhost would be if it had one tool, no plugin, no state, no
 * leases, no keys and no limits. Each line is parsed whole with yyjson, in place; the reply is what our toolhost says.
 *
 *   lines      lines on stdin, replies on stdout, until the end */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "yyjson.h"

enum { IN = 4 << 20, OUT = 4 << 20, POOL = 1 << 16 };

static char in[IN + YYJSON_PADDING_SIZE], out[OUT], pool[POOL];
static size_t filled;

static void flush(void) {
    for (size_t at = 0; at < filled;) {
        const ssize_t n = write(1, out + at, filled - at);
        if (n <= 0) exit(1);
        at += (size_t)n;
    }
    filled = 0;
}

static void say(const char *text, size_t len) {
    memcpy(out + filled, text, len);
    filled += len;
}
#define SAY(text) say(text, sizeof text - 1)

static void say_string(const char *text, size_t len) {
    static unsigned char special[256];
    if (!special['"']) {
        for (int c = 0; c < 32; c++) special[c] = 1;
        special['"'] = special['\\'] = 1;
    }
    char *to = out + filled;
    *to++ = '"';
    for (size_t i = 0; i < len; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (!special[c]) *to++ = (char)c;
        else if (c >= 32) *to++ = '\\', *to++ = (char)c;
        else to += sprintf(to, "\\u%04x", c);
    }
    *to++ = '"';
    filled = (size_t)(to - out);
}

static void answer(char *line, size_t len) {
    yyjson_alc alc;
    yyjson_alc_pool_init(&alc, pool, sizeof pool);
    char kept[YYJSON_PADDING_SIZE]; /* yyjson wants zeros behind its input, and there the next line begins */
    memcpy(kept, line + len, sizeof kept);
    memset(line + len, 0, sizeof kept);
    yyjson_doc *doc = yyjson_read_opts(line, len, YYJSON_READ_INSITU, len < POOL / 32 ? &alc : NULL, NULL);
    memcpy(line + len, kept, sizeof kept);
    if (filled + 6 * len + 512 > OUT) flush();
    yyjson_val *root = yyjson_doc_get_root(doc), *aid = yyjson_obj_get(root, "aid"), *input = yyjson_obj_get(root, "input_json");
    if (!yyjson_is_str(aid)) {
        SAY("{\"ok\":false,\"error\":\"invalid JSON\"}\n");
    } else if (!yyjson_equals_str(aid, "AID.DEMO.ECHO.v1")) {
        SAY("{\"ok\":false,\"error\":\"tool not found\"}\n");
    } else {
        SAY("{\"ok\":true,\"status\":\"OK\",\"output_json\":");
        if (yyjson_is_str(input)) say_string(yyjson_get_str(input), yyjson_get_len(input));
        else SAY("\"{}\"");
        SAY(",\"error\":\"\",\"ds_state\":{\"delta\":true,\"slots\":{},\"removed_slots\":[]}}\n");
    }
    yyjson_doc_free(doc);
}

int main(void) {
    size_t len = 0;
    for (;;) {
        const ssize_t n = read(0, in + len, IN - len);
        if (n <= 0) return 0;
        len += (size_t)n;
        char *line = in, *end;
        while ((end = memchr(line, '\n', len - (size_t)(line - in)))) {
            answer(line, (size_t)(end - line));
            line = end + 1;
        }
        len -= (size_t)(line - in);
        memmove(in, line, len);
        if (len == IN) return fprintf(stderr, "lines: a line over %d bytes\n", IN), 1;
        flush();
    }
}
