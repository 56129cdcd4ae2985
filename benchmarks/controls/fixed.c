/* fixed.c: a toolhost that does nothing: every call gets the same answer, unread. What is left is what carries the lines.
 *
 *   fixed --list      FIXED_TOOLS (default 1) tools: AID.FIXED.T0.v1, AID.FIXED.T1.v1 …
 *   fixed --serve     the answer is what pipeline.c's `same` calls without payload expect
 *
 * Names that begin with '_' are refused by name, as the protocol wants it: the broker's fences are such lines. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char ANSWER[] =
    "{\"ok\":true,\"status\":\"OK\",\"output_json\":\"{\\\"n\\\":\\\"0-0\\\",\\\"p\\\":\\\"\\\"}\",\"error\":\"\","
    "\"ds_state\":{\"delta\":true,\"slots\":{},\"removed_slots\":[]}}\n";
static const char HEAD[] = "{\"aid\":\"";

enum { IN = 1 << 20, OUT = 1 << 18 };
static char in[IN], out[OUT];
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
    if (filled + len > OUT) flush();
    memcpy(out + filled, text, len);
    filled += len;
}

static void refuse(const char *name, const char *end) {
    char text[256];
    const char *quote = memchr(name, '"', (size_t)(end - name));
    const int len = (int)((quote ? quote : end) - name);
    say(text, (size_t)snprintf(text, sizeof text, "{\"ok\":false,\"error\":\"tool not found: %.*s\"}\n", len < 128 ? len : 128, name));
}

static int list(void) {
    const char *wanted = getenv("FIXED_TOOLS");
    const int tools = wanted ? atoi(wanted) : 1;
    printf("{\"ok\":true,\"tools\":[");
    for (int i = 0; i < tools; i++) {
        printf("%s{\"aid\":\"AID.FIXED.T%d.v1\",\"name\":\"fixed %d\",\"deterministic\":true,\"side_effects\":[\"none\"]}", i ? "," : "", i, i);
    }
    printf("]}");
    return 0;
}

static int serve(void) {
    size_t len = 0;
    int skipping = 0; /* a line longer than the buffer: its beginning is enough */
    for (;;) {
        const ssize_t n = read(0, in + len, IN - len);
        if (n <= 0) return 0;
        len += (size_t)n;
        char *line = in, *end;
        while ((end = memchr(line, '\n', len - (size_t)(line - in)))) {
            const char *name = line + sizeof HEAD - 1;
            if (end == line) return flush(), 0; /* an empty line asks for the end */
            if (!skipping && name < end && *name == '_') refuse(name, end);
            else say(ANSWER, sizeof ANSWER - 1);
            skipping = 0;
            line = end + 1;
        }
        len -= (size_t)(line - in);
        memmove(in, line, len);
        if (len == IN) {
            skipping = 1;
            len = 0;
        }
        flush();
    }
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "--list")) return list();
    if (argc > 1 && !strcmp(argv[1], "--serve")) return serve();
    return fprintf(stderr, "usage: fixed --list | --serve\n"), 2;
}
