/* envelope.h: one caller's line: its members, what is wrong with it, and the line that the toolhost gets. Internal. */
#ifndef TB_ENVELOPE_H
#define TB_ENVELOPE_H

#include "buffer.h"
#include "wire.h"

typedef struct {
    const char *name; /* where its name's quote stands */
    const char *value;
    const char *end;
    int escaped; /* a string value has escapes */
} member;

typedef struct {
    int32_t seen, twice;      /* a bit a known member */
    int problem;
    int about;                /* the member that the problem is about */
    int count;
    int order[TB_MEMBERS];    /* known members, by position */
    member known[TB_MEMBERS]; /* only what was seen */
} envelope;

/* Where a rewritten line, and in it the caller's input, stand in the buffer. */
typedef struct {
    size_t from, input, input_end, end;
} rewritten;

/* Reads one whole line. A truncated (oversize) one ends as invalid, with the members that came before the cut. */
void envelope_read(envelope *e, const char *data, size_t len, int max_depth);
/* The line that the toolhost gets: the state's reset first (unless the caller sent state: that is the policy's to
 * write), then aid, input_json and what we do not know, in the caller's order and words. 0, or -1 without memory. */
int envelope_rewrite(buffer *b, const envelope *e, const char *data, size_t len, rewritten *w);
/* Valid JSON as the inside of a string; twice its length is reserved. */
void put_escaped(buffer *b, const char *text, size_t len);

#endif
