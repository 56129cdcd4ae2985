/* outbox.c: bytes on their way out of a descriptor that does not block. */
#include "inner.h"

#include <errno.h>
#include <unistd.h>

enum { COMPACT_BYTES = 64 * 1024 };

size_t outbox_left(const outbox *o) { return o->bytes.len - o->at; }

int outbox_write(outbox *o) {
    while (o->at < o->bytes.len) {
        const ssize_t n = write(o->fd, o->bytes.data + o->at, o->bytes.len - o->at);
        if (n >= 0) o->at += (size_t)n;
        else if (errno != EINTR) return -errno;
    }
    return 0;
}

void outbox_compact(outbox *o) {
    if (o->at < COMPACT_BYTES || o->at < outbox_left(o)) return;
    memmove(o->bytes.data, o->bytes.data + o->at, outbox_left(o));
    o->bytes.len -= o->at;
    o->at = 0;
}
