/* shape.h: lines of one batch are mostly alike: of one that is like the line before, only the values need a look. Internal. */
#ifndef TB_SHAPE_H
#define TB_SHAPE_H

#include "json.h"

enum { SHAPE_HOLES = 6 };

typedef struct {
    const char *from, *to;
} span;

/* A valid line, and the values of some of its own members (not of their members), in order: these are its holes. A line
 * with the same bytes around valid values of the same kinds has the same members, so all but the holes is known of it. */
typedef struct {
    const char *begin, *end;
    int count;
    span holes[SHAPE_HOLES];
} shape;

/* What can be told from a value's first byte: strings, objects, numbers that are not negative. */
static inline int shape_can_hole(const char *value) {
    return *value == '"' || *value == '{' || (*value >= '0' && *value <= '9');
}

/* 0 where the value is of another kind, or wrong, or not worth a look here. */
static inline int shape_value(json_reader *r, char like) {
    enum { MANY_DIGITS = 18 };
    int escaped;
    if (like == '"') return *r->p == '"' && json_string(r, &escaped);
    if (like == '{') return *r->p == '{' && json_value(r, 1);
    const char *from = r->p;
    while (r->p < r->end && *r->p >= '0' && *r->p <= '9') r->p++;
    const ptrdiff_t digits = r->p - from;
    return digits == 1 || (digits > 1 && digits <= MANY_DIGITS && *from != '0'); /* what follows tells if it is whole */
}

/* Has the line this shape? Then its values are where the holes were. */
static inline int shape_fits(const shape *s, const char *data, size_t len, int max_depth, span *values) {
    json_reader r = {data, data, data + len, max_depth, 0};
    const char *same = s->begin;
    for (int i = 0; i < s->count; i++) {
        const ptrdiff_t n = s->holes[i].from - same;
        if (r.end - r.p <= n || !same_bytes(r.p, same, (size_t)n)) return 0;
        r.p += n;
        values[i].from = r.p;
        if (!shape_value(&r, *s->holes[i].from)) return 0;
        values[i].to = r.p;
        same = s->holes[i].to;
    }
    const ptrdiff_t n = s->end - same;
    return r.end - r.p == n && same_bytes(r.p, same, (size_t)n);
}

#endif
