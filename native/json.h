/* json.h: a strict, iterative JSON reader over a line: it validates and finds ends, it builds nothing. Internal. */
#ifndef TB_JSON_H
#define TB_JSON_H

#include "simd.h"

enum { JSON_MAX_DEPTH = 1024 };

typedef struct {
    const char *begin; /* of the line: from here to the end may be read */
    const char *p;
    const char *end;
    int max_depth;
    int too_deep; /* the reason, where a value was refused for its depth alone */
} json_reader;

/* Each moves `p` behind what it read and returns 1, or returns 0 where the text is not JSON. */
int json_value(json_reader *r, int depth); /* any value; `depth` levels are open around it */
int json_rest(json_reader *r, const char *from, int *escaped); /* a string, from a byte of its inside on */

static inline int json_string(json_reader *r, int *escaped) { /* at the opening quote */
    const char *p = r->p + 1;
    *escaped = 0;
    if (r->end - p < BLOCK) return json_rest(r, p, escaped);
    const block b = block_at(p);
    const uint32_t any = marked(b);
    if (!(bits(b.quote) & any & -any)) return json_rest(r, p, escaped);
    r->p = p + __builtin_ctz(any) + 1; /* most strings are short and plain */
    return 1;
}

static inline int json_space(json_reader *r) { /* always 1 */
    const char *p = r->p, *end = r->end;
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n')) p++;
    r->p = p;
    return 1;
}

/* Decodes a checked string's inside into `out` (which has room for `len` bytes); the decoded length. */
size_t json_unescape(const char *text, size_t len, char *out);

#endif
