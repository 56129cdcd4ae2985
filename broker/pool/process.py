"""One child process: started by a thread that outlives it, fenced in before exec, killed with its whole group."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import psutil

from broker._native import ffi, lib

# What a tool sees of our environment; everything else must be given to it by name.
ENVIRONMENT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
ENVIRONMENT_PREFIXES = ("MACHINA_",)
# The broker's gates are in front: a toolhost that asked for a lease again would refuse what was allowed.
WITHHELD = ("MACHINA_LEASE_ENFORCE", "MACHINA_BROKER_SOCKET")
PIPE_BYTES = 1024 * 1024
STOLEN = -1  # the status of a child that somebody else has reaped

_births = threading.Lock()  # held from fork until the child is in `_ours`
_ours: set[int] = set()  # started by us and not reaped yet


def _after_fork() -> None:
    """In a forked child nobody holds the lock, and nothing was started."""
    global _births
    _births = threading.Lock()
    _ours.clear()


os.register_at_fork(after_in_child=_after_fork)


class Rlimits(NamedTuple):
    """Bytes, counts, seconds; negative: as ours."""

    address_space: int = -1
    file_size: int = -1
    descriptors: int = -1
    processes: int = -1
    cpu: int = -1


class Spec(NamedTuple):
    """What to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None
    rlimits: Rlimits = Rlimits()
    fenced: bool = True  # umask 077, no new privileges


class SpawnError(Exception):
    """The process could not be started; the message says at which step and why."""


class Process:
    """A started child. `stdin`, `stdout` and `stderr` are our ends, not blocking; `pidfd` is readable at its death."""

    __slots__ = ("pid", "pidfd", "status", "stderr", "stdin", "stdout")

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.pidfd = os.pidfd_open(pid)
        self.status: int | None = None

    def kill(self) -> None:
        """Ends it and all that it started, at once. Safe until it is reaped: a zombie keeps its pid."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def terminate(self) -> None:
        """Asks it, and all that it started, to end."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGTERM)

    def reap(self) -> bool:
        """True once it is dead; its group is killed before its pid is free for somebody else."""
        if self.status is not None:
            return True
        try:
            if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self.kill()
            _, self.status = os.waitpid(self.pid, 0)
        except ChildProcessError:  # the program that we live in has reaped it
            self.status = STOLEN
        _ours.discard(self.pid)
        return True

    def how_it_ended(self) -> str:
        if self.status is None:
            return "is alive"
        if self.status == STOLEN:
            return "ended"
        if os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(number).name}"
            return f"was killed by signal {number}"
        return f"exited with code {os.WEXITSTATUS(self.status)}"

    def close_stdin(self) -> None:
        fd, self.stdin = self.stdin, -1
        close(fd)

    def close(self) -> None:
        """Each number is forgotten before it is closed: whatever interrupts us, none is closed twice."""
        self.close_stdin()
        fds = self.stdout, self.stderr, self.pidfd
        self.stdout = self.stderr = self.pidfd = -1
        for fd in fds:
            close(fd)


def close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def environment(ours: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The allow-list, then what the configuration gives."""
    kept = {k: v for k, v in ours.items() if k in ENVIRONMENT or k.startswith(ENVIRONMENT_PREFIXES)}
    for name in WITHHELD:
        kept.pop(name, None)
    return {**kept, **extra}


def spawn(spec: Spec, channel: int = -1) -> Process:
    """Starts a child of the calling *thread*: it dies with it. `channel` is its stdin, where that is to be no pipe."""
    parent_ends: list[int] = []
    child_ends: list[int] = []
    try:
        for direction in ("in", "out", "out"):
            if direction == "in" and channel >= 0:
                child_ends.append(os.dup(channel))
                parent_ends.append(-1)
                continue
            reader, writer = os.pipe2(os.O_CLOEXEC)
            ours, theirs = (writer, reader) if direction == "in" else (reader, writer)
            parent_ends.append(ours)
            child_ends.append(theirs)
            os.set_blocking(ours, False)
            _widen(ours)
        with _births:
            pid = _spawn(spec, child_ends)
            _ours.add(pid)
        try:
            return Process(pid, *parent_ends)
        except OSError:  # no descriptor left to watch it by
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            _ours.discard(pid)
            raise
    except OSError as error:
        for fd in parent_ends:
            close(fd)
        raise SpawnError(f"cannot start {spec.argv[0]}: {error.strerror}") from None
    except SpawnError:
        for fd in parent_ends:
            close(fd)
        raise
    finally:
        for fd in child_ends:
            os.close(fd)


def _widen(pipe: int) -> None:
    """A wider pipe means fewer wake-ups for long lines; the system may have a smaller bound, and that is fine."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def _spawn(spec: Spec, fds: list[int]) -> int:
    argv = [ffi.new("char[]", os.fsencode(arg)) for arg in spec.argv]
    envp = [ffi.new("char[]", os.fsencode(f"{key}={value}")) for key, value in spec.env.items()]
    c_argv = ffi.new("char *[]", [*argv, ffi.NULL])
    c_envp = ffi.new("char *[]", [*envp, ffi.NULL])
    cwd = ffi.new("char[]", os.fsencode(spec.cwd)) if spec.cwd else ffi.NULL
    child = ffi.new(
        "tb_child *",
        {
            "file": argv[0],
            "argv": c_argv,
            "envp": c_envp,
            "cwd": cwd,
            "fds": fds,
            "fenced": spec.fenced,
            "limit_as": spec.rlimits.address_space,
            "limit_fsize": spec.rlimits.file_size,
            "limit_nofile": spec.rlimits.descriptors,
            "limit_nproc": spec.rlimits.processes,
            "limit_cpu": spec.rlimits.cpu,
        },
    )
    step = ffi.new("char **")
    pid = lib.tb_spawn(child, ffi.cast("const char **", step))
    if pid < 0:
        what = ffi.string(step[0]).decode()
        why = os.strerror(-pid)
        if what == "exec":
            hint = " (is it built, and executable?)" if -pid in (errno.ENOENT, errno.EACCES) else ""
            hint = " (a script begins with #! and its interpreter)" if -pid == errno.ENOEXEC else hint
            raise SpawnError(f"cannot start {spec.argv[0]}: {why}{hint}")
        if what == "chdir":
            raise SpawnError(f"cannot start {spec.argv[0]}: its cwd {spec.cwd}: {why}")
        raise SpawnError(f"cannot start {spec.argv[0]}: {what}: {why}")
    return pid


class Spawner:
    """The thread that starts toolhosts: off the loop, and alive as long as they are (PR_SET_PDEATHSIG)."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="broker-spawner", daemon=True)
        self._thread.start()

    def start(self, spec: Spec, done: Callable[[Process | SpawnError], object], channel: int = -1) -> None:
        """Calls `done` on the spawner's own thread."""
        self._jobs.put(lambda: self._spawn(spec, done, channel))

    def soon(self, job: Callable[[], object]) -> None:
        """Does it here, where no signal's handler can interrupt it. It must not take long."""
        self._jobs.put(job)

    def stop(self) -> None:
        """After the last child is dead."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _spawn(self, spec: Spec, done: Callable[[Process | SpawnError], object], channel: int) -> None:
        try:
            done(spawn(spec, channel))
        except SpawnError as error:
            done(error)


def adopt_orphans() -> None:
    """From now on, what a dead toolhost leaves behind becomes our child, and `end_orphans` finds it."""
    lib.tb_adopt_orphans()


def end_orphans() -> None:
    """Ends every child that we did not start ourselves. Only for a process that has called `adopt_orphans`."""
    with _births:
        strangers = [pid for pid in children() if pid not in _ours]
    for pid in strangers:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)


def children() -> list[int]:
    """Our direct children, of every thread."""
    found: list[int] = []
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:  # out of descriptors
        return []
    for task in tasks:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as listing:
            found += map(int, listing.read().split())
    return found


def processor_seconds(pid: int) -> float:
    """What it has used of a processor so far; 0 once it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def resident(pid: int) -> int:
    """Bytes of memory that the process has in use; 0 once it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
