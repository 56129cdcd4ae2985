/* board_test.c: what the board counts and holds back, what it does with toolhosts that break the protocol, and without
 * memory. */
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
    const tb_limits limits = {4096, 32 << 20, 1 << 20, 256 << 20, 10 << 20, 1 << 20, 128, 300, 0};
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

/* A line for the policy: one member is `size` bytes long. */
static void say_long(world *w, int fd, size_t size) {
    char text[4096];
    memset(text, 'x', sizeof text);
    say(fd, "{\"aid\":\"A\",\"session\":\"");
    for (; size; size -= sizeof text) {
        if (write(fd, text, sizeof text) != (ssize_t)sizeof text) abort();
        turn(w);
    }
}

static void a_caller_whose_line_cannot_be_kept_hears_of_its_end(void) {
    world w;
    open_world(&w);
    client one = connect_to(&w), two = connect_to(&w);
    say_long(&w, one.theirs, 512 * 1024);
    say_long(&w, two.theirs, 512 * 1024);
    most = 1024 * 1024; /* not enough for the rows of both */
    say(one.theirs, "\"}\n");
    say(two.theirs, "\"}\n");
    turn(&w);
    most = SIZE_MAX;
    CHECK(rows_of(&w, TB_ROW_CALL) == 1);
    CHECK(rows_of(&w, TB_ROW_GONE) == 1);
    disconnect(&w, &one);
    disconnect(&w, &two);
    close_world(&w);
}

/* Without an id, the next reply would be taken for this one. */
static void a_caller_whose_reply_cannot_be_kept_hears_of_its_end(void) {
    world w;
    open_world(&w);
    client one = connect_to(&w);
    static char reply[128 * 1024];
    memset(reply, 'x', sizeof reply);
    tb_caller_expect(one.caller, 2, 0, 1);
    most = 64 * 1024;
    CHECK(tb_caller_put(w.board, one.caller, 0, reply, sizeof reply, 1) < 0);
    most = SIZE_MAX;
    tb_caller_put(w.board, one.caller, 1, "{}\n", 3, 1);
    CHECK(tb_board_fetch(w.board, &w.rows) < 0);
    CHECK(rows_of(&w, TB_ROW_GONE) == 1);
    disconnect(&w, &one);
    close_world(&w);
}

/* It has answered, but nobody can say what: the call may have run. */
static void a_call_whose_reply_cannot_be_kept_is_left_to_the_owner(void) {
    world w;
    open_world(&w);
    server s = start(&w);
    const tb_run run = {.who = 1, .work = 7, .at = -1, .count = 1, .lines = "{}\n", .len = 3, .timeout = 1};
    static char reply[8192];
    snprintf(reply, sizeof reply, "{\"a\":\"%*s\"}\n", 8000, "");
    for (int i = 0; i < 2; i++) {
        CHECK(!tb_host_send(w.board, s.host, &run));
        turn(&w);
        say(s.out, i ? reply : "{}\n");
        most = i ? 4096 : SIZE_MAX;
        turn(&w);
        most = SIZE_MAX;
        CHECK(rows_of(&w, i ? TB_ROW_SWALLOWED : TB_ROW_REPLY) == 1);
    }
    CHECK(s.host->runs == 1);
    stop(&w, &s);
    close_world(&w);
}

static int64_t counted(const tb_latency *l) {
    int64_t calls = 0;
    for (int i = 0; i < TB_BUCKETS; i++) calls += l->buckets[i];
    return calls;
}

static void calls_that_pass_are_timed_from_hand_over_to_reply(void) {
    world w;
    open_world(&w);
    server s = start(&w);
    client one = connect_to(&w);
    say(one.theirs, "{\"aid\":\"A\"}\n{\"aid\":\"A\"}\n");
    turn(&w);
    CHECK(counted(&w.tool.latency) == 0);
    usleep(12000);
    say(s.out, "{}\n{}\n");
    turn(&w);
    CHECK(counted(&w.tool.latency) == 2);
    for (int i = 0; i < TB_BUCKETS - 1 && tb_bounds[i] <= 10e-3; i++) CHECK(!w.tool.latency.buckets[i]);
    CHECK(w.tool.latency.seconds >= 2 * 12e-3);
    disconnect(&w, &one);
    stop(&w, &s);
    close_world(&w);
}

static void each_bound_is_the_most_that_its_bucket_counts(void) {
    tb_latency l = {0};
    for (int i = 0; i < TB_BUCKETS - 1; i++) {
        tb_latency_add(&l, tb_bounds[i], 1);
        CHECK(l.buckets[i] == 1);
        CHECK(!i || tb_bounds[i] > tb_bounds[i - 1]);
    }
    tb_latency_add(&l, 1e9, 3);
    CHECK(l.buckets[TB_BUCKETS - 1] == 3);
    tb_latency_add(&l, -1, 1); /* a clock that was read before */
    CHECK(l.buckets[0] == 2);
}

static void no_call_of_a_paused_tool_passes(void) {
    world w;
    open_world(&w);
    server s = start(&w);
    client one = connect_to(&w);
    w.tool.paused = 1;
    say(one.theirs, "{\"aid\":\"A\"}\n");
    turn(&w);
    CHECK(rows_of(&w, TB_ROW_PLAIN) == 1);
    CHECK(heard(s.in, NULL));
    disconnect(&w, &one);
    stop(&w, &s);
    close_world(&w);
}

int main(void) {
    calls_that_pass_are_timed_from_hand_over_to_reply();
    each_bound_is_the_most_that_its_bucket_counts();
    no_call_of_a_paused_tool_passes();
    a_host_that_broke_the_protocol_is_given_no_more("junk\n", TB_ROW_JUNK);
    a_host_that_broke_the_protocol_is_given_no_more("{}\n{}\n", TB_ROW_UNASKED);
    a_host_that_broke_the_protocol_is_given_no_more(NULL, TB_ROW_CLOSED);
    a_caller_whose_line_cannot_be_kept_hears_of_its_end();
    a_caller_whose_reply_cannot_be_kept_hears_of_its_end();
    a_call_whose_reply_cannot_be_kept_is_left_to_the_owner();
    printf("board: %d checks, %d failures\n", checks, failures);
    return failures > 0;
}
