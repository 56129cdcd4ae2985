/* board.h: the callers and toolhosts of one loop, and what passes between them without anybody's judgement. */
#ifndef TB_BOARD_H
#define TB_BOARD_H

#include "cache.h"
#include "wire.h"

/* A board reads callers' lines, moves plain runs to toolhosts and their replies back, in order. Whatever needs a
 * judgement (a key, a lease, a refusal, a toolhost that breaks the protocol) becomes a row for its owner. One thread, one
 * board. What follows is read by cffi as well: plain declarations only. */
typedef struct tb_pool tb_pool;

/* ---- what the owner sees and sets -------------------------------------------------------------------------------- */

typedef struct {
    int64_t connection_calls; /* unanswered, of one caller */
    int64_t connection_bytes;
    int64_t outbox_bytes;     /* a caller that does not read its replies is not read from either */
    int64_t queue_bytes;      /* of all callers together */
    size_t request_bytes;     /* of one line */
    size_t reply_bytes;
    int32_t depth;
    double max_timeout;
    double spin;              /* seconds to look for an answer before the processor is given up, while that pays */
} tb_limits;

typedef struct {
    tb_limits limits;
    int32_t draining;       /* nothing passes any more */
    int64_t queued_bytes;   /* the owner's: of calls that wait */
    int64_t partial_bytes;  /* of long lines that have not ended */
    int32_t callers;
    int64_t round;          /* counts the reads from callers, */
    int64_t hits;           /* keys whose answer was repeated */
    int64_t turn;           /* and how often the owner has seen to its rows */
    double now;
} tb_board;

/* How long calls took, from when their toolhost was given them until their reply was taken. */
enum { TB_BUCKETS = 19 };
extern const double tb_bounds[TB_BUCKETS - 1]; /* seconds: the most that counts in each bucket; the last has no bound */

typedef struct {
    int64_t buckets[TB_BUCKETS];
    double seconds; /* of all of them */
} tb_latency;

/* A tool: what has been learned of it, and whether its plain calls may pass. */
typedef struct {
    int32_t index;
    const char *name; /* it must outlive this */
    size_t name_len;
    int32_t known;    /* it has kept to the protocol often enough to share a toolhost */
    int32_t waits;    /* calls of it are waiting: whoever comes now stands behind */
    int32_t guarded;  /* each of its calls needs a look */
    int32_t paused;   /* none of its calls may be handed over */
    int32_t counted;  /* so do its own errors */
    int64_t asked;    /* in which turn the owner was given a key of it to look up: those behind it are the owner's, too */
    tb_pool *pool;    /* where its plain calls may go without a word; NULL: nowhere */
    double timeout;
    double cost;      /* recent seconds a call; 0 until measured */
    double best;      /* the least of them, of late */
    double size;      /* recent bytes a reply */
    int64_t passed;   /* calls that were answered without a word to the owner, */
    int64_t failed;   /* those of them that were errors of the tool's own, */
    double used;      /* and when the last one was */
    tb_latency latency; /* of its callers' calls here; the owner adds those that it has looked at */
} tb_tool;

struct tb_pool {
    int32_t open;        /* plain calls may pass */
    int32_t wants;       /* its owner wants to know when a toolhost has room */
    tb_file file;        /* while it is what it was */
    int64_t looked;      /* at the file, in which round */
    int64_t yields;      /* to a call that needs a toolhost to itself and came first, in which turn */
    int32_t count;       /* of the hosts that are ready */
    int32_t capacity;
    struct tb_host **hosts;
};

typedef struct tb_caller {
    int64_t name;            /* the owner's word for it; no other peer of the board has it */
    const char *who;         /* its principal, for the keys of its calls. It must outlive this */
    size_t who_len;
    int32_t fd;
    int32_t reading;
    int32_t ending;          /* no more lines are taken; it leaves when all is answered */
    int32_t wants_room;      /* the owner waits for its outbox to empty */
    int64_t unanswered;
    double unanswered_bytes;
    int64_t next_in;         /* how many replies have been promised in order, */
    int64_t next_out;        /* and how many of them are in the outbox, or behind it */
    size_t outbox;           /* bytes that it has not read yet */
    size_t held;             /* bytes of replies that wait for those in front of them */
    size_t partial;          /* bytes of a long line that has not ended */
    double since;            /* the last line ended, or the next one had not begun */
} tb_caller;

typedef struct tb_host {
    int64_t name;
    tb_pool *pool;      /* whose owner may want to know when it has room; or NULL */
    int32_t alone;      /* nobody may be put behind what it is doing */
    int32_t reserved;   /* kept free of new work until a slow call can have it */
    int32_t quotes;     /* its refusals name the line that they answer: it can be fenced */
    int32_t tell;       /* its own owner wants to know that */
    int32_t runs;       /* under way */
    int32_t inflight;   /* lines of them */
    int32_t working;    /* runs of them that are calls, not lines of the broker's own */
    int32_t strangers;  /* replies to nothing that it was asked */
    int64_t calls;      /* answered */
    int64_t max_calls;  /* then its owner wants to know; 0: never */
    int64_t last;       /* who was given to it last; 0 behind a fence */
    int32_t last_tool;
    size_t unsent;      /* bytes that it has not read yet */
    double mark;        /* since when the first line under way has been the first */
} tb_host;

/* Lines for a toolhost, on their way or under way. `work` is the owner's number for a run of one line whose reply it
 * wants to see itself; without one, replies go to the caller. */
typedef struct {
    int64_t who;        /* whose they are: no fence is put between runs of one */
    tb_caller *caller;  /* or NULL */
    int64_t work;
    int64_t at;         /* the place of the first reply in the caller's order; negative: it may overtake */
    int32_t tool;       /* negative: a line of the broker's own */
    int32_t suspect;    /* whose call stands in front of its fence */
    int32_t fenced;     /* it is still behind one */
    int32_t count;      /* lines left */
    const char *lines;
    size_t len;
    const char *ids;    /* one a line; NULL: none */
    size_t ids_len;
    tb_entry **entries; /* one a line, where its calls have keys; the holds on them are given away with it. Or NULL */
    double timeout;
} tb_run;

/* One plain call whose reply the owner wants to see itself, under the number `work`, where it may pass without a word:
 * the name of the toolhost that has it now. 0: it is for the owner to place. */
int64_t tb_board_hand(tb_board *b, const tb_tool *tool, int64_t who, int64_t work, const char *line, size_t len);

/* ---- rows: what the owner has to see to -------------------------------------------------------------------------- */

enum {
    /* of a caller */
    TB_ROW_PLAIN,     /* a run for which there is no room, or no right, to pass */
    TB_ROW_KEYED,     /* as TB_ROW_PLAIN, of calls with keys: `value` is where pointers to their (held) entries stand */
    TB_ROW_CALL,      /* as the scanner's TB_CALL */
    TB_ROW_BAD,       /* as the scanner's TB_BAD */
    TB_ROW_GONE,      /* it has hung up, or cannot be written to */
    TB_ROW_FINISHED,  /* it sends no more, and has all that it asked for */
    TB_ROW_IDLE,      /* while draining: it has all that it asked for */
    TB_ROW_ROOM,      /* it has read what it had not */
    TB_ROW_LONG,      /* long lines on their way have passed the bound, all together */
    /* of a host */
    TB_ROW_REPLY,     /* of the run `work` */
    TB_ROW_COUNT,     /* so many replies have passed of a tool that is counted, so many that are no errors */
    TB_ROW_KEPT,      /* the entry of this name has its answer, and is watched */
    TB_ROW_FREE,      /* it has room */
    TB_ROW_REST,      /* it was alone with a call, and has answered it */
    TB_ROW_OVERSIZE,  /* it waits from here on for tb_host_resume, or its end */
    TB_ROW_JUNK,
    TB_ROW_SWALLOWED, /* a fence's reply came as a call's */
    TB_ROW_UNASKED,   /* it has said more than it was asked */
    TB_ROW_STRANGER,  /* the same, in front of a fence; it goes on */
    TB_ROW_CLOSED,    /* its output has ended */
    TB_ROW_BROKEN,    /* its input has */
    TB_ROW_UNREADABLE,
    TB_ROW_LATE,      /* the first line has had its time */
};

/* One row of TB_ROW numbers. Offsets are from the view's `data`; spans of members are -1 where one is absent. */
enum {
    TB_R_WHAT,
    TB_R_WHO,
    TB_R_TOOL,    /* of the run, or whose call may be to blame */
    TB_R_COUNT,   /* lines */
    TB_R_AT,      /* a caller's: the place; a reply's: nanoseconds since its toolhost was given the call */
    TB_R_DATA,    /* lines for the toolhost; a reply; the beginning of junk */
    TB_R_DATA_LEN,
    TB_R_IDS,
    TB_R_IDS_LEN,
    TB_R_VALUE,   /* a caller's: the problem; a host's: the work, errno, the entry, how many strangers, or good ones */
    TB_R_ABOUT,   /* a caller's: the member that it is about; a reply's: it succeeded */
    TB_R_SPANS,
    TB_ROW = TB_R_SPANS + 2 * TB_MEMBERS,
};

typedef struct {
    const int64_t *rows;
    int32_t count;
    int32_t again;        /* somebody has lines left: turn again soon */
    const char *data;
} tb_rows;

/* ---- the board --------------------------------------------------------------------------------------------------- */

tb_board *tb_board_new(const tb_limits *limits);
void tb_board_free(tb_board *b);
int tb_board_fd(const tb_board *b);               /* readable when tb_board_turn has something to do */
void tb_board_cache(tb_board *b, tb_cache *cache); /* where keys are looked up; it must outlive the board */
int tb_board_tool(tb_board *b, tb_tool *tool);    /* it must stay until it is forgotten. 0, or -ENOMEM */
void tb_board_forget(tb_board *b, int32_t index); /* no run of this tool is under way, none will be */
/* Writes what there is to write, and gives the rows since the last time; valid until the next time. 0, or -ENOMEM */
int tb_board_fetch(tb_board *b, tb_rows *rows);
int tb_board_turn(tb_board *b, tb_rows *rows);    /* sees to what has happened; then the same. 0, or -errno */

/* ---- callers ----------------------------------------------------------------------------------------------------- */

tb_caller *tb_caller_new(tb_board *b, int64_t name, int fd, const tb_tools *tools); /* fd: a socket, not blocking */
void tb_caller_close(tb_board *b, tb_caller *c);  /* fd is the owner's to close; what runs is finished for nobody */
void tb_caller_tools(tb_caller *c, const tb_tools *tools);
int64_t tb_caller_expect(tb_caller *c, int64_t lines, size_t bytes, int ordered); /* the place of their replies */
int tb_caller_put(tb_board *b, tb_caller *c, int64_t at, const char *data, size_t len, int64_t lines);
void tb_caller_end(tb_board *b, tb_caller *c);    /* no more lines are taken */
void tb_caller_rest(tb_board *b, tb_caller *c);   /* takes what is already here */
void tb_caller_drop(tb_board *b, tb_caller *c);   /* the line that has begun is not wanted */
size_t tb_caller_pending(const tb_caller *c);     /* bytes of a line that has begun */
int tb_caller_vanished(const tb_caller *c);       /* nobody reads what would be written */

/* ---- hosts ------------------------------------------------------------------------------------------------------- */

tb_host *tb_host_new(tb_board *b, int64_t name, int in, int out); /* not blocking; the owner's to close */
void tb_host_free(tb_board *b, tb_host *h);
/* A fence stands in front if the last run was somebody else's. A line of the broker's own needs none. 0, or -ENOMEM */
int tb_host_send(tb_board *b, tb_host *h, const tb_run *run);
void tb_host_mute(tb_board *b, tb_host *h);       /* nothing that it says matters any more */
void tb_host_deafen(tb_board *b, tb_host *h);     /* nothing more is said to it */
void tb_host_resume(tb_board *b, tb_host *h);     /* after a row that it waits at */
int tb_host_read(tb_board *b, tb_host *h);        /* all that there is to read, or up to a row; was there anything? */
int64_t tb_host_lines(tb_board *b, tb_host *h);   /* of a dead one: how many it has said that nobody has taken */
int tb_host_peek(const tb_host *h, int32_t i, tb_run *run); /* the i-th run under way; 0, or -1. Until the next change */
void tb_host_take(tb_host *h, int32_t lines);     /* the first lines of the first run are the owner's to answer */
void tb_host_forget(tb_host *h);                  /* and so are all runs */

/* ---- placing ----------------------------------------------------------------------------------------------------- */

int tb_pool_add(tb_pool *p, tb_host *h);          /* it is ready. 0, or -ENOMEM */
void tb_pool_remove(tb_pool *p, tb_host *h);
void tb_pool_clear(tb_pool *p);
tb_host *tb_pool_pick(const tb_pool *p, int64_t who); /* the least busy one that may be shared; or NULL */
int32_t tb_room(const tb_host *h, const tb_tool *tool); /* how many more calls of this tool it can be given */
int tb_slow(const tb_tool *tool);                 /* it is never in front of another */
int tb_shares(const tb_tool *tool);               /* it is known and not slow: others may wait behind it */
void tb_learn(tb_tool *tool, double seconds);     /* what a call has cost */
void tb_latency_add(tb_latency *l, double seconds, int64_t calls);

#endif
