"""The toolhosts of one program, for threads: who has which, how many there are, when they leave.

One lock guards what is shared; it is never held while anybody waits. A toolhost that no thread has is in `idle`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from broker._native import lib
from broker.errors import ConfigError, Refusal
from broker.model import Caller, Judge, Policy, Ticket, Tool, ToolInfo, Work
from broker.observe.log import Log
from broker.policy.starts import Starts
from broker.pool import process, verdicts
from broker.pool.asides import fence_line, fence_name
from broker.pool.process import Process, Spawner, SpawnError, Spec
from broker.pool.rules import CPUS, PATIENCE_SECONDS, SETTLED_SECONDS, SPIN_SECONDS, STARTUP_SECONDS, this_thread
from broker.pool.talking import CHANGED, DONE, STOPPED, TalkingHost
from broker.runtimes.program import Program
from broker.settings import Limits

GRACE_SECONDS = 1.0  # between the end of its input and SIGKILL
LOST_SECONDS = 5.0
LOOK_SECONDS = 2.0  # between two looks at who is too old, too idle or too fat
# A toolhost of ours looks for its next line as long as a thread looks for its reply.
SPINS = {"MACHINA_TOOLHOST_SPIN_US": str(round(SPIN_SECONDS * 1e6))}

NOBODY: Any = None  # the sink of a work that only stands for a thread in the queue


class Shared:
    """What all pools of one process share."""

    def __init__(self, limits: Limits, log: Log) -> None:
        self.limits = limits
        self.log = log
        self.lock = threading.Lock()
        self.processes = 0
        self.policy: Policy
        self.spawner = Spawner()

    def soon(self, job: Callable[[], object]) -> None:
        self.spawner.soon(job)

    def spawn(self, spec: Spec) -> Process | SpawnError:
        """By a thread that lives as long as the toolhosts do."""
        born: queue.SimpleQueue[Process | SpawnError] = queue.SimpleQueue()
        self.spawner.start(spec, born.put)
        return born.get()

    def stop(self) -> None:
        self.spawner.stop()


class Waiter:
    """A thread that waits for a toolhost."""

    def __init__(self, tool: Tool, caller: Caller) -> None:
        self.work = Work(tool, b"", 1, None, caller, NOBODY, 0.0)
        self.thread = this_thread()
        self.host: TalkingHost | None = None
        self.refusal: Refusal | None = None
        self._bell = threading.Lock()
        self._bell.acquire()

    def outcome(self) -> TalkingHost | Refusal | None:
        return self.host or self.refusal

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is awake already
            self._bell.release()

    def sleep(self, seconds: float) -> None:
        self._bell.acquire(timeout=max(0.0, seconds))


class Fleet:
    """A toolhost is a thread's, or idle, or on its way out."""

    def __init__(self, program: Program, spec: Spec, shared: Shared) -> None:
        self.program = program
        self.source = program.source
        self.name = program.name
        self.settings = program.settings
        self.limits = program.limits
        self.timeout = program.settings.timeout_seconds or program.limits.timeout_seconds
        self.idle: list[TalkingHost] = []  # the one used last is the one used next: it is warm
        self.starts = Starts()
        self.problem = ""  # why the newest plugin is not the one that is used
        self.counts = {"crash": 0, "timeout": 0, "violation": 0, "started": 0, "recycled": 0}
        self.last_reason = ""
        self.closed: Refusal | None = None
        self.on_tools: Callable[[list[ToolInfo]], None] | None = None  # of a replaced plugin, before it is used
        self._shared = shared
        self._lock = shared.lock
        self._log = shared.log
        self._spec = spec
        self._stamp = program.stamp()
        self.generation = 0
        self._hosts: set[TalkingHost] = set()
        self._leaving: dict[TalkingHost, float] = {}  # asked to leave, when
        self._starting = 0
        self._away: dict[TalkingHost, tuple[int, float]] = {}  # calls that it had made, since when
        self._waited = 0.0  # seconds that threads have spent waiting since the last start
        self.waiters: deque[Waiter] = deque()
        self._reading_plugin = threading.Lock()
        self.next_look = 0.0

    # --- who has which toolhost -------------------------------------------------------------------------------------

    def take(self, tool: Tool, caller: Caller, ticket: Ticket | None) -> TalkingHost | Refusal:
        while not self.waiters:
            try:
                host = self.idle.pop()
            except IndexError:
                break
            if host.generation == self.generation:
                host.owner = this_thread()
                return host
            self._retire(host)
        waiter = Waiter(tool, caller)
        waiter.work.ticket = ticket
        deadline = time.monotonic() + self.limits.queue_seconds
        with self._lock:
            refusal = self.closed or self.starts.refusal(self.name, time.monotonic())
            if refusal is not None:
                return refusal
            self.waiters.append(waiter)
            self._serve()
        try:
            return self._wait(waiter, deadline)
        except BaseException:
            with self._lock:
                self._forget(waiter)
            if waiter.host is not None:
                self.give(waiter.host)
            raise

    def _wait(self, waiter: Waiter, deadline: float) -> TalkingHost | Refusal:
        begin = time.monotonic()
        while True:
            outcome = waiter.outcome()
            now = time.monotonic()
            if outcome is not None:
                self._waited += now - begin
                return outcome
            if now >= deadline:
                with self._lock:
                    self._forget(waiter)
                return waiter.outcome() or verdicts.overloaded(waiter.work.tool, self.limits.queue_seconds)
            if self._leaving:
                self._bury_leavers(now)
            if now > self.next_look:
                self._look(now)
            if self._wants_more():
                waited = self._waited + now - begin
                self._shared.soon(lambda waited=waited: self._start_another(waited))  # type: ignore[misc]
            waiter.sleep(min(deadline - now, PATIENCE_SECONDS))

    def _forget(self, waiter: Waiter) -> None:
        with contextlib.suppress(ValueError):
            self.waiters.remove(waiter)

    def _take_all_idle(self) -> list[TalkingHost]:
        """One by one: others take and give without the lock."""
        taken = []
        while True:
            try:
                taken.append(self.idle.pop())
            except IndexError:
                return taken[::-1]

    def _find_lost(self, idle: list[TalkingHost], now: float) -> list[TalkingHost]:
        """A signal's handler may raise between two of our lines, and leave a toolhost to nobody: it is neither idle nor
        leaving, nobody talks to it, and so it stays."""
        if self._reading_plugin.locked():  # those who found it changed hold theirs until it is read
            self._away = {}
            return []
        away = [host for host in self._hosts - set(idle) - set(self._leaving) if not lib.tb_talk_busy(host.talk)]
        before, self._away = self._away, {}
        for host in away:
            calls, since = before.get(host, (host.calls, now))
            self._away[host] = (host.calls, since) if calls == host.calls else (host.calls, now)
        return [host for host, (_, since) in self._away.items() if now - since > LOST_SECONDS]

    def _serve(self) -> None:
        """Idle toolhosts go to those who wait, in order. With the lock. If it is interrupted, nobody is forgotten."""
        while self.waiters and self.idle:
            waiter = self.waiters[0]
            if waiter.outcome() is None:
                try:
                    host = self.idle.pop()
                except IndexError:  # somebody was faster
                    return
                host.owner = waiter.thread
                waiter.host = host
                waiter.wake()
            self.waiters.popleft()

    def give(self, host: TalkingHost) -> None:
        """The thread does not need it any more."""
        if host not in self._hosts:  # it has been buried meanwhile
            return
        if self.closed is not None:
            host.end()
            self.bury(host)
            return
        host.owner = 0
        if host.generation != self.generation:
            self._retire(host)
        elif host.max_calls and host.calls >= host.max_calls:
            self._recycle(host, "call count")
        else:
            self.idle.append(host)
        if self.waiters:
            with self._lock:
                self._serve()
        if host.used > self.next_look:
            self._look(host.used)

    def revise(self, judge: Judge, index: int | None) -> None:
        """Asks about the calls of those who wait. With the lock."""
        for waiter in list(self.waiters):
            if index is None or waiter.work.tool.index == index:
                waiter.refusal = judge(waiter.work)
                if waiter.refusal is not None:
                    self.waiters.remove(waiter)
                    waiter.wake()

    # --- their lives ------------------------------------------------------------------------------------------------

    def _wants_more(self) -> bool:
        return len(self._hosts) - len(self._leaving) + self._starting < self.settings.max

    def _start_another(self, waited: float) -> None:
        """On the spawner's thread: nothing interrupts it between the decision and the start."""
        if self._may_start(time.monotonic(), waited):
            threading.Thread(target=self._start, name="broker-start", daemon=True).start()

    def _may_start(self, now: float, waited: float) -> bool:
        """Below the minimum at once; above it when threads have waited for long enough, in all."""
        with self._lock:
            size = len(self._hosts) - len(self._leaving) + self._starting
            if now < self.starts.retry_at or size >= self.settings.max or self.closed is not None:
                return False
            if self._shared.processes >= self.limits.processes or (self.starts.failures and self._starting):
                return False
            if size >= max(1, self.settings.min):
                if waited < PATIENCE_SECONDS or self._starting >= CPUS:
                    return False
                self._waited = 0.0
            self._starting += 1
            self._shared.processes += 1
            return True

    def _start(self) -> None:
        """Starts one and waits until it answers; then whoever waits gets it. In a thread of its own: those who wait may
        be given another one meanwhile, or be interrupted."""
        with self._lock:
            spec, stamp, generation = self._spec, self._stamp, self.generation
        host = None
        child = self._shared.spawn(spec._replace(env={**SPINS, **spec.env}))
        reason = str(child) if isinstance(child, SpawnError) else ""
        if isinstance(child, Process):
            host = TalkingHost(child, self.program, self.limits, stamp, generation, time.monotonic())
            fence = fence_name()
            verdict = host.ask(fence_line(fence), STARTUP_SECONDS)
            if verdict == DONE:
                host.quotes = fence in host.reply()
                host.rss = process.resident(child.pid)
            elif verdict != CHANGED:
                host.end()
                said = "said something else than a reply" if verdict == STOPPED else "did not answer"
                reason = host.obituary(f"{said} when it was started")
        self._started(host, reason)

    def _started(self, host: TalkingHost | None, reason: str) -> None:
        with self._lock:
            self._starting -= 1
            self.counts["started"] += 1
            if reason:
                self._shared.processes -= 1
                if host is not None:
                    host.end()
                    host.release()
                self._start_failed(reason)
            elif host is not None:
                self._hosts.add(host)
        if host is not None and not reason:
            self.give(host)

    def _start_failed(self, reason: str) -> None:
        """With the lock."""
        now = time.monotonic()
        self.starts.failed(reason, now)
        self.last_reason = reason
        self._log.warning("toolhost did not start", pool=self.name, reason=reason, tries=self.starts.failures)
        refusal = self.starts.refusal(self.name, now)
        if refusal is not None and not self._hosts:
            while self.waiters:
                waiter = self.waiters.popleft()
                waiter.refusal = refusal
                waiter.wake()

    def end(self, host: TalkingHost, reason: str) -> str:
        """Kills it; its place is kept until it is buried. Why it ended, in words."""
        host.end()
        words = host.obituary(reason)
        self.last_reason = words
        self._log.warning("toolhost died", pool=self.name, pid=host.process.pid, reason=words)
        return words

    def drop(self, host: TalkingHost, reason: str) -> str:
        words = self.end(host, reason)
        self.bury(host)
        return words

    def died_idle(self, host: TalkingHost) -> None:
        """Nobody's call was in it. If it has never done anything, it did not start well."""
        host.end()
        words = host.obituary("died while it was idle")
        self.bury(host)
        if not host.calls and time.monotonic() - host.born < SETTLED_SECONDS:
            with self._lock:
                self._start_failed(words)

    def bury(self, host: TalkingHost) -> None:
        """Another one may take its place."""
        host.owner = 0
        with self._lock:
            self._leaving.pop(host, None)
            if host in self._hosts:
                self._hosts.discard(host)
                self._shared.processes -= 1
        host.release()

    def _recycle(self, host: TalkingHost, reason: str) -> None:
        self.counts["recycled"] += 1
        self._log.info("toolhost recycled", pool=self.name, pid=host.process.pid, reason=reason, calls=host.calls)
        self._retire(host)

    def _retire(self, host: TalkingHost) -> None:
        """The end of its input asks it to leave; whoever looks next buries it."""
        host.process.close_stdin()
        with self._lock:
            self._leaving[host] = time.monotonic()
        self.next_look = 0.0

    def _look(self, now: float) -> None:
        """There is no janitor here: every now and then, a thread that has just been served looks after the others."""
        with self._lock:
            if now < self.next_look:
                return
            self.next_look = now + (GRACE_SECONDS / 4 if self._leaving else LOOK_SECONDS)
            self.starts.succeeded()
            idle = self._take_all_idle()
            lost = self._find_lost(idle, now)
        for host in lost:
            self.drop(host, "was lost: the thread that had it was interrupted")
        self._bury_leavers(now)
        spare = len(self._hosts) - self.settings.min
        growth = self.settings.max_rss_growth_mb * 1024 * 1024
        for host in idle:
            if now > host.expires:
                self._recycle(host, "lifetime")
            elif growth and process.resident(host.process.pid) > host.rss + growth:
                self._recycle(host, "grew too much (max_rss_growth_mb)")
            elif spare > 0 and now - host.used > self.settings.idle_seconds:
                spare -= 1
                self._retire(host)
            else:
                self.idle.append(host)
        with self._lock:
            self._serve()

    def _bury_leavers(self, now: float) -> None:
        """Those who have left, and those who do not want to."""
        with self._lock:
            gone = [host for host, since in self._leaving.items() if host.process.reap() or now - since > GRACE_SECONDS]
            for host in gone:
                del self._leaving[host]
        for host in gone:
            host.end()
            self.bury(host)

    # --- the plugin -------------------------------------------------------------------------------------------------

    def changed(self, host: TalkingHost) -> None:
        """The plugin's file has changed, or may have. If the new one is no good, the old one goes on."""
        with self._reading_plugin:
            if host.generation == self.generation and self.program.changed():
                self._read_plugin()
            if host.generation == self.generation:
                host.trust(self.program.stamp())
        self.give(host)

    def look_at_plugin(self) -> None:
        """Somebody has asked for a tool that nobody knows."""
        if self.program.changed():
            with self._reading_plugin:
                if self.program.changed():
                    self._read_plugin()

    def _read_plugin(self) -> None:
        try:
            spec, tools = self.program.learn(self._log)
            with self._lock:
                if self.on_tools is not None:
                    self.on_tools(tools)
                self._spec = spec
                self._stamp = self.program.stamp()
                self.generation += 1
                self.starts = Starts()
                self.problem = ""
                old = self._take_all_idle()
        except Exception as error:  # a ConfigError says it well; anything else must not hold the calls either
            self.problem = str(error) if isinstance(error, ConfigError) else repr(error)
            self._log.error("new plugin refused, the old one goes on", plugin=self.source, reason=self.problem)
        else:
            self._log.info("plugin replaced", plugin=self.source, tools=len(tools))
            for host in old:
                self._retire(host)

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, refusal: Refusal) -> None:
        """Ends every process; calls that run are answered `crash`, those that wait with this."""
        with self._lock:
            self.closed = refusal
            for waiter in self.waiters:
                waiter.refusal = refusal
                waiter.wake()
            self.waiters.clear()
            idle = self._take_all_idle()
            leaving = [*self._leaving, *idle]
            running = self._hosts - set(leaving)
        for host in idle:
            host.process.close_stdin()
        for host in running:
            host.process.kill()
        deadline = time.monotonic() + GRACE_SECONDS
        for host in leaving:
            while not host.process.reap() and time.monotonic() < deadline:
                time.sleep(0.001)
            host.end()
            self.bury(host)
        while (self._hosts or self._starting) and time.monotonic() < deadline:  # threads are giving up theirs
            for host in self._take_all_idle():
                host.end()
                self.bury(host)
            time.sleep(0.001)
        for host in list(self._hosts):
            host.end()
            self.bury(host)

    def abandon(self) -> None:
        """After a fork: the toolhosts are the parent's; only our copies of their pipes are closed."""
        for host in {*self._hosts, *self._leaving}:
            with contextlib.suppress(OSError):  # another thread may have been closing it just then
                host.release()
        self._hosts.clear()
        self._leaving.clear()
        self.idle.clear()
