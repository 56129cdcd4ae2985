"""One app's interpreters, from any thread: a fork server, spares that wait for a call, and what is kept warm.

A server that had better not go on (packages were installed, a module has spoilt it) is retired: calls that run in its
children may end, new ones are the next server's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable

from broker import errors
from broker.errors import Refusal
from broker.policy.starts import Starts
from broker.pool.process import Spawner, SpawnError, Spec
from broker.pool.rules import STARTUP_SECONDS
from broker.runtimes.python import server
from broker.runtimes.python.entry import SETTLED_SECONDS
from broker.runtimes.python.server import Child, Server, ServerDied

SPARES = 2  # children that wait for a call, so that none waits for a fork
SERVER, WAITING, RUNNING, LEAVING = "fork server", "waiting", "running", "leaving"
MOST_MODULES = 4096  # that are kept warm


CLOSED = Refusal(errors.DRAINING, "the broker is shutting down")


class Unavailable(Exception):
    """No child can be had; the refusal says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


class Nursery:
    """Starts a server when it is needed, and again when it has died; `take` a child, then `end` or `keep` it."""

    def __init__(self, name: str, python: str, root: str, reuse: bool, spawner: Spawner) -> None:
        self.starts = Starts()
        self._name = name
        self._spec = Spec((python, server.PROGRAM), dict(os.environ), root, fenced=False)
        self._reuse = reuse
        self._spawner = spawner
        self._lock = threading.Lock()  # whoever starts, replaces or teaches the server
        self._server: Server | None = None
        self._retired: list[Server] = []
        self._spares: deque[Child] = deque()
        self._spoilt: deque[Child] = deque()  # they have waited in vain, and are ended when there is time
        self._modules: dict[str, None] = {}  # kept warm, in the order in which they were first imported
        self._unfit: set[str] = set()
        self._stamps: list[tuple[str, int]] = []
        self._compiled: dict[str, float] = {}  # sources, and when they may be compiled once more
        self.counts = {"started": 0, "forked": 0, "died": 0, "recycled": 0}
        self._closing = threading.Event()
        self._burying = False  # soon

    # --- children ---------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """The first calls find it warm."""
        self._spares.append(self.take())
        self.refill()

    def spare(self) -> Child | None:
        """One that waits; never waits itself. Nothing of the app has been imported into it, except where processes are
        used again."""
        if self._outdated():
            return None
        try:
            child = self._spares.popleft()
        except IndexError:
            return None
        if child.server is self._server and not child.server.dead() and not child.dead():
            return child
        child.kill()
        self._spoilt.append(child)
        return None

    def take(self) -> Child:
        """The same; or one that is forked now."""
        while True:
            if self._outdated():
                with self._lock:
                    if self._outdated():
                        self._retire()
            child = self.spare()
            self._end_spoilt()
            if child is not None:
                return child
            if not self._spares:
                with self._lock:
                    return self._fork()

    def _end_spoilt(self) -> None:
        while self._spoilt:
            try:
                child = self._spoilt.popleft()
            except IndexError:
                return
            self.end(child)

    def keep(self, child: Child) -> None:
        """It may have another call, before those that have had none."""
        child.calls += 1
        self._spares.appendleft(child)

    def end(self, child: Child) -> int | None:
        """Gone, with all that it started. How it ended, if anybody knows."""
        return child.server.end(child)

    def leave(self, child: Child) -> None:
        """It has answered: nobody waits for its end, which comes with the next fork, or with `bury`."""
        child.server.leave(child)

    def to_bury(self) -> bool:
        """Is there anything for `bury`? It is called if so, once."""
        if self._burying or not any(one.leaving for one in (self._server, *self._retired) if one is not None):
            return False
        self._burying = True
        return True

    def bury(self) -> None:
        self._burying = False
        for one in (self._server, *self._retired):
            if one is not None:
                one.bury()

    def refill(self) -> None:
        """So that the next calls need not wait for a fork."""
        self._end_spoilt()
        while len(self._spares) < SPARES and not self._reuse:
            running = self._server
            if running is None or self._closing.is_set():
                return
            try:
                self._spares.append(self._forked(running))
            except (ServerDied, OSError):
                return

    def _fork(self) -> Child:
        """Waits for a server to be up; gives up when none starts."""
        while True:
            now = time.monotonic()
            refusal = CLOSED if self._closing.is_set() else self.starts.refusal(self._name, now)
            if refusal is not None:
                raise Unavailable(refusal)
            try:
                if self._server is None or self._server.dead():
                    self._closing.wait(max(0.0, self.starts.retry_at - now))
                    self._start()
                assert self._server is not None
                return self._forked(self._server)
            except (ServerDied, SpawnError, OSError) as error:
                self._retire()
                self.starts.failed(str(error), time.monotonic())

    def _forked(self, running: Server) -> Child:
        child = running.fork(self._reuse)
        self.counts["forked"] += 1
        return child

    # --- the server -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._retire()
        modules = list(self._modules)
        while True:
            if self._closing.is_set():
                raise SpawnError(CLOSED.text)
            self._server = server.start(self._spec, self._spawner)
            self.counts["started"] += 1
            self._server.load([], STARTUP_SECONDS)  # is it there at all?
            try:
                if not self._load(self._server, modules):
                    return
            except ServerDied:  # one of them; which one is not worth finding out
                self._unfit.update(modules)
                modules = []
            modules = [one for one in modules if one not in self._unfit]
            self._retire()

    def _load(self, running: Server, modules: list[str]) -> bool:
        """Whether it had better not go on."""
        said = running.load(modules)
        self._stamps = said.stamps
        self._unfit.update(said.unfit)
        for one in modules:
            if one in self._unfit:
                self._modules.pop(one, None)
            else:
                self._modules[one] = None
        return said.spoilt

    def learn(self, modules: Iterable[str]) -> None:
        """A child has imported these, from outside of the app: they are kept warm from now on."""
        if all(one in self._modules or one in self._unfit for one in modules):
            return
        with self._lock:
            new = [one for one in modules if one not in self._modules and one not in self._unfit]
            new = new[: MOST_MODULES - len(self._modules)]
            running = self._server
            if not new or running is None or self._closing.is_set():
                return
            try:
                spoilt = self._load(running, new)
            except ServerDied:
                self._unfit.update(new)
                spoilt = True
            if spoilt:
                self._retire()
            else:
                self._drop_spares()

    def compile(self, sources: Iterable[str]) -> None:
        """A child has compiled these: the server does it for the next ones, unless they have just been edited."""
        now = time.monotonic()
        due = [one for one in sources if now >= self._compiled.get(one, 0.0)]
        running = self._server
        if not due or running is None or self._closing.is_set():
            return
        if len(self._compiled) > MOST_MODULES:
            self._compiled.clear()
        self._compiled |= dict.fromkeys(due, now + SETTLED_SECONDS)
        with contextlib.suppress(ServerDied):
            running.compile(due)

    def _outdated(self) -> bool:
        """Packages were installed or removed."""
        try:
            return any(os.stat(place).st_mtime_ns != stamp for place, stamp in self._stamps)
        except OSError:
            return True

    def _retire(self) -> None:
        old, self._server = self._server, None
        self._stamps = []
        self._compiled.clear()
        if old is not None:
            self.counts["died" if old.dead() else "recycled"] += 1
            self._retired.append(old)
        self._drop_spares()

    def _drop_spares(self) -> None:
        while self._spares:
            self.end(self._spares.popleft())

    # --- the broker's loop ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Which servers have died or are not needed any more? Never waits."""
        running = self._server
        if running is not None and running.dead() and self._lock.acquire(blocking=False):
            try:
                if running is self._server:
                    self._server = None
                    self._retired.append(running)
                    self.counts["died"] += 1
            finally:
                self._lock.release()
        for old in list(self._retired):
            if old.buried():
                self._retired.remove(old)
            elif not old.children or self._closing.is_set():
                old.stop()

    def processes(self) -> list[tuple[str, Server | Child]]:
        """All that are alive, and what they are doing."""
        running, spares = self._server, list(self._spares)
        found: list[tuple[str, Server | Child]] = [] if running is None else [(SERVER, running)]
        found += [(LEAVING, old) for old in list(self._retired)]
        for one in [] if running is None else [running, *self._retired]:
            gone = list(one.leaving)
            found += [(WAITING if child in spares else RUNNING, child) for child in list(one.children - set(gone))]
        return found

    def close(self) -> None:
        """For good: everything is killed."""
        self._closing.set()
        running = self._server
        for one in (*([running] if running else ()), *self._retired):
            one.stop()

    def alive(self) -> bool:
        if self._closing.is_set() and self._server is not None:
            self._server.stop()
        self.look()
        return self._server is not None or bool(self._retired)

    def abandon(self) -> None:
        """After a fork of ours: everything is the parent's."""
        for one in (self._server, *self._retired):
            if one is not None:
                one.abandon()
