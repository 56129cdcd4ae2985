"""One app's fork server and its children, from any thread: spares that wait for a call, and what is kept warm."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from broker.errors import Refusal
from broker.policy.starts import Starts
from broker.pool import process
from broker.pool.process import Process, Spawner, SpawnError, Spec
from broker.pool.rules import STARTUP_SECONDS
from broker.pool.verdicts import STDERR_KEPT

SERVER = str(Path(__file__).with_name("forkserver.py"))
SPARES = 2  # children that wait for a call, so that none waits for a fork
LOAD_SECONDS = 120.0  # for all modules that are kept warm
FORK_SECONDS = 30.0
MOST_MODULES = 4096  # that are kept warm
PACKET = 1 << 20

_encode = msgspec.json.Encoder().encode


class Unavailable(Exception):
    """No child can be had; the refusal says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


class _ServerDied(Exception):
    """Its last words, where it had any."""


class Child:
    """A forked interpreter: our ends of its socket and its stderr. Its number is its own until the server reaps it."""

    __slots__ = ("calls", "pid", "pidfd", "server", "stderr", "wire")

    def __init__(self, pid: int, wire: socket.socket, stderr: int, server: Process) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.wire = wire
        self.stderr = stderr
        self.server = server
        self.calls = 0

    def dead(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def kill(self) -> None:
        """With its whole group."""
        with contextlib.suppress(OSError):
            if not self.dead():
                os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.wire.close()
        stderr, self.stderr = self.stderr, -1
        process.close(stderr)
        pidfd, self.pidfd = self.pidfd, -1
        process.close(pidfd)


class Nursery:
    """Starts the server when it is needed, and again when it has died; `take` a child, then `end` or `keep` it."""

    def __init__(self, name: str, python: str, root: str, reuse: bool, spawner: Spawner) -> None:
        self.starts = Starts()
        self._name = name
        self._spec = Spec((python, SERVER), dict(os.environ), root, fenced=False)
        self._reuse = reuse
        self._spawner = spawner
        self._lock = threading.RLock()  # one question at a time
        self._server: Process | None = None
        self._control: socket.socket | None = None
        self._spares: deque[Child] = deque()
        self._children: set[Child] = set()  # all that are alive
        self._modules: dict[str, None] = {}  # kept warm, in the order in which they were first imported
        self._unfit: set[str] = set()
        self._stamps: list[tuple[str, int]] = []
        self._said = b""
        self._spoilt = False
        self._closed = False
        self._gone: list[Process] = []  # dying

    # --- children ---------------------------------------------------------------------------------------------------

    def take(self) -> Child:
        """One that nothing of the app has been imported into; or, where they are used again, one that is free."""
        if self._stamps and self._changed():
            with self._lock:
                if self._changed():
                    self._stop()
        while True:
            try:
                child = self._spares.popleft()
            except IndexError:
                break
            if not child.dead():
                return child
            self.end(child)
        with self._lock:
            return self._fork()

    def _changed(self) -> bool:
        """Packages were installed or removed."""
        try:
            return any(os.stat(place).st_mtime_ns != stamp for place, stamp in self._stamps)
        except OSError:
            return True

    def prepare(self) -> None:
        """The first calls find it warm."""
        self._spares.append(self.take())
        self.refill()

    def keep(self, child: Child) -> None:
        """It may have another call, before those that have had none."""
        self._spares.appendleft(child)

    def end(self, child: Child) -> int | None:
        """Killed with its group, if it is alive, and gone. How it ended, if anybody knows."""
        status = None
        child.kill()
        with self._lock:
            if child.server is self._server:
                with contextlib.suppress(_ServerDied):
                    status = self._ask({"do": "reap", "pid": child.pid}, FORK_SECONDS)["status"]
            self._children.discard(child)
            child.close()
        return status

    def refill(self) -> None:
        """So that the next calls need not wait for a fork."""
        while len(self._spares) < SPARES and not self._closed and not self._reuse:
            with self._lock:
                if self._server is None:
                    return
                try:
                    self._spares.append(self._fork_once())
                except (_ServerDied, OSError):
                    return

    def learn(self, modules: Iterable[str]) -> None:
        """A child has imported these, from outside of the app: they are kept warm from now on."""
        with self._lock:
            new = [one for one in modules if one not in self._modules and one not in self._unfit]
            if not new or self._server is None or self._closed:
                return
            new = new[: MOST_MODULES - len(self._modules)]
            try:
                self._load(new)
            except _ServerDied:
                self._unfit.update(new)  # one of them; which one is not worth finding out
                return
            stale = [self._spares.popleft() for _ in range(len(self._spares))]
            for child in stale:
                self.end(child)

    def _load(self, modules: list[str]) -> None:
        said = self._ask({"do": "load", "modules": modules}, LOAD_SECONDS)
        self._stamps = [(place, stamp) for place, stamp in said["stamps"]]
        self._unfit.update(said["unfit"])
        self._modules.update(dict.fromkeys(one for one in modules if one not in self._unfit))
        self._spoilt = bool(said["spoilt"])
        if self._spoilt:  # something of the app's was imported, or a thread runs: a new one does without that
            self._stop()

    def _fork(self) -> Child:
        """Waits for the server to be up; gives up when it does not start."""
        while True:
            now = time.monotonic()
            refusal = self.starts.refusal(self._name, now)
            if refusal is not None:
                raise Unavailable(refusal)
            if self._server is None and now < self.starts.retry_at:
                time.sleep(self.starts.retry_at - now)
            try:
                if self._server is None:
                    self._start()
                return self._fork_once()
            except (_ServerDied, SpawnError, OSError) as error:
                self.starts.failed(str(error) or "it ended at once", time.monotonic())

    def _fork_once(self) -> Child:
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            pid = self._ask({"do": "fork", "reuse": self._reuse}, FORK_SECONDS, [theirs.fileno(), writer])["pid"]
            assert self._server is not None
            os.set_blocking(reader, False)
            child = Child(pid, ours, reader, self._server)
        except BaseException:
            ours.close()
            os.close(reader)
            raise
        finally:
            theirs.close()
            os.close(writer)
        self._children.add(child)
        return child

    # --- the server -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._closed:
            raise SpawnError("the broker is shutting down")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        born: queue.SimpleQueue[Process | SpawnError] = queue.SimpleQueue()
        with theirs:
            self._spawner.start(self._spec, born.put, theirs.fileno())
            server = born.get()
        if isinstance(server, SpawnError):
            ours.close()
            raise server
        self._server, self._control, self._said = server, ours, b""
        modules = list(self._modules)
        try:
            self._load([])  # is it there at all?
            self._load(modules)
        except _ServerDied:
            self._unfit.update(modules)
            self._modules.clear()
            raise
        if self._spoilt:
            self._start()

    def _ask(self, what: dict[str, Any], seconds: float, fds: list[int] | None = None) -> Any:
        if self._control is None:
            raise _ServerDied("it has ended")
        try:
            self._control.settimeout(min(seconds, STARTUP_SECONDS) if not self._stamps else seconds)
            if fds:
                socket.send_fds(self._control, [_encode(what)], fds)
            else:
                self._control.send(_encode(what))
            reply = self._control.recv(PACKET)
        except OSError as error:
            reply, reason = b"", f"gave no answer: {error}"
        else:
            reason = "ended"
        self._hear()
        if reply:
            return msgspec.json.decode(reply)
        words = self._said.decode(errors="replace").strip().splitlines()
        self._stop()
        raise _ServerDied(": ".join([f"its interpreter {reason}", *words[-1:]]))

    def _hear(self) -> None:
        """What it says itself, when modules are imported."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                while data := os.read(self._server.stderr, 65536):
                    self._said = (self._said + data)[-STDERR_KEPT:]

    def _stop(self) -> None:
        """It and its spares; children that run end with it."""
        server, self._server = self._server, None
        if self._control is not None:
            self._control.close()
            self._control = None
        if server is not None:
            self._hear()
            server.kill()
            self._gone.append(server)
        while self._spares:
            child = self._spares.popleft()
            child.kill()
            self._children.discard(child)
            child.close()
        self._stamps = []

    # --- the broker's loop ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Has the server died, and are those that were killed gone? Never waits."""
        self._gone = [server for server in self._gone if not _buried(server)]
        server = self._server
        if server is not None and select.select([server.pidfd], [], [], 0)[0] and self._lock.acquire(blocking=False):
            try:
                if server is self._server:
                    self._stop()
            finally:
                self._lock.release()

    def close(self) -> None:
        """For good: everything is killed. Whoever asks the server something just now hears that it has died."""
        self._closed = True
        for child in list(self._children):
            child.kill()
        server = self._server
        if server is not None:
            server.kill()
        if self._lock.acquire(timeout=0.2):
            try:
                self._stop()
            finally:
                self._lock.release()

    def alive(self) -> bool:
        self.look()
        return self._server is not None or bool(self._gone)


def _buried(server: Process) -> bool:
    if not server.reap():
        return False
    server.close()
    return True
