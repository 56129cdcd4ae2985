/* talk.c: says lines to one peer and waits for its replies, its errors, its death and the clock, all in one place. */
#define _GNU_SOURCE
#include "batch.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { HEARD = 8192, DRY_READS = 64, GO_ON = 1000 };
enum { OUT = 1, IN = 2, ERR = 4, DEATH = 8 }; /* what has happened where */
static const double LOOK_SECONDS = 0.01; /* between two looks at how the program takes SIGPIPE */
enum { MOST_SKIPPED = 1024 };

struct tb_talk {
    tb_peer peer;
    tb_framer *framer;
    tb_batch *batch;
    tb_taken taken;
    const char *data; /* what is left to be said */
    size_t left;
    const char *fence;
    size_t fence_len;
    int32_t replies;
    int skimming;
    int poll;         /* what of the peer's is waited for */
    int watching;     /* its input, too */
    double seconds, deadline;
    double looked;    /* when */
    int32_t skip, skipped; /* times that nobody spins, now and after the last time that it did not pay */
    int deadly_pipes; /* SIGPIPE has its default: it would end the program */
    int talking;      /* somebody is in here */
    char heard[2 * HEARD];
    size_t heard_len;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int watch(const tb_talk *t, int fd, uint32_t what) {
    struct epoll_event event = {EPOLLIN, {.u32 = what}};
    return fd < 0 || !epoll_ctl(t->poll, EPOLL_CTL_ADD, fd, &event);
}

tb_talk *tb_talk_new(const tb_peer *peer) {
    tb_talk *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->peer = *peer;
    t->framer = tb_framer_new(peer->cap);
    t->batch = tb_batch_new();
    t->poll = epoll_create1(EPOLL_CLOEXEC);
    if (t->framer && t->batch && t->poll >= 0 && watch(t, peer->out, OUT | (peer->in == peer->out ? IN : 0)) &&
        watch(t, peer->err, ERR) && watch(t, peer->death, DEATH))
        return t;
    tb_talk_free(t);
    return NULL;
}

void tb_talk_free(tb_talk *t) {
    if (!t) return;
    if (t->poll >= 0) close(t->poll);
    tb_framer_free(t->framer);
    tb_batch_free(t->batch);
    free(t);
}

void tb_talk_extend(tb_talk *t, double seconds) { t->deadline = now() + seconds; }

void tb_talk_trust(tb_talk *t, const int64_t stamp[4], int watch) {
    memcpy(t->peer.file.stamp, stamp, sizeof t->peer.file.stamp);
    t->peer.file.watch = watch;
}

const tb_taken *tb_talk_taken(const tb_talk *t) { return &t->taken; }

const char *tb_talk_heard(tb_talk *t, size_t *len) {
    *len = t->heard_len;
    return t->heard;
}

static void hear(tb_talk *t) {
    const ssize_t n = read(t->peer.err, t->heard + t->heard_len, sizeof t->heard - t->heard_len);
    if (n > 0) t->heard_len += (size_t)n;
    else if (!n || (errno != EAGAIN && errno != EINTR)) { /* the owner closes it */
        epoll_ctl(t->poll, EPOLL_CTL_DEL, t->peer.err, NULL);
        t->peer.err = -1;
    }
    if (t->heard_len > HEARD) {
        memmove(t->heard, t->heard + t->heard_len - HEARD, HEARD);
        t->heard_len = HEARD;
    }
}

static void hear_all(tb_talk *t) {
    for (int i = 0; i < DRY_READS && t->peer.err >= 0; i++) {
        const size_t before = t->heard_len;
        hear(t);
        if (t->heard_len == before) return;
    }
}

static int taking(tb_talk *t) {
    return take_more(t->framer, &t->batch->out, t->replies, t->fence, t->fence_len, NULL, 0, NULL, 0,
                     t->peer.max_depth, &t->taken);
}

/* A peer may answer before it has heard all (a line that is too long): the rest has to be said nevertheless. */
static int finished(const tb_talk *t) { return t->taken.lines == t->replies && !t->left; }

/* Takes what has been read. GO_ON, or a value for the caller. */
static int digest(tb_talk *t) {
    const int32_t before = t->taken.lines;
    if (!t->skimming && taking(t)) return -ENOMEM;
    if (t->taken.stopped) {
        t->skimming = tb_framer_skipping(t->framer); /* of an oversize reply, the rest has to come by first */
        return t->skimming ? GO_ON : TB_TALK_STOPPED;
    }
    if (finished(t)) return TB_TALK_DONE;
    if (t->taken.lines > before) t->deadline = now() + t->seconds;
    return GO_ON;
}

/* Reads what there is. GO_ON, or a value for the caller. */
static int listen_once(tb_talk *t) {
    const ssize_t n = tb_framer_read(t->framer, t->peer.out);
    if (n == -EAGAIN) return GO_ON;
    if (n == 0) return TB_TALK_ENDED;
    if (n < 0) return n == -ECONNRESET ? TB_TALK_ENDED : (int)n;
    return digest(t);
}

/* The peer is dead: what it had said before is still in the pipe. */
static int read_dry(tb_talk *t) {
    hear_all(t);
    for (int i = 0; i < DRY_READS * 1024; i++) {
        const size_t held = tb_framer_pending(t->framer);
        const int32_t lines = t->taken.lines;
        const int verdict = listen_once(t);
        if (verdict != GO_ON) return verdict;
        if (tb_framer_pending(t->framer) == held && t->taken.lines == lines) break;
    }
    return TB_TALK_ENDED;
}

/* A program may have SIGPIPE end it: a toolhost that dies must not take it along. */
static ssize_t write_safely(const tb_talk *t) {
    if (!t->deadly_pipes) return write(t->peer.in, t->data, t->left);
    sigset_t pipe_only, before;
    sigemptyset(&pipe_only);
    sigaddset(&pipe_only, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_only, &before);
    const ssize_t n = write(t->peer.in, t->data, t->left);
    const int error = errno;
    if (n < 0 && error == EPIPE && !sigismember(&before, SIGPIPE))
        while (sigtimedwait(&pipe_only, NULL, &(struct timespec){0, 0}) < 0 && errno == EINTR) {}
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return n;
}

/* Writes what the peer takes. GO_ON, or a value for the caller. */
static int say_some(tb_talk *t) {
    while (t->left) {
        const ssize_t n = write_safely(t);
        if (n < 0) {
            if (errno == EAGAIN || errno == EINTR) return GO_ON;
            if (errno == EPIPE || errno == ECONNRESET) return read_dry(t);
            return -errno;
        }
        t->data += n;
        t->left -= (size_t)n;
    }
    return finished(t) ? TB_TALK_DONE : GO_ON;
}

/* The peer takes no more for now: wait until it does. Or it does again. */
static int watch_input(tb_talk *t, int wanted) {
    if (t->watching == wanted) return 0;
    struct epoll_event event = {EPOLLIN | (wanted ? (uint32_t)EPOLLOUT : 0), {.u32 = OUT | IN}};
    int failed;
    if (t->peer.in == t->peer.out) {
        failed = epoll_ctl(t->poll, EPOLL_CTL_MOD, t->peer.out, &event);
    } else {
        event = (struct epoll_event){EPOLLOUT, {.u32 = IN}};
        failed = epoll_ctl(t->poll, wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, t->peer.in, &event);
    }
    t->watching = wanted;
    return failed ? -errno : 0;
}

/* Waits for something to happen, and sees to it. GO_ON, or a value for the caller. */
static int wait_once(tb_talk *t) {
    struct epoll_event events[4];
    if (watch_input(t, t->left > 0)) return -errno;
    const double left = t->deadline - now();
    const int wait = left <= 0 ? 0 : left > 3600 ? 3600000 : (int)ceil(left * 1000);
    const int ready = epoll_wait(t->poll, events, 4, wait);
    if (ready < 0) return errno == EINTR ? TB_TALK_INTERRUPTED : -errno;
    if (!ready) return now() >= t->deadline ? TB_TALK_LATE : GO_ON;
    uint32_t what = 0;
    for (int i = 0; i < ready; i++) what |= events[i].data.u32;
    int verdict = GO_ON;
    if (what & OUT) verdict = listen_once(t);
    if (verdict == GO_ON && what & IN && t->left) verdict = say_some(t);
    if (what & ERR) hear(t);
    if (verdict == GO_ON && what & DEATH) verdict = read_dry(t);
    if (verdict == TB_TALK_ENDED) hear_all(t);
    return verdict;
}

/* A peer on another processor may answer sooner than a sleeper can be woken. Where it does not (it is slow, it shares our
 * processor, the machine is busy), this is left off for twice as many questions as before. */
static int spin(tb_talk *t) {
    if (t->peer.spin <= 0 || (t->skip && t->skip--)) return GO_ON;
    const double until = now() + t->peer.spin;
    int verdict;
    do {
        verdict = listen_once(t);
    } while (verdict == GO_ON && now() < until);
    if (verdict == TB_TALK_DONE) t->skipped = 0;
    else t->skip = t->skipped = t->skipped ? (t->skipped < MOST_SKIPPED ? 2 * t->skipped : MOST_SKIPPED) : 1;
    if (verdict == TB_TALK_ENDED) hear_all(t);
    return verdict;
}

int tb_talk_wait(tb_talk *t) {
    t->talking = 1;
    int verdict = tb_framer_pending(t->framer) ? digest(t) : spin(t);
    while (verdict == GO_ON) verdict = wait_once(t);
    t->talking = 0;
    return verdict;
}

int tb_talk_busy(const tb_talk *t) { return t->talking; }

/* Between two questions a peer has nothing to say: if it has, its next answers would be somebody else's. */
static int quiet(tb_talk *t) {
    if (tb_framer_pending(t->framer)) return TB_TALK_UNASKED;
    const ssize_t n = tb_framer_read(t->framer, t->peer.out);
    if (n == -EAGAIN) return TB_TALK_DONE;
    if (n > 0) return TB_TALK_UNASKED;
    if (t->peer.err >= 0) hear_all(t);
    return TB_TALK_GONE;
}

int tb_talk_say(tb_talk *t, const char *data, size_t len, int32_t replies, const char *fence, size_t fence_len,
                double seconds) {
    memset(&t->taken, 0, sizeof t->taken);
    const double begin = now();
    if (begin - t->looked > LOOK_SECONDS) {
        struct sigaction act;
        t->looked = begin;
        t->deadly_pipes = !sigaction(SIGPIPE, NULL, &act) && act.sa_handler == SIG_DFL;
    }
    buffer_clear(&t->batch->out, 2 * BATCH_KEEP);
    t->data = data;
    t->left = 0;
    t->replies = replies;
    t->skimming = 0;
    t->fence = fence;
    t->fence_len = fence_len;
    t->seconds = seconds;
    t->deadline = begin + seconds;
    if (t->peer.file.path && tb_file_changed(&t->peer.file, begin)) return TB_TALK_CHANGED;
    const int verdict = quiet(t);
    if (verdict) return verdict;
    t->left = len;
    const int said = say_some(t);
    return said == GO_ON ? tb_talk_wait(t) : said;
}
