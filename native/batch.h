/* batch.h: the memory that scanning and taking write into, kept from read to read. Internal. */
#ifndef TB_BATCH_H
#define TB_BATCH_H

#include "buffer.h"
#include "wire.h"

enum { BATCH_KEEP = 1024 * 1024 };

struct tb_batch {
    buffer out;
    buffer ids;
    buffer keys;
    int32_t *items;
    int32_t count;
    int32_t capacity;
};

/* tb_take, again and again: what is taken stands in `out` behind what was taken before, until `max_lines` are there.
 * A failure that quotes `any_fence`, how all their names begin, is no call's answer: TB_REPLY_SWALLOWED. */
int take_more(tb_framer *f, buffer *out, int32_t max_lines, const char *fence, size_t fence_len,
              const char *any_fence, size_t any_fence_len, const char *ids, size_t ids_len, int32_t max_depth,
              tb_taken *taken);

#endif
