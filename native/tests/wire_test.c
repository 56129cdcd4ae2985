/* wire_test.c: what a C programmer may rely on: framing whole and byte by byte, caps, envelopes, replies, spawning. */
#define _GNU_SOURCE
#include "check.h"
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void lines_come_out_however_the_bytes_arrive(void) {
    const char text[] = "one\r\ntwo\n\nlast";
    for (size_t step = 1; step <= sizeof text; step++) {
        tb_framer *f = tb_framer_new(16);
        tb_line line;
        char seen[64] = "";
        for (size_t at = 0; at < sizeof text - 1; at += step) {
            const size_t n = sizeof text - 1 - at < step ? sizeof text - 1 - at : step;
            CHECK(tb_framer_feed(f, text + at, n) == 0);
            while (tb_framer_next(f, &line) == TB_LINE) {
                strncat(seen, line.data, line.len);
                strcat(seen, "|");
            }
        }
        CHECK(!strcmp(seen, "one|two||"));
        CHECK(tb_framer_pending(f) == 4);
        tb_framer_end(f);
        CHECK(tb_framer_next(f, &line) == TB_LINE && same(line.data, line.len, "last"));
        CHECK(tb_framer_next(f, &line) == TB_NONE);
        tb_framer_free(f);
    }
}

/* A line of `len` bytes against a cap of 100,000, fed in pieces of `step`; the next line must always come through. */
static int verdict_on(size_t len, size_t step, const char *end) {
    tb_framer *f = tb_framer_new(100000);
    char *text = malloc(len + 16);
    memset(text, 'x', len);
    strcpy(text + len, end);
    strcat(text + len, "next\n");
    const size_t total = len + strlen(text + len);
    int first = TB_NONE, reports = 0, next = 0;
    tb_line line;
    for (size_t at = 0; at < total; at += step) {
        CHECK(tb_framer_feed(f, text + at, total - at < step ? total - at : step) == 0);
        int kind;
        while ((kind = tb_framer_next(f, &line)) != TB_NONE) {
            if (same(line.data, line.len, "next")) {
                next++;
                continue;
            }
            first = kind;
            reports++;
            CHECK(line.len <= 100000);
        }
        CHECK(tb_framer_pending(f) <= 100001);
    }
    CHECK(next == 1 && reports == 1);
    free(text);
    tb_framer_free(f);
    return first;
}

static void the_cap_is_exact_and_the_stream_goes_on(void) {
    const size_t steps[] = {1, 7, 4096, 65536, 1000000};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        CHECK(verdict_on(100000, steps[i], "\n") == TB_LINE);
        CHECK(verdict_on(100000, steps[i], "\r\n") == TB_LINE);
        CHECK(verdict_on(100001, steps[i], "\n") == TB_OVERSIZE);
        CHECK(verdict_on(100001, steps[i], "\r\n") == TB_OVERSIZE);
        CHECK(verdict_on(300000, steps[i], "\n") == TB_OVERSIZE);
    }
}

static void reading_from_a_pipe_reports_bytes_end_and_errors(void) {
    int fds[2];
    CHECK(pipe(fds) == 0);
    fcntl(fds[0], F_SETFL, O_NONBLOCK);
    tb_framer *f = tb_framer_new(100);
    tb_line line;
    CHECK(tb_framer_read(f, fds[0]) == -EAGAIN);
    CHECK(write(fds[1], "abc\n", 4) == 4);
    CHECK(tb_framer_read(f, fds[0]) == 4);
    CHECK(tb_framer_next(f, &line) == TB_LINE && same(line.data, line.len, "abc"));
    close(fds[1]);
    CHECK(tb_framer_read(f, fds[0]) == 0);
    close(fds[0]);
    CHECK(tb_framer_read(f, fds[0]) == -EBADF);
    tb_framer_free(f);
}

/* Scans `text` with one open tool "T" (index 0) and one closed tool "C" (index 1). */
static tb_view scan(tb_framer *f, tb_batch *b, const char *text) {
    tb_tools *tools = tb_tools_new();
    tb_view view;
    tb_tools_put(tools, "T", 1, 0);
    tb_tools_put(tools, "C", 1, 1);
    tb_tools_open(tools, 0, 1);
    tb_framer_feed(f, text, strlen(text));
    CHECK(tb_scan(f, tools, b, 100, 8, &view) == 0);
    tb_tools_free(tools);
    return view;
}

static void rewritten(const char *line, const char *expected) {
    tb_framer *f = tb_framer_new(4096);
    tb_batch *b = tb_batch_new();
    const tb_view v = scan(f, b, line);
    const int32_t *item = v.items;
    CHECK(v.count == 1 && item[TB_I_PROBLEM] == TB_OK);
    if (!same(v.out + item[TB_I_OUT], (size_t)item[TB_I_OUT_LEN], expected)) {
        failures++;
        fprintf(stderr, "%s became %.*s", line, (int)item[TB_I_OUT_LEN], v.out + item[TB_I_OUT]);
    }
    tb_batch_free(b);
    tb_framer_free(f);
}

static void refused(const char *line, int problem, int member) {
    tb_framer *f = tb_framer_new(4096);
    tb_batch *b = tb_batch_new();
    const tb_view v = scan(f, b, line);
    CHECK(v.count == 1 && v.items[TB_I_KIND] == TB_BAD);
    if (v.items[TB_I_PROBLEM] != problem || v.items[TB_I_MEMBER] != member) {
        failures++;
        fprintf(stderr, "%s: problem %d, member %d\n", line, v.items[TB_I_PROBLEM], v.items[TB_I_MEMBER]);
    }
    tb_batch_free(b);
    tb_framer_free(f);
}

#define R "{\"ds_state\":{\"slots\":{}},"

static void what_is_ours_is_taken_out_and_the_state_is_reset(void) {
    rewritten("{\"aid\":\"T\"}\n", R "\"aid\":\"T\"}\n");
    rewritten(" { \"x\" : [1, 2] , \"id\":7,\"aid\":\"T\" , \"y\":{}, \"run_id\":\"r\", \"z\":0 } \n",
              R "\"x\" : [1, 2],\"aid\":\"T\",\"y\":{},\"z\":0}\n");
    rewritten("{\"idempotency_key\":\"k\",\"aid\":\"T\",\"_lease_token\":\"t\",\"input_json\":\"{}\"}\n",
              R "\"aid\":\"T\",\"input_json\":\"{}\"}\n");
    rewritten("{\"ds_state\":{\"delta\":1},\"aid\":\"T\"}\n", "{\"aid\":\"T\"}\n");
    rewritten("{\"inputs\":{\"a\":\"b\\n\"},\"aid\":\"T\"}\n", R "\"input_json\":\"{\\\"a\\\":\\\"b\\\\n\\\"}\",\"aid\":\"T\"}\n");
    rewritten("{\"\\u0061id\":\"T\"}\n", R "\"aid\":\"T\"}\n");
    rewritten("{\"aid\":\"\\u0054\"}\n", R "\"aid\":\"\\u0054\"}\n");
}

static void bad_lines_are_told_apart(void) {
    refused("nope\n", TB_INVALID_JSON, -1);
    refused("[1]\n", TB_NOT_AN_OBJECT, -1);
    refused("{\"aid\":\"T\"\n", TB_INVALID_JSON, -1);
    refused("{\"aid\":\"T\",}\n", TB_INVALID_JSON, -1);
    refused("{\"aid\":\"T\"} x\n", TB_INVALID_JSON, -1);
    refused("{\"aid\":\"\xff\"}\n", TB_INVALID_JSON, -1);
    refused("{\"aid\":\"\\ud800\"}\n", TB_INVALID_JSON, -1);
    refused("{\"aid\":\"T\",\"n\":01}\n", TB_INVALID_JSON, -1);
    refused("{\"aid\":\"T\",\"n\":1e999}\n", TB_INVALID_JSON, -1);
    refused("{\"aid\":\"T\",\"x\":[[[[[[[[1]]]]]]]]}\n", TB_TOO_DEEP, -1);
    refused("{\"aid\":\"T\",\"aid\":\"C\"}\n", TB_TWICE, TB_AID);
    refused("{\"aid\":\"T\",\"\\u0061id\":\"C\"}\n", TB_TWICE, TB_AID);
    refused("{\"aid\":\"T\",\"aid\\u0000\":\"C\"}\n", TB_NUL_NAME, -1);
    refused("{\"aid\":\"T\",\"ds_state\":[]}\n", TB_WRONG_TYPE, TB_DS_STATE);
    refused("{\"aid\":\"T\",\"inputs\":{},\"input_json\":\"\"}\n", TB_BOTH_INPUTS, TB_INPUTS);
    refused("{\"input_json\":\"{}\"}\n", TB_NO_AID, TB_AID);
    refused("{\"aid\":\"\"}\n", TB_NO_AID, TB_AID);
}

static void runs_of_plain_lines_are_one_item(void) {
    tb_framer *f = tb_framer_new(4096);
    tb_batch *b = tb_batch_new();
    const tb_view v = scan(f, b, "{\"aid\":\"T\"}\n{\"aid\":\"T\"}\n{\"aid\":\"T\",\"id\":1}\n{\"aid\":\"T\",\"id\":\"x\"}\n"
                              "{\"aid\":\"C\",\"id\":null}\n{\"aid\":\"T\",\"idempotency_key\":\"k\"}\n"
                              "{\"aid\":\"T\",\"idempotency_key\":\"l\"}\n{\"aid\":\"T\",\"idempotency_key\":\"\\n\"}\n"
                              "{\"aid\":\"?\"}\n\n{\"aid\":\"T\"}\n");
    const int32_t *i = v.items;
    CHECK(v.count == 7);
    CHECK(i[TB_I_KIND] == TB_PLAIN && i[TB_I_COUNT] == 2 && i[TB_I_IDS_LEN] == 0);
    i += TB_ITEM;
    CHECK(i[TB_I_KIND] == TB_PLAIN && i[TB_I_COUNT] == 2);
    CHECK(same(v.ids + i[TB_I_IDS], (size_t)i[TB_I_IDS_LEN], "1\n\"x\"\n"));
    i += TB_ITEM;
    CHECK(i[TB_I_KIND] == TB_CALL && i[TB_I_TOOL] == 1 && same(v.ids + i[TB_I_IDS], (size_t)i[TB_I_IDS_LEN], "null\n"));
    i += TB_ITEM;
    CHECK(i[TB_I_KIND] == TB_KEYED && i[TB_I_COUNT] == 2 && i[TB_I_TOOL] == 0);
    CHECK(same(v.keys + i[TB_I_KEYS], (size_t)i[TB_I_KEYS_LEN], "k\nl\n"));
    i += TB_ITEM; /* a key with an escape is the policy's to read */
    const int32_t *key = i + TB_I_SPANS + 2 * TB_IDEMPOTENCY_KEY;
    CHECK(i[TB_I_KIND] == TB_CALL && i[TB_I_TOOL] == 0 && same(v.lines + key[0], (size_t)key[1], "\"\\n\""));
    CHECK(i[TB_I_SPANS + 2 * TB_SESSION] == -1);
    i += TB_ITEM;
    CHECK(i[TB_I_KIND] == TB_CALL && i[TB_I_TOOL] == -1);
    i += TB_ITEM;
    CHECK(i[TB_I_KIND] == TB_CLOSE);
    CHECK(tb_skip_lines("a\nb\nc", 5, 2) == 4 && tb_skip_lines("a\nb\nc", 5, 9) == 5);
    tb_batch_free(b);
    tb_framer_free(f);
}

static void replies_are_checked_counted_and_given_their_ids(void) {
    tb_framer *f = tb_framer_new(64);
    tb_batch *b = tb_batch_new();
    tb_taken t;
    const char *text = "{\"ok\":true}\n{}\n{ \"id\":9, \"status\":\"TOOL_ERROR\",\"ok\":true}\n{\"a\":1,\"id\":9}\njunk\n{\"ok\":true}\n";
    tb_framer_feed(f, text, strlen(text));
    CHECK(tb_take(f, b, 10, NULL, 0, "1\n\"two\"\nnull\n[4]\n5\n", 19, 8, &t) == 0);
    CHECK(same(t.data, t.len, "{\"id\":1,\"ok\":true}\n{\"id\":\"two\"}\n{\"id\":null,\"status\":\"TOOL_ERROR\",\"ok\":true}\n{\"id\":[4],\"a\":1}\n"));
    CHECK(t.lines == 4 && t.succeeded == 1 && t.ids_used == 17);
    CHECK(t.stopped == TB_REPLY_JUNK && same(t.junk, t.junk_len, "junk"));
    CHECK(tb_take(f, b, 10, NULL, 0, NULL, 0, 8, &t) == 0);
    CHECK(same(t.data, t.len, "{\"ok\":true}\n") && t.stopped == TB_REPLY_OK);
    char big[80];
    memset(big, 'x', sizeof big);
    big[79] = '\n';
    tb_framer_feed(f, big, sizeof big);
    CHECK(tb_take(f, b, 10, NULL, 0, NULL, 0, 8, &t) == 0 && t.lines == 0 && t.stopped == TB_REPLY_OVERSIZE);
    tb_batch_free(b);
    tb_framer_free(f);
}

static void a_fences_reply_comes_first_or_nothing_is_taken(void) {
    tb_framer *f = tb_framer_new(64);
    tb_batch *b = tb_batch_new();
    tb_taken t;
    CHECK(tb_take(f, b, 1, "_f7", 3, NULL, 0, 8, &t) == 0 && !t.fenced && !t.lines && t.stopped == TB_REPLY_OK);
    const char *text = "{\"late\":1}\n{\"error\":\"tool not found: _f7\"}\n{\"ok\":true}\nnoise\n";
    tb_framer_feed(f, text, strlen(text));
    CHECK(tb_take(f, b, 1, "_f7", 3, NULL, 0, 8, &t) == 0 && !t.fenced && !t.lines && t.stopped == TB_REPLY_STRANGER);
    CHECK(tb_take(f, b, 1, "_f7", 3, NULL, 0, 8, &t) == 0 && t.fenced && t.stopped == TB_REPLY_OK);
    CHECK(t.lines == 1 && same(t.data, t.len, "{\"ok\":true}\n"));
    CHECK(tb_take(f, b, 1, "_f8", 3, NULL, 0, 8, &t) == 0 && !t.fenced && t.stopped == TB_REPLY_JUNK);
    tb_batch_free(b);
    tb_framer_free(f);
}

static void a_line_that_is_not_wanted_is_dropped_to_its_end(void) {
    tb_framer *f = tb_framer_new(64);
    tb_line line;
    tb_framer_drop(f); /* nothing has begun: nothing is lost */
    tb_framer_feed(f, "begun", 5);
    CHECK(tb_framer_next(f, &line) == TB_NONE);
    tb_framer_drop(f);
    CHECK(tb_framer_pending(f) == 0);
    tb_framer_feed(f, " and ended\nnext\n", 16);
    CHECK(tb_framer_next(f, &line) == TB_LINE && same(line.data, line.len, "next"));
    tb_framer_free(f);
}

static void children_start_fenced_in_or_say_what_failed(void) {
    int out[2];
    CHECK(pipe(out) == 0);
    const int null = open("/dev/null", O_RDWR);
    char *argv[] = {"sh", "-c", "ls /proc/self/fd | wc -l; umask; ulimit -n; echo $X", NULL};
    char *envp[] = {"X=seen", "PATH=/usr/bin:/bin", NULL};
    tb_child child = {"/bin/sh", argv, envp, "/", {null, out[1], null}, 1, -1, -1, 64, -1, -1};
    const char *step = NULL;
    const int pid = tb_spawn(&child, &step);
    CHECK(pid > 0);
    CHECK(getpgid(pid) == pid);
    close(out[1]);
    char text[128] = "";
    size_t len = 0;
    ssize_t n;
    while ((n = read(out[0], text + len, sizeof text - 1 - len)) > 0) len += (size_t)n;
    CHECK(!strcmp(text, "4\n0077\n64\nseen\n"));
    waitpid(pid, NULL, 0);
    child.file = "/nonexistent";
    child.fds[1] = null;
    CHECK(tb_spawn(&child, &step) == -ENOENT && !strcmp(step, "exec"));
    child.cwd = "/nonexistent";
    CHECK(tb_spawn(&child, &step) == -ENOENT && !strcmp(step, "chdir"));
    CHECK(waitpid(-1, NULL, 0) == -1 && errno == ECHILD);
    close(null);
    close(out[0]);
}

/* A peer that is a shell script; its pid, and a talk with it. */
static tb_talk *talk_with(const char *script, size_t cap, const char *file, pid_t *pid, tb_peer *peer) {
    int in[2], out[2], err[2];
    if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC)) abort();
    char *argv[] = {"sh", "-c", (char *)script, NULL}, *envp[] = {NULL};
    const tb_child child = {"/bin/sh", argv, envp, NULL, {in[0], out[1], err[1]}, 1, -1, -1, -1, -1, -1};
    const char *step;
    *pid = tb_spawn(&child, &step);
    close(in[0]);
    close(out[1]);
    close(err[1]);
    fcntl(in[1], F_SETFL, O_NONBLOCK);
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    fcntl(err[0], F_SETFL, O_NONBLOCK);
    *peer = (tb_peer){in[1], out[0], err[0], (int)syscall(SYS_pidfd_open, *pid, 0), cap, 16, {file, {0}, -1, 0}, 0};
    if (file) {
        CHECK(!tb_stamp(file, peer->file.stamp));
        peer->file.watch = tb_watch(file);
        CHECK(peer->file.watch >= 0);
    }
    return tb_talk_new(peer);
}

static void hang_up(tb_talk *t, pid_t pid, const tb_peer *peer) {
    kill(-pid, SIGKILL);
    waitpid(pid, NULL, 0);
    tb_talk_free(t);
    close(peer->in);
    close(peer->out);
    close(peer->err);
    close(peer->death);
    if (peer->file.watch >= 0) close(peer->file.watch);
}

static void a_talk_waits_for_all_replies(void) {
    pid_t pid;
    tb_peer peer;
    size_t heard;
    tb_talk *t = talk_with("echo hm >&2; exec cat", 1000, NULL, &pid, &peer);
    const char two[] = "{\"a\":1}\n{\"b\":2}\n";
    for (int i = 0; i < 100; i++) {
        CHECK(tb_talk_say(t, two, sizeof two - 1, 2, "", 0, 5) == TB_TALK_DONE);
        CHECK(tb_talk_taken(t)->lines == 2 && same(tb_talk_taken(t)->data, tb_talk_taken(t)->len, two));
    }
    const char fenced[] = "{\"x\":\"_fence.7\"}\n{\"a\":1}\n";
    CHECK(tb_talk_say(t, fenced, sizeof fenced - 1, 1, "_fence.7", 8, 5) == TB_TALK_DONE);
    CHECK(same(tb_talk_taken(t)->data, tb_talk_taken(t)->len, "{\"a\":1}\n"));
    CHECK(tb_talk_say(t, two, sizeof two - 1, 3, "", 0, 0.05) == TB_TALK_LATE);
    CHECK(tb_talk_taken(t)->lines == 2);
    CHECK(same(tb_talk_heard(t, &heard), 3, "hm\n") && heard == 3);
    const char junk[] = "junk\n";
    CHECK(tb_talk_say(t, junk, sizeof junk - 1, 1, "", 0, 5) == TB_TALK_STOPPED);
    CHECK(tb_talk_taken(t)->stopped == TB_REPLY_JUNK);
    char *huge = malloc(200001);
    memset(huge, 'x', 200000);
    huge[200000] = '\n';
    CHECK(tb_talk_say(t, huge, 200001, 1, "", 0, 5) == TB_TALK_STOPPED);
    CHECK(tb_talk_taken(t)->stopped == TB_REPLY_OVERSIZE);
    free(huge);
    CHECK(tb_talk_say(t, two, sizeof two - 1, 2, "", 0, 5) == TB_TALK_DONE); /* and goes on */
    hang_up(t, pid, &peer);
}

static void a_talk_notices_a_peer_that_is_gone_or_says_too_much(void) {
    pid_t pid;
    tb_peer peer;
    size_t heard;
    const char line[] = "{\"a\":1}\n";
    signal(SIGPIPE, SIG_DFL);
    tb_talk *t = talk_with("read x; echo \"$x\"; read x; echo oops >&2; exit 3", 1000, NULL, &pid, &peer);
    CHECK(tb_talk_say(t, line, sizeof line - 1, 1, "", 0, 5) == TB_TALK_DONE);
    CHECK(tb_talk_say(t, line, sizeof line - 1, 1, "", 0, 5) == TB_TALK_ENDED);
    CHECK(same(tb_talk_heard(t, &heard), 5, "oops\n"));
    CHECK(tb_talk_say(t, line, sizeof line - 1, 1, "", 0, 5) == TB_TALK_GONE);
    hang_up(t, pid, &peer);
    t = talk_with("read x; echo \"$x\"; echo \"$x\"; sleep 60", 1000, NULL, &pid, &peer);
    CHECK(tb_talk_say(t, line, sizeof line - 1, 1, "", 0, 5) == TB_TALK_DONE);
    usleep(50000);
    CHECK(tb_talk_say(t, line, sizeof line - 1, 1, "", 0, 5) == TB_TALK_UNASKED);
    hang_up(t, pid, &peer);
    t = talk_with("sleep 60 & exit", 1000, NULL, &pid, &peer); /* a grandchild holds the pipes */
    CHECK(tb_talk_say(t, line, sizeof line - 1, 1, "", 0, 30) == TB_TALK_ENDED);
    hang_up(t, pid, &peer);
    t = talk_with("exec 0<&-; sleep 60", 1000, NULL, &pid, &peer); /* it does not read: no SIGPIPE for us */
    usleep(100000);
    CHECK(tb_talk_say(t, line, sizeof line - 1, 1, "", 0, 5) == TB_TALK_ENDED);
    hang_up(t, pid, &peer);
    signal(SIGPIPE, SIG_IGN);
}

static void a_talk_says_nothing_once_the_file_has_changed(void) {
    pid_t pid;
    tb_peer peer;
    const char line[] = "{\"a\":1}\n";
    char file[] = "/tmp/wire_test_XXXXXX", other[] = "/tmp/wire_test_XXXXXX";
    close(mkstemp(file));
    tb_talk *t = talk_with("exec cat", 1000, file, &pid, &peer);
    CHECK(tb_talk_say(t, line, sizeof line - 1, 1, "", 0, 5) == TB_TALK_DONE);
    close(mkstemp(other));
    CHECK(!rename(other, file));
    CHECK(tb_talk_say(t, line, sizeof line - 1, 1, "", 0, 5) == TB_TALK_CHANGED);
    CHECK(tb_talk_say(t, line, sizeof line - 1, 1, "", 0, 5) == TB_TALK_CHANGED);
    hang_up(t, pid, &peer);
    unlink(file);
}

int main(void) {
    lines_come_out_however_the_bytes_arrive();
    the_cap_is_exact_and_the_stream_goes_on();
    reading_from_a_pipe_reports_bytes_end_and_errors();
    what_is_ours_is_taken_out_and_the_state_is_reset();
    bad_lines_are_told_apart();
    runs_of_plain_lines_are_one_item();
    replies_are_checked_counted_and_given_their_ids();
    a_fences_reply_comes_first_or_nothing_is_taken();
    a_line_that_is_not_wanted_is_dropped_to_its_end();
    children_start_fenced_in_or_say_what_failed();
    a_talk_waits_for_all_replies();
    a_talk_notices_a_peer_that_is_gone_or_says_too_much();
    a_talk_says_nothing_once_the_file_has_changed();
    printf("%d checks, %d failures\n", checks, failures);
    return failures != 0;
}
