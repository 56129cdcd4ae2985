/* inner.h: the board's peers as its own files see them. Internal. */
#ifndef TB_INNER_H
#define TB_INNER_H

#include "batch.h"
#include "board.h"

#include <stddef.h>
#include <sys/epoll.h>

enum { CALLER, HOST, INPUT };

/* Bytes on their way to a descriptor: [at, bytes.len) has not been taken yet. */
typedef struct {
    buffer bytes;
    size_t at;
    int fd;
    int watching; /* the descriptor took no more: wait until it does */
} outbox;

/* What epoll hands back. A host has a second one, for its input. */
typedef struct peer {
    int kind;
    int dirty;
    struct peer *next_dirty;
} peer;

/* A reply that waits for those in front of it. */
typedef struct {
    int64_t at;
    int64_t lines;
    char *data;
    size_t len;
} held_reply;

typedef struct caller {
    tb_caller seen; /* first: the owner's view of it */
    peer peer;
    const tb_tools *tools;
    tb_framer *framer;
    outbox out;
    held_reply *held; /* a heap, the lowest place first */
    int32_t held_count, held_capacity;
    int more;         /* the framer holds lines that have not been looked at, */
    int resuming;     /* and its next turn is in the next round */
    struct caller *next_resuming;
    ssize_t got;      /* what the last read said; -EAGAIN: it has been seen to */
    int closed;
    int told;         /* of its end */
    int32_t refs;     /* runs under way, and the owner */
} caller;

enum { FENCE_NAME = 48 };

typedef struct {
    int64_t who, work, at;
    caller *caller;
    int32_t tool, suspect, count;
    size_t from, to;          /* its lines, in the host's `out` */
    size_t ids_from, ids_to;  /* in the host's `ids`; the same where there are none */
    int has_ids;
    tb_entry **entries;       /* of the lines left, or NULL */
    int32_t entries_at;
    double timeout, begun;
    char fence[FENCE_NAME];
    size_t fence_len;         /* 0: none, or passed */
} run;

typedef struct host {
    tb_host seen; /* first */
    peer peer, input;
    tb_framer *framer;
    int out_fd;
    outbox out;   /* lines stay in it until they are answered, so that they can be given to another one */
    buffer ids;
    run *flight;  /* a ring of `capacity`, a power of two */
    uint32_t head, capacity;
    int waiting;  /* for tb_host_resume */
    int muted;
    int reading;
    double deadline;
    struct host *next, *previous;
} host;

typedef struct {
    int64_t *rows;
    int32_t count, capacity;
    buffer data;
} rows;

typedef struct {
    tb_board seen; /* first */
    int poll, timer;
    double armed;     /* when the timer goes off; 0: never */
    tb_batch *scanned;
    tb_cache *cache;
    buffer entries;   /* of the calls with keys at hand */
    buffer scratch;
    rows rows[2];
    int filling;
    int64_t spoke;    /* which caller was the last to speak, */
    double mixed;     /* and when another one was */
    int32_t skip, skipped; /* turns that nobody looks again, now and after the last time that it did not pay */
    int failed;       /* out of memory; said at the next opportunity */
    peer *dirty;
    caller *resuming; /* who has lines left */
    host *hosts;
    tb_tool **tools;  /* by index */
    int32_t tool_count;
    char fence[32];   /* how the name of each of its fences begins: nobody else can know it */
    size_t fence_len;
    uint64_t fences;
} board;

static inline board *of_board(tb_board *b) { return (board *)(void *)b; }
static inline caller *of_caller(tb_caller *c) { return (caller *)(void *)c; }
static inline host *of_host(tb_host *h) { return (host *)(void *)h; }

/* board.c */
int64_t *add_row(board *b, int what, int64_t who); /* NULL without memory, which is remembered */
void drop_row(board *b); /* the last one: not all of it could be said */
int64_t row_data(board *b, const char *data, size_t len); /* copies it; where it stands, or -1 without memory */
int row_align(board *b, size_t to); /* what comes next stands at a multiple of this; 0, or -1 without memory */
void make_dirty(board *b, peer *p);
double clock_now(void);
int watch_fd(const board *b, int fd, uint32_t events, void *p);
void unwatch_fd(const board *b, int fd);
void arm(board *b, host *h);
tb_tool *tool_of(const board *b, int32_t index);

/* outbox.c */
int outbox_write(outbox *o); /* 0, or -errno; -EAGAIN: the peer takes no more for now */
void outbox_compact(outbox *o); /* forgets what has been written */
size_t outbox_left(const outbox *o);

/* caller.c */
void caller_read(board *b, caller *c);
void caller_digest(board *b, caller *c); /* what has been read */
void callers_resume(board *b);
void caller_flush(board *b, caller *c);
void caller_settle(board *b, caller *c, int64_t at, const char *data, size_t len, int64_t lines);
int caller_in_turn(const caller *c, int64_t at); /* a reply for this place may go straight into its outbox */
void caller_settled(board *b, caller *c, int64_t at, int64_t lines); /* and has */
void caller_release(caller *c);
int64_t *caller_row(board *b, const caller *c, const int32_t *item, int what, int64_t at);
int caller_row_lines(board *b, int64_t *row, const char *lines, size_t len, const char *ids, size_t ids_len);
void caller_lose(board *b, caller *c); /* without memory for a line, or for its answer */
double timeout_of(const board *b, const tb_tool *tool);

/* keyed.c */
void caller_keyed(board *b, caller *c, const int32_t *item, const tb_view *v);

/* host.c */
void host_readable(board *b, host *h);
void host_flush(board *b, host *h);
void host_late(board *b, host *h);
int host_send(board *b, host *h, const tb_run *r);

/* place.c */
int may_pass(board *b, const tb_tool *tool);

#endif
