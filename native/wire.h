/* wire.h: the broker's bytes: cut lines, read envelopes, rewrite them, start toolhosts. No Python, no global state. */
#ifndef TB_WIRE_H
#define TB_WIRE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* What follows is read by cffi as well (build_ffi.py): plain declarations only. */

/* ---- framer: bytes in, lines out ------------------------------------------------------------------------------- */

/* Cuts a stream at '\n' ("\r\n" is tolerated) and enforces the cap. Memory never exceeds the cap plus one read: a line
 * that outgrows the cap is reported once as TB_OVERSIZE, and the rest of it is dropped as it streams by. */
typedef struct tb_framer tb_framer;

typedef struct {
    const char *data; /* inside the framer: valid until the next feed or read */
    size_t len;       /* without the line end; of an oversize line, the part that was kept */
} tb_line;

enum { TB_NONE = 0, TB_LINE = 1, TB_OVERSIZE = 2 };

tb_framer *tb_framer_new(size_t cap);
void tb_framer_free(tb_framer *f);
int tb_framer_feed(tb_framer *f, const char *data, size_t len); /* 0, or -ENOMEM */
ssize_t tb_framer_read(tb_framer *f, int fd);                   /* one read(2): bytes, 0 at the end, or -errno */
int tb_framer_next(tb_framer *f, tb_line *line);                /* TB_NONE, TB_LINE or TB_OVERSIZE */
void tb_framer_end(tb_framer *f);                               /* no more input: an unterminated line is a line */
void tb_framer_drop(tb_framer *f);                              /* the line that has begun is not wanted */
size_t tb_framer_pending(const tb_framer *f);                   /* bytes held, not yet taken as lines */
int tb_framer_skipping(const tb_framer *f);                     /* the rest of an oversize line is still to come */

/* ---- tools: the names that the scanner routes by --------------------------------------------------------------- */

typedef struct tb_tools tb_tools;

tb_tools *tb_tools_new(void);
void tb_tools_free(tb_tools *t);
int tb_tools_put(tb_tools *t, const char *name, size_t len, int32_t index); /* 0, or -ENOMEM */
void tb_tools_open(tb_tools *t, int32_t index, int open); /* open: plain calls need nobody's judgement */
int32_t tb_tools_find(const tb_tools *t, const char *name, size_t len);     /* index, or -1 */

/* ---- requests: a caller's lines, read and rewritten for the toolhost ------------------------------------------- */

/* What a line turned out to be. */
enum {
    TB_PLAIN,  /* a run of calls of one open tool, with nothing for the policy to decide */
    TB_CALL,   /* one call that the policy has to look at; tool is -1 where the name is not known */
    TB_BAD,    /* one line to refuse; `problem` says why, `member` which member it is about */
    TB_CLOSE,  /* an empty line: the caller asks for a graceful close */
    TB_KEYED,  /* as TB_PLAIN, but each call has an idempotency key (one that is short, and written without escapes) */
};

enum {
    TB_OK,
    TB_INVALID_JSON,
    TB_NOT_AN_OBJECT,
    TB_TOO_DEEP,
    TB_TOO_LONG,
    TB_TWICE,      /* a known member stands twice */
    TB_WRONG_TYPE, /* a known member is of the wrong type */
    TB_BOTH_INPUTS,
    TB_NO_AID,
    TB_NUL_NAME,   /* a member's name has a NUL: readers written in C would see a shorter one */
};

/* Known members, in the order of the item's spans. */
enum {
    TB_ID,
    TB_AID,
    TB_INPUT_JSON,
    TB_INPUTS,
    TB_DS_STATE,
    TB_IDEMPOTENCY_KEY,
    TB_LEASE_TOKEN,
    TB_TIMEOUT_MS,
    TB_SESSION,
    TB_STREAM,
    TB_TRACEPARENT,
    TB_RUN_ID,
    TB_REQUEST_ID,
    TB_MEMBERS,
};

/* One item a row of TB_ITEM integers, so that a binding fetches all rows of a read at once. Spans of members are
 * offsets from the view's `lines`, and -1 where the member is absent. */
enum {
    TB_I_KIND,
    TB_I_COUNT,
    TB_I_TOOL,
    TB_I_PROBLEM,
    TB_I_MEMBER,
    TB_I_OUT,     /* what goes to the toolhost: `count` lines, ds_state reset where the caller sent none */
    TB_I_OUT_LEN,
    TB_I_IDS,     /* the ids, one a line; length 0 where there are none */
    TB_I_IDS_LEN,
    TB_I_KEYS,    /* likewise, of TB_KEYED */
    TB_I_KEYS_LEN,
    TB_I_SPANS,
    TB_ITEM = TB_I_SPANS + 2 * TB_MEMBERS,
};

typedef struct {
    const int32_t *items; /* `count` rows of TB_ITEM */
    int32_t count;
    int32_t more;         /* the framer holds more lines: scan again */
    const char *out;
    const char *ids;
    const char *keys;
    const char *lines;    /* the caller's own text, in the framer: valid until its next feed or read */
} tb_view;

typedef struct tb_batch tb_batch;

tb_batch *tb_batch_new(void);
void tb_batch_free(tb_batch *b);
/* Takes up to max_lines lines from the framer. The view is valid until the next scan. 0, or -ENOMEM. */
int tb_scan(tb_framer *f, const tb_tools *tools, tb_batch *b, int32_t max_lines, int32_t max_depth, tb_view *view);
/* One JSON text alone, in the scanner's eyes: TB_OK, TB_INVALID_JSON or TB_TOO_DEEP. */
int tb_json_check(const char *text, size_t len, int32_t max_depth);
/* Offset behind the n-th line end of `data`, or len. */
size_t tb_skip_lines(const char *data, size_t len, size_t n);

/* ---- replies: a toolhost's lines, checked, counted, and given their callers' ids ------------------------------- */

/* A fence is a line in front of a run that no tool answers: its reply quotes the fence's name, and so proves that what
 * follows is the run's. TB_REPLY_STRANGER: a reply that is neither. TB_REPLY_SWALLOWED: the reply to some other
 * fence, where this run's own replies are not all there. */
enum { TB_REPLY_OK, TB_REPLY_JUNK, TB_REPLY_OVERSIZE, TB_REPLY_STRANGER, TB_REPLY_SWALLOWED };

typedef struct {
    const char *data;    /* `lines` reply lines for the caller; valid until the next take or read */
    size_t len;
    int32_t lines;
    int32_t succeeded;   /* of these, how many have status OK */
    size_t ids_used;     /* bytes of `ids` that were spliced in */
    int32_t fenced;      /* the fence's own reply was among them, and is not counted */
    int32_t stopped;     /* TB_REPLY_OK, or what the line behind these turned out to be; that line is consumed */
    const char *junk;    /* the first bytes of that line */
    size_t junk_len;
} tb_taken;

/* Takes up to max_lines replies; with a fence, none before its reply. With ids (one a line), each becomes the first
 * member of its reply. 0, or -ENOMEM. */
int tb_take(tb_framer *f, tb_batch *b, int32_t max_lines, const char *fence, size_t fence_len, const char *ids,
            size_t ids_len, int32_t max_depth, tb_taken *taken);

/* ---- file: is it still what it was? ---------------------------------------------------------------------------- */

/* The watch sees what happens to the file; only a look at the path sees what happens to the folders above it. */
typedef struct {
    const char *path;    /* it must outlive this; NULL: none */
    int64_t stamp[4];    /* what tb_stamp said of it when it was read */
    int watch;           /* tb_watch's, so that it need not be looked at each time; or -1 */
    double looked;       /* when; 0: the next look is thorough */
} tb_file;

/* When a file was changed (contents, then inode; ns), its size and its inode. 0, or -errno. */
int tb_stamp(const char *path, int64_t stamp[4]);
/* A descriptor that has something to read once the file has been written to, replaced or removed. Or -errno. */
int tb_watch(const char *path);
int tb_file_changed(tb_file *file, double now);

/* ---- talk: a conversation that blocks: lines out, as many replies in ------------------------------------------- */

/* With a toolhost through its pipes, or with a broker through a socket. One call does all the waiting, so that a binding
 * can let other threads run meanwhile. */
typedef struct tb_talk tb_talk;

typedef struct {
    int in, out;         /* not blocking; the same one for a socket */
    int err;             /* drained meanwhile, its end is kept; or -1 */
    int death;           /* readable when the peer is dead (a pidfd), whoever else holds its pipes; or -1 */
    size_t cap;          /* longest reply line */
    int32_t max_depth;
    tb_file file;        /* looked at before anything is said */
    double spin;         /* seconds to look for a reply before the processor is given up, while that pays */
} tb_peer;

enum {
    TB_TALK_DONE,        /* all replies are here */
    TB_TALK_STOPPED,     /* `taken.stopped` says what the line behind the last good reply is */
    TB_TALK_LATE,        /* no reply for as long as it may take */
    TB_TALK_ENDED,       /* the peer is gone; whatever it had said is taken */
    TB_TALK_INTERRUPTED, /* a signal: let its handler run, then tb_talk_wait */
    TB_TALK_GONE,        /* nothing was sent: the peer had ended before */
    TB_TALK_UNASKED,     /* nothing was sent: the peer had said something that nobody asked for (tb_talk_wait takes it) */
    TB_TALK_CHANGED,     /* nothing was sent: the file is another one now */
};

tb_talk *tb_talk_new(const tb_peer *peer);
void tb_talk_free(tb_talk *t);
/* Says `data` and waits for `replies` lines. `seconds` is how long each may take, from the one before. `data` and
 * `fence` must stay until the answer is not TB_TALK_INTERRUPTED. A value above, or -errno. */
int tb_talk_say(tb_talk *t, const char *data, size_t len, int32_t replies, const char *fence, size_t fence_len,
                double seconds);
int tb_talk_wait(tb_talk *t); /* goes on: after a signal, or past a line that TB_TALK_STOPPED at */
int tb_talk_busy(const tb_talk *t); /* somebody is waiting for a reply */
void tb_talk_extend(tb_talk *t, double seconds); /* what is waited for may take so long from now on */
void tb_talk_trust(tb_talk *t, const int64_t stamp[4], int watch); /* the file may be what it is now */
const tb_taken *tb_talk_taken(const tb_talk *t); /* so far; valid until the next tb_talk_say */
const char *tb_talk_heard(tb_talk *t, size_t *len); /* the end of what came through `err` */

/* ---- spawn: one child, its own process group, fenced in before exec --------------------------------------------- */

typedef struct {
    const char *file;
    char *const *argv;
    char *const *envp;
    const char *cwd;      /* NULL: ours */
    int fds[3];           /* become 0, 1, 2; everything else is closed */
    int fenced;           /* no new privileges, and nobody else may read what it writes (umask 077) */
    int64_t limit_as;     /* bytes, and so on; negative: as ours */
    int64_t limit_fsize;
    int64_t limit_nofile;
    int64_t limit_nproc;
    int64_t limit_cpu;
} tb_child;

/* The child dies with the *thread* that calls this (PR_SET_PDEATHSIG). The pid, or -errno; `step` names what failed. */
int tb_spawn(const tb_child *child, const char **step);
int tb_adopt_orphans(void); /* children that lose their parent below us become ours. 0, or -errno */

#endif
