/* batch.h: the memory that scanning and taking write into, kept from read to read. Internal. */
#ifndef TB_BATCH_H
#define TB_BATCH_H

#include "buffer.h"
#include "wire.h"

enum { BATCH_KEEP = 1024 * 1024 };

struct tb_batch {
    buffer out;
    buffer ids;
    int32_t *items;
    int32_t count;
    int32_t capacity;
};

#endif
