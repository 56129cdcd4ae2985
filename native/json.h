/* json.h: a strict, iterative JSON reader over a line: it validates and finds ends, it builds nothing. Internal. */
#ifndef TB_JSON_H
#define TB_JSON_H

#include <stddef.h>

enum { JSON_MAX_DEPTH = 1024 };

typedef struct {
    const char *p;
    const char *end;
    int max_depth;
    int too_deep; /* the reason, where a value was refused for its depth alone */
} json_reader;

/* Each moves `p` behind what it read and returns 1, or returns 0 where the text is not JSON. */
int json_string(json_reader *r, int *escaped); /* at the opening quote */
int json_value(json_reader *r, int depth);     /* any value; `depth` levels are open around it */

static inline int json_space(json_reader *r) { /* always 1 */
    const char *p = r->p, *end = r->end;
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n')) p++;
    r->p = p;
    return 1;
}

/* Decodes a checked string's inside into `out` (which has room for `len` bytes); the decoded length. */
size_t json_unescape(const char *text, size_t len, char *out);

#endif
