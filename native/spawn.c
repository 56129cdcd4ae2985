/* spawn.c: starts a toolhost in its own process group, fenced in before exec. vfork: no page table is copied. */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Written by the child, which shares our memory until it execs. */
typedef struct {
    const char *step;
    int error;
} failure;

static int limit(__rlimit_resource_t what, int64_t value) {
    struct rlimit r;
    if (value < 0) return 0;
    if (getrlimit(what, &r)) return -1;
    const rlim_t asked = (rlim_t)value;
    if (r.rlim_max == RLIM_INFINITY || asked < r.rlim_max) r.rlim_max = asked;
    r.rlim_cur = r.rlim_max;
    return setrlimit(what, &r);
}

static int close_from(int lowest) {
#ifdef SYS_close_range
    if (!syscall(SYS_close_range, (unsigned)lowest, ~0u, 0u)) return 0;
#endif
    struct rlimit r;
    const rlim_t top = getrlimit(RLIMIT_NOFILE, &r) || r.rlim_cur > 65536 ? 65536 : r.rlim_cur;
    for (int fd = lowest; (rlim_t)fd < top; fd++) close(fd);
    return 0;
}

/* The three descriptors may overlap with 0, 1, 2: lift them out of the way first. */
static int place_descriptors(const tb_child *c) {
    int high[3];
    for (int i = 0; i < 3; i++)
        if ((high[i] = fcntl(c->fds[i], F_DUPFD, 3)) < 0) return -1;
    for (int i = 0; i < 3; i++)
        if (dup2(high[i], i) < 0) return -1;
    return close_from(3);
}

static void default_signals(void) {
    struct sigaction act;
    for (int s = 1; s < NSIG; s++) { /* what Python ignores (SIGPIPE) must not stay ignored in a tool */
        if (sigaction(s, NULL, &act) || act.sa_handler == SIG_DFL) continue;
        act.sa_handler = SIG_DFL;
        act.sa_flags = 0;
        sigaction(s, &act, NULL);
    }
}

#define TRY(what, call) do { if (call) { why->step = what; goto failed; } } while (0)

__attribute__((noinline, noreturn)) static void in_child(const tb_child *c, pid_t parent, volatile failure *why) {
    default_signals();
    TRY("setpgid", setpgid(0, 0));
    TRY("PR_SET_PDEATHSIG", prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0));
    if (getppid() != parent) _exit(127); /* it died before the line above */
    TRY("no_new_privs", c->fenced && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    if (c->fenced) umask(077);
    TRY("chdir", c->cwd && chdir(c->cwd));
    TRY("descriptors", place_descriptors(c));
    TRY("RLIMIT_CORE", limit(RLIMIT_CORE, 0));
    TRY("RLIMIT_AS", limit(RLIMIT_AS, c->limit_as));
    TRY("RLIMIT_FSIZE", limit(RLIMIT_FSIZE, c->limit_fsize));
    TRY("RLIMIT_NOFILE", limit(RLIMIT_NOFILE, c->limit_nofile));
    TRY("RLIMIT_NPROC", limit(RLIMIT_NPROC, c->limit_nproc));
    TRY("RLIMIT_CPU", limit(RLIMIT_CPU, c->limit_cpu));
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execve(c->file, c->argv, c->envp);
    why->step = "exec";
failed:
    why->error = errno ? errno : EINVAL;
    _exit(127);
}

int tb_spawn(const tb_child *child, const char **step) {
    volatile failure why = {NULL, 0}; /* volatile: it changes under us, in the child */
    sigset_t all, before;
    const pid_t parent = getpid();
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* no handler of ours may run in the child */
    const pid_t pid = vfork();
    if (pid == 0) in_child(child, parent, &why);
    const int error = errno;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pid < 0) {
        *step = "fork";
        return -error;
    }
    if (!why.step) return pid;
    siginfo_t gone;
    while (waitid(P_PID, (id_t)pid, &gone, WEXITED) && errno == EINTR) {}
    *step = why.step;
    return -why.error;
}

int tb_adopt_orphans(void) { return prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) ? -errno : 0; }
