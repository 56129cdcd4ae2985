/* place.c: which toolhost may be given a call: idle ones first, then pipelining; the slow and the unknown by themselves. */
#include "inner.h"

static const double SLOW_SECONDS = 0.001;   /* a call, at its best */
static const double WINDOW_SECONDS = 0.002; /* of work in one toolhost's pipe */
enum { WINDOW_LEAST = 2, WINDOW_MOST = 512 }; /* two: a wake-up costs a machine that is busy more than the call */
enum { WINDOW_BYTES = 4 * 1024 * 1024 };      /* of replies that may come from one toolhost at once */
enum { UNSENT_MOST = 4 * 1024 * 1024 };

int tb_slow(const tb_tool *tool) { return tool->best > SLOW_SECONDS; }

int tb_shares(const tb_tool *tool) { return tool->known && !tb_slow(tool); }

/* What a call costs follows quickly both ways; the best one falls at once and rises slowly. */
void tb_learn(tb_tool *tool, double seconds) {
    tool->cost = tool->cost > 0 ? (tool->cost + seconds) / 2 : seconds;
    if (tool->best <= 0 || seconds < tool->best) tool->best = seconds;
    else tool->best += (seconds - tool->best) / 16;
}

/* How many calls of a tool may be in one toolhost's pipe: two milliseconds' worth, and not too many bytes. */
static int32_t window(const tb_tool *tool) {
    const double fitting = tool->cost > 0 ? WINDOW_SECONDS / tool->cost : WINDOW_MOST;
    int32_t calls = fitting >= WINDOW_MOST ? WINDOW_MOST : fitting <= WINDOW_LEAST ? WINDOW_LEAST : (int32_t)fitting;
    if (tool->size * calls > WINDOW_BYTES) calls = tool->size >= WINDOW_BYTES ? 1 : (int32_t)(WINDOW_BYTES / tool->size);
    return calls;
}

int32_t tb_room(const tb_host *h, const tb_tool *tool) {
    if (h->unsent > UNSENT_MOST) return 0;
    const int32_t room = window(tool) - h->inflight;
    return room > 0 ? room : 0;
}

/* It cannot be fenced, and has served somebody else: what it says next might be meant for that one. */
static int foreign(const tb_host *h, int64_t who) { return !h->quotes && h->last && h->last != who; }

/* Its owner has not yet heard that it waits, is silent or deaf: what it is given now would be run, and then moved. */
static int unwell(tb_host *h) {
    const host *inner = of_host(h);
    return inner->waiting || !inner->reading || inner->out.fd < 0;
}

tb_host *tb_pool_pick(const tb_pool *p, int64_t who) {
    tb_host *best = NULL;
    for (int32_t i = 0; i < p->count; i++) {
        tb_host *h = p->hosts[i];
        if (h->alone || h->reserved || unwell(h) || (who && foreign(h, who))) continue;
        if (!h->inflight) return h;
        if (!best || h->inflight < best->inflight) best = h;
    }
    return best;
}

int tb_pool_add(tb_pool *p, tb_host *h) {
    if (p->count == p->capacity) {
        const int32_t want = p->capacity ? 2 * p->capacity : 8;
        tb_host **grown = realloc(p->hosts, (size_t)want * sizeof *grown);
        if (!grown) return -1;
        p->hosts = grown;
        p->capacity = want;
    }
    p->hosts[p->count++] = h;
    return 0;
}

void tb_pool_remove(tb_pool *p, tb_host *h) {
    int32_t kept = 0;
    for (int32_t i = 0; i < p->count; i++)
        if (p->hosts[i] != h) p->hosts[kept++] = p->hosts[i];
    p->count = kept;
}

void tb_pool_clear(tb_pool *p) {
    free(p->hosts);
    p->hosts = NULL;
    p->count = p->capacity = 0;
}

/* Plain calls of it need nobody's judgement just now, and overtake none that do. */
int may_pass(board *b, const tb_tool *tool) {
    tb_pool *pool = tool ? tool->pool : NULL;
    if (!pool || !pool->open || tool->waits || tool->paused || tool->guarded || !tb_shares(tool)) return 0;
    if (pool->yields == b->seen.turn || b->seen.draining) return 0;
    if (pool->file.path && pool->looked != b->seen.round) { /* once a read */
        if (tb_file_changed(&pool->file, b->seen.now)) return 0;
        pool->looked = b->seen.round;
    }
    return 1;
}

int64_t tb_board_hand(tb_board *tb, const tb_tool *tool, int64_t who, int64_t work, const char *line, size_t len) {
    board *b = of_board(tb);
    tb_host *h = may_pass(b, tool) ? tb_pool_pick(tool->pool, who) : NULL;
    if (!h || tb_room(h, tool) < 1) return 0;
    const tb_run r = {.who = who, .work = work, .at = -1, .tool = tool->index, .suspect = tool->index, .count = 1,
                      .lines = line, .len = len, .timeout = timeout_of(b, tool)};
    b->seen.now = clock_now();
    return host_send(b, of_host(h), &r) ? 0 : h->name;
}
