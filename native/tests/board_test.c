/* board_test.c: what the board does with toolhosts that break the protocol, and where memory ends. */
#define _GNU_SOURCE
#include "board.h"
#include "check.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* Nothing larger than this can be had. (The linker brings every realloc of ours here.) */
static size_t most = SIZE_MAX;
void *__real_realloc(void *p, size_t size);
void *__wrap_realloc(void *p, size_t size);
void *__wrap_realloc(void *p, size_t size) { return size > most ? NULL : __real_realloc(p, size); }

typedef struct {
    tb_board *board;
    tb_tools *tools;
    tb_tool tool;
    tb_pool pool;
    tb_rows rows;
    int64_t names;
} world;

typedef struct {
    int ours, theirs;
    tb_caller *caller;
} client;

typedef struct {
    int in, out; /* the toolhost's ends */
    int fds[2];
    tb_host *host;
} server;

static void open_world(world *w) {
    const tb_limits limits = {4096, 32 << 20, 1 << 20, 256 << 20, 10 << 20, 1 << 20, 128, 300};
    memset(w, 0, sizeof *w);
    w->board = tb_board_new(&limits);
    w->tools = tb_tools_new();
    w->tool = (tb_tool){.known = 1, .timeout = 30, .pool = &w->pool};
    w->pool.open = 1;
    tb_board_tool(w->board, &w->tool);
    tb_tools_put(w->tools, "A", 1, 0);
    tb_tools_open(w->tools, 0, 1);
}

static void close_world(world *w) {
    tb_pool_clear(&w->pool);
    tb_tools_free(w->tools);
    tb_board_free(w->board);
}

static client connect_to(world *w) {
    int fds[2];
    client c = {-1, -1, NULL};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds)) abort();
    c.ours = fds[0];
    c.theirs = fds[1];
    c.caller = tb_caller_new(w->board, ++w->names, c.ours, w->tools);
    return c;
}

static void disconnect(world *w, client *c) {
    tb_caller_close(w->board, c->caller);
    close(c->ours);
    close(c->theirs);
}

static server start(world *w) {
    int in[2], out[2];
    if (pipe2(in, O_NONBLOCK) || pipe2(out, O_NONBLOCK)) abort();
    server s = {in[0], out[1], {in[1], out[0]}, tb_host_new(w->board, ++w->names, in[1], out[0])};
    s.host->alone = 0;
    tb_pool_add(&w->pool, s.host);
    return s;
}

static void stop(world *w, server *s) {
    tb_pool_remove(&w->pool, s->host);
    tb_host_free(w->board, s->host);
    close(s->in);
    close(s->out);
    close(s->fds[0]);
    close(s->fds[1]);
}

static void say(int fd, const char *text) {
    if (write(fd, text, strlen(text)) != (ssize_t)strlen(text)) abort();
}

/* Has it been told this? NULL: nothing. */
static int heard(int fd, const char *text) {
    char data[4096];
    const ssize_t len = read(fd, data, sizeof data);
    return text ? len > 0 && same(data, (size_t)len, text) : len < 0;
}

/* How many rows of this kind the last turn has brought. */
static int rows_of(const world *w, int what) {
    int found = 0;
    for (int i = 0; i < w->rows.count; i++) found += w->rows.rows[(size_t)i * TB_ROW + TB_R_WHAT] == what;
    return found;
}

static void turn(world *w) { tb_board_turn(w->board, &w->rows); }

static void a_host_that_broke_the_protocol_is_given_no_more(const char *words, int what) {
    world w;
    open_world(&w);
    server s = start(&w);
    client one = connect_to(&w), two = connect_to(&w);
    say(one.theirs, "{\"aid\":\"A\"}\n");
    turn(&w);
    CHECK(heard(s.in, "{\"ds_state\":{\"slots\":{}},\"aid\":\"A\"}\n"));
    if (words) say(s.out, words);
    else close(s.out);
    turn(&w); /* its owner has not seen to the row yet */
    CHECK(rows_of(&w, what) == 1);
    say(two.theirs, "{\"aid\":\"A\"}\n");
    turn(&w);
    CHECK(rows_of(&w, TB_ROW_PLAIN) == 1);
    CHECK(heard(s.in, NULL));
    if (!words) s.out = dup(0);
    disconnect(&w, &one);
    disconnect(&w, &two);
    stop(&w, &s);
    close_world(&w);
}

int main(void) {
    a_host_that_broke_the_protocol_is_given_no_more("junk\n", TB_ROW_JUNK);
    a_host_that_broke_the_protocol_is_given_no_more("{}\n{}\n", TB_ROW_UNASKED);
    a_host_that_broke_the_protocol_is_given_no_more(NULL, TB_ROW_CLOSED);
    printf("board: %d checks, %d failures\n", checks, failures);
    return failures > 0;
}
