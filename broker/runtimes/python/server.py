"""The broker's end of a fork server (forkserver.py) and of its children. Any thread may ask it; one does at a time."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path

import msgspec

from broker.pool import process
from broker.pool.process import Process, Spawner, SpawnError, Spec
from broker.pool.verdicts import STDERR_KEPT

PROGRAM = str(Path(__file__).with_name("forkserver.py"))
LOAD_SECONDS = 120.0  # for all modules that are kept warm
FORK_SECONDS = 30.0
PACKET = 1 << 20

LOAD, COMPILE, FORK, FORK_FOR_MANY, END, BURY = b"l", b"c", b"f", b"r", b"e", b"b"  # as forkserver.py has them

_encode = msgspec.json.Encoder().encode


class ServerDied(Exception):
    """Its last words, where it had any."""


class Loaded(msgspec.Struct):
    unfit: list[str]  # modules that are better imported in each child
    spoilt: bool  # one of them has done what no child should find done
    stamps: list[tuple[str, int]]  # the folders of packages as they are


_loaded = msgspec.json.Decoder(Loaded).decode


class Child:
    """A forked interpreter: our ends of its socket and its stderr. Its number is its own until the server reaps it."""

    __slots__ = ("born", "calls", "pid", "pidfd", "server", "stderr", "wire")

    def __init__(self, pid: int, wire: socket.socket, stderr: int, server: Server) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.wire = wire
        self.stderr = stderr
        self.server = server
        self.born = time.monotonic()
        self.calls = 0

    def dead(self) -> bool:
        return is_readable(self.pidfd)

    def kill(self) -> None:
        """With its whole group."""
        with contextlib.suppress(OSError, ValueError):
            if not self.dead():
                os.killpg(self.pid, signal.SIGKILL)
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.wire.close()
        fds = self.stderr, self.pidfd
        self.stderr = self.pidfd = -1
        for fd in fds:
            process.close(fd)


class Server:
    """A running one."""

    def __init__(self, started: Process, control: socket.socket) -> None:
        self.process = started
        self.children: set[Child] = set()  # alive
        self.born = time.monotonic()
        self.forks = 0
        self.stopped = False
        self._control = control
        self._lock = threading.Lock()
        self._said = b""
        self.leaving: deque[Child] = deque()  # they have answered

    def load(self, modules: list[str], seconds: float = LOAD_SECONDS) -> Loaded:
        return _loaded(self._ask(LOAD + _encode(modules), seconds))

    def compile(self, sources: list[str], seconds: float = LOAD_SECONDS) -> None:
        self._ask(COMPILE + _encode(sources), seconds)

    def fork(self, reuse: bool) -> Child:
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            pid = _number(self._ask(FORK_FOR_MANY if reuse else FORK, FORK_SECONDS, [theirs.fileno(), writer]))
            os.set_blocking(reader, False)
            child = Child(pid, ours, reader, self)
        except BaseException:
            ours.close()
            os.close(reader)
            raise
        finally:
            theirs.close()
            os.close(writer)
        self.children.add(child)
        self.forks += 1
        return child

    def leave(self, child: Child) -> None:
        """It has answered, and ends: it is reaped with the next question."""
        child.close()
        self.leaving.append(child)

    def bury(self) -> None:
        """If there is no next question."""
        if self.leaving:
            with contextlib.suppress(ServerDied):
                self._ask(BURY, FORK_SECONDS)

    def end(self, child: Child) -> int | None:
        """Killed with its group, if it is alive, and gone. How it ended, if anybody knows."""
        child.kill()
        status = None
        with contextlib.suppress(ServerDied):
            status = _number(self._ask(END + _four(child.pid), FORK_SECONDS))
        self.children.discard(child)
        child.close()
        return status

    def _ask(self, question: bytes, seconds: float, fds: list[int] | None = None) -> bytes:
        with self._lock:
            if self.stopped:
                raise ServerDied("its interpreter has ended")
            try:
                if question[:1] not in (LOAD, COMPILE):
                    leaving = [self.leaving.popleft() for _ in range(len(self.leaving))]
                    self.children.difference_update(leaving)
                    question += b"".join([_four(child.pid) for child in leaving])
                self._control.settimeout(seconds)
                socket.send_fds(self._control, [question], fds or [], socket.MSG_NOSIGNAL)
                reply, reason = self._control.recv(PACKET), "ended"
            except OSError as error:
                reply, reason = b"", f"gave no answer: {error}"
            self._hear()
            if reply:
                return reply
            words = self._said.decode(errors="replace").strip().splitlines()
            self._stop()
        raise ServerDied(": ".join([f"its interpreter {reason}", *words[-1:]]))

    def _hear(self) -> None:
        """What is said when modules are imported."""
        with contextlib.suppress(OSError):
            while data := os.read(self.process.stderr, 65536):
                self._said = (self._said + data)[-STDERR_KEPT:]

    def _stop(self) -> None:
        self.stopped = True
        self.process.kill()
        self._control.close()

    def stop(self) -> None:
        """Children that are alive end with it. Never waits: whoever asks it something just now hears that it died."""
        for child in self.children - set(self.leaving):
            child.kill()
        self.process.kill()
        if self._lock.acquire(blocking=False):
            try:
                self._stop()
            finally:
                self._lock.release()

    def abandon(self) -> None:
        """After a fork of ours: it is the parent's. Only our copies of what leads to it are closed."""
        for child in self.children:
            child.close()
        self._control.close()
        self.process.close()

    def dead(self) -> bool:
        return self.process.status is not None or is_readable(self.process.pidfd)

    def buried(self) -> bool:
        """It is gone, and nobody talks to it any more."""
        if not self.dead() or not self._lock.acquire(blocking=False):
            return False
        try:
            if not self.stopped:
                self._stop()
            if not self.process.reap():
                return False
            self.process.close()
            return True
        finally:
            self._lock.release()


def start(spec: Spec, spawner: Spawner) -> Server:
    """One that answers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    born: queue.SimpleQueue[Process | SpawnError] = queue.SimpleQueue()
    with theirs:
        spawner.start(spec, born.put, theirs.fileno())
        started = born.get()
    if isinstance(started, SpawnError):
        ours.close()
        raise started
    return Server(started, ours)


def is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def _four(number: int) -> bytes:
    return number.to_bytes(4, sys.byteorder)


def _number(said: bytes) -> int:
    return int.from_bytes(said, sys.byteorder)
