"""A broker in the caller's own process: the same configuration, the same policy, and toolhosts of its own.

Threads run their calls themselves. After a fork the child starts with nothing: no toolhosts, no keys, no leases.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from broker import config, errors, settings, toolhosts
from broker.assets import Assets
from broker.client import reply as replies
from broker.client.failures import CallFailed, failure
from broker.client.reply import Reply
from broker.client.request import encode, input_text, named
from broker.dispatch import SPLICE_ROOM, Dispatcher
from broker.errors import Refusal
from broker.manifest import cards, described, options
from broker.model import Tool, Work
from broker.observe.audit import Audit, default_path
from broker.observe.log import Log
from broker.policy.idempotency import Entry
from broker.policy.leases import TooMany, tier_of
from broker.policy.rights import Book
from broker.pool.fleet import Shared
from broker.pool.threads import AGAIN, Threads
from broker.registry import Registry
from broker.runtimes.events.calls import EventCalls
from broker.runtimes.events.program import Program
from broker.runtimes.events.program import describe as describe_events
from broker.runtimes.oneshot import OneShot, describe
from broker.runtimes.program import private_directory, programs, remove_directory
from broker.runtimes.python.calls import PythonCalls
from broker.secrets import Secrets
from broker.settings import Config
from broker.ticket import Call, Ticket

CLOSED = Refusal(errors.DRAINING, "this Embedded has been closed")
INTERRUPTED = Refusal(errors.CRASH, "the caller was interrupted while the tool ran")
MOST_FALLBACKS = 1024
LOOK_SECONDS = 1.0  # between two looks at what has waited for its session for too long

_alive: weakref.WeakSet[Embedded] = weakref.WeakSet()


class _Caller:
    """One call that is more than plain: who asked, and the place where its answer, or its turn, arrives."""

    face = "embedded"
    number = 0
    turns = None
    line: Any = None

    def __init__(self, embedded: Embedded) -> None:
        self.principal = embedded.principal
        self.rights = embedded.rights
        self.work: Work | None = None  # this thread is to run it
        self.answer: bytes | Refusal | None = None
        self.ticket: Ticket | None = None
        self._left = False
        self._bell = threading.Lock()
        self._bell.acquire()

    def gone(self) -> bool:
        return self._left

    def full(self, work: Work) -> bool:  # noqa: ARG002
        return False

    def behind(self) -> bool:
        return False

    def tell(self, work: Work, members: bytes) -> None:
        """Nobody listens: the reply has the events."""

    def leave(self) -> None:
        self._left = True

    def took(self, ticket: Ticket) -> None:
        self.ticket = ticket

    def run_here(self, work: Work, now: float) -> None:  # noqa: ARG002
        self.work = work
        self._ring()

    def deliver(self, work: Work, lines: bytes, count: int) -> None:  # noqa: ARG002
        self._settle(lines)

    def repeat(self, work: Work, entry: Entry) -> None:  # noqa: ARG002
        self._settle(entry.hit(None))

    def refuse(self, work: Work, refusal: Refusal) -> None:  # noqa: ARG002
        self._settle(refusal)

    def _settle(self, answer: bytes | Refusal) -> None:
        self.answer = answer
        self._ring()

    def _ring(self) -> None:
        if self._bell.locked():
            self._bell.release()

    def sleep(self, seconds: float) -> None:
        self._bell.acquire(timeout=seconds)


class Embedded:
    """Calls tools without a daemon.

    >>> from broker import Embedded
    >>> with Embedded() as tools:
    ...     tools.call("AID.DEMO.ECHO.v1", {"hello": "world"}).output
    {'hello': 'world'}
    """

    face = "embedded"

    def __init__(
        self,
        *,
        file: str | None = None,
        plugins: Iterable[str] = (),
        toolhost: str | None = None,
        environ: Mapping[str, str] | None = None,
        fallback: Callable[[str], settings.OneShot] | None = None,
        log: Log | None = None,
    ) -> None:
        """`fallback` makes a command for a tool that no plugin has; with it, the demo tools are no default."""
        self._arguments = (file, tuple(plugins), toolhost)
        self._fallback = fallback
        self._environ = environ
        self._log = log or Log(level="error")
        self._pid = 0
        self._starting = threading.Lock()
        self._begin()
        _alive.add(self)

    # --- start and end ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Everything that must not be shared with a parent process is made here."""
        environ = self._environ if self._environ is not None else os.environ
        settings = _settings(*self._arguments, environ, demo=self._fallback is None)
        self.settings = settings
        self.principal = f"uid:{os.getuid()}"
        self.rights = Book(settings.principal).of(self.principal)
        self._shared = Shared(settings.limits, self._log)
        self._lock = self._shared.lock
        self._deferred: list[tuple[Callable[..., None], Any]] = []
        self._closed = False
        self._next_look = 0.0
        self._private = private_directory()
        registry = Registry(settings.breaker, settings.lease.enforce)
        registry.use_options(options(settings))
        secrets = Secrets(environ, self._log.hidden)
        audit = Audit(settings.lease.audit or default_path(environ), self._log)
        self.dispatcher = Dispatcher(registry, settings, audit, lambda *later: self._deferred.append(later), secrets)
        self._shared.policy = self.dispatcher
        self.runtimes: list[Threads] = []
        self._events: list[EventCalls] = []
        self._python: list[PythonCalls] = []
        self._fallen_back: deque[Tool] = deque()
        assets = Assets()
        try:
            for program in programs(settings, self._private):
                spec, tools = program.learn(self._log)
                runtime = Threads(program, spec, self._shared)
                runtime.fleet.on_tools = self._on_tools(runtime)
                for info in tools:
                    registry.add(info, runtime)
                self.runtimes.append(runtime)
            for one in settings.oneshot:
                registry.add(described([describe(one)], cards(settings))[0], OneShot(one, self._shared))
            for python in settings.python:
                app = PythonCalls(python, self._shared)
                self._python.append(app)
                for info in described(app.tools(), cards(settings)):
                    tool = registry.add(info, app)
                    tool.timeout = tool.stats.timeout = app.program.timeout_of(tool.name)
            for events in settings.events:
                runs = EventCalls(Program(events, settings.limits, assets, self._log), self._shared)
                registry.add(described([describe_events(events)], cards(settings))[0], runs)
                self._events.append(runs)
        except BaseException:
            remove_directory(self._private)
            raise
        self._plain = registry.plain_of(self.rights)
        self._most = settings.limits.request_bytes + SPLICE_ROOM
        self._pid = os.getpid()

    def _on_tools(self, runtime: Threads) -> Callable[[list[Any]], None]:
        def changed(tools: list[Any]) -> None:
            registry = self.dispatcher.registry
            names = {info.aid for info in tools}
            for tool in [tool for tool in self._fallen_back if tool.name in names]:
                self._fallen_back.remove(tool)
                registry.remove(tool)
            gone = registry.replace(runtime, tools)
            self.dispatcher.changed(registry.of(runtime), gone)

        return changed

    def _forget(self) -> None:
        """In the child of a fork."""
        self._plain = {}
        self._pid = 0
        self._starting = threading.Lock()
        runtimes, self.runtimes = self.runtimes, []
        for runtime in runtimes:
            runtime.fleet.abandon()
        apps, self._python = self._python, []
        for app in apps:
            app.abandon()

    def _here(self) -> None:
        """The first call after a fork starts anew."""
        if self._pid == 0 and not self._closed:
            with self._starting:
                if self._pid == 0:
                    self._begin()

    def close(self) -> None:
        """Ends every toolhost. Calls that run are answered `crash`, those that wait and come later `draining`."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():  # a child that has not called since its fork has nothing to end
            return
        with self._lock:
            self.dispatcher.draining = True
            self._plain.clear()
            self.dispatcher.refuse_waiting()
        for runtime in self.runtimes:
            runtime.fleet.close(CLOSED)
        for events in self._events:
            events.close()
        for app in self._python:
            app.close(CLOSED)
        self._shared.stop()
        self.dispatcher.audit.close()
        remove_directory(self._private)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __enter__(self) -> Embedded:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- calls ------------------------------------------------------------------------------------------------------

    def call(
        self,
        aid: str,
        inputs: Any = None,
        *,
        input_json: str | None = None,
        timeout: float | None = None,
        idempotency_key: str = "",
        lease_token: str = "",
        ds_state: Any = None,
        session: str = "",
    ) -> Reply:
        """Runs a tool and returns its reply; raises a `CallFailed` that says what went wrong.

        `inputs` is anything that JSON can say; `input_json` is the same as text, as the tool will see it.
        """
        text = input_text(inputs, input_json)
        extras = timeout, idempotency_key, lease_token, ds_state, session
        answer = self.answer(aid, text, *extras)
        if isinstance(answer, Refusal):
            raise failure(aid, answer)
        return replies.read(aid, answer)

    def call_many(self, calls: Iterable[tuple[str, Any]]) -> list[Reply | CallFailed]:
        """Runs (aid, inputs) after (aid, inputs); the failure of one does not stop the others."""
        results: list[Reply | CallFailed] = []
        for aid, inputs in calls:
            try:
                results.append(self.call(aid, inputs))
            except CallFailed as failed:
                results.append(failed)
        return results

    def tools(self) -> list[dict[str, Any]]:
        """What can be called, and what is known of it."""
        from broker.observe import status

        self._here()
        return status.tools(tool for tool in self.dispatcher.registry if self.rights.allow(tool))

    def state(self, session: str) -> dict[str, Any]:
        """What event tools have made of this session."""
        self._here()
        with self._lock:
            found = self.dispatcher.sessions.find((self.principal, named(session)))
            state: dict[str, Any] = msgspec.json.decode(found.text) if found is not None else {}
        return state

    def clear_state(self, session: str) -> bool:
        """It begins anew. Was there a state?"""
        self._here()
        with self._lock:
            return self.dispatcher.sessions.forget_story((self.principal, named(session)))

    def issue_lease(self, aid: str, *, tier: int | None = None, ttl: float | None = None) -> str:
        """A single-use token for a tool above tier 0. Whoever holds the Embedded is its operator."""
        self._here()
        if self._closed:
            raise failure(aid, CLOSED)
        with self._lock:
            tool = self.dispatcher.registry.get(aid)
            if tier is None:
                tier = tool.tier if tool is not None else tier_of(aid, ())
            try:
                lease = self.dispatcher.leases.issue(aid, tier, ttl, self.principal, time.monotonic())
            except TooMany as error:
                raise failure(aid, Refusal(errors.OVERLOADED, str(error))) from None
            self.dispatcher.audit.write("lease_issued", self.principal, aid, tier, lease.fingerprint)
        return lease.token

    # --- one call ---------------------------------------------------------------------------------------------------

    def answer(
        self,
        aid: str,
        text: str,
        timeout: float | None = None,
        key: str = "",
        lease: str = "",
        ds_state: Any = None,
        session: str = "",
    ) -> bytes | Refusal:
        """The reply's line, or the refusal."""
        if not key and not lease and timeout is None and ds_state is None:
            return self.plain(aid, text, session)
        return self._considered(aid, text, timeout, key, lease, ds_state, session)

    def plain(self, aid: str, text: str, session: str = "") -> bytes | Refusal:
        """The same for a call with nothing but its input; only event tools have a use for its session."""
        while (tool := self._plain.get(aid)) is not None:
            line = tool.head + encode(text) + b"}\n"
            if len(line) > self._most:
                break
            outcome: bytes | Refusal = tool.runtime.run_plain(tool, line, self)  # type: ignore[attr-defined]
            if outcome is not AGAIN:
                return outcome
        return self._considered(aid, text, None, "", "", None, session)

    def gone(self) -> bool:
        return self._closed

    def took(self, ticket: Ticket) -> None:
        """Plain calls are lent nothing."""

    def full(self, work: Work) -> bool:  # noqa: ARG002
        return False

    def behind(self) -> bool:
        return False

    def _considered(
        self, aid: str, text: str, timeout: float | None, key: str, lease: str, ds_state: Any, session: str
    ) -> bytes | Refusal:
        """A call that the policy has to look at."""
        if self._closed:
            return CLOSED
        self._here()
        registry = self.dispatcher.registry
        if registry.get(aid) is None:  # a plugin that has just been replaced may have it
            self._look_at_plugins()
        caller = _Caller(self)
        try:
            with self._lock:
                refusal = self.dispatcher.refusal()
                tool = registry.get(aid) or self._fall_back(aid)
                if refusal is None and tool is None:
                    refusal = Refusal(errors.NOT_FOUND, f"tool not found: {aid}")
                if refusal is None and tool is not None:
                    call = self._call(tool, text, timeout, key, lease, ds_state, session)
                    refusal = self._too_long(text) or self.dispatcher.admit(call, caller, caller, time.monotonic())
                self._run_deferred()
            return refusal if refusal is not None else self._see_through(caller)
        except BaseException:
            self._give_up(caller)
            raise

    def _too_long(self, text: str) -> Refusal | None:
        """As a line over a socket it would be; what it grows by as a string within a string does not count."""
        if len(text) * 4 > self._most and len(text.encode("utf-8", "surrogatepass")) > self._most:
            return self.dispatcher.too_large("the input")
        return None

    def _look_at_plugins(self) -> None:
        for runtime in self.runtimes:
            runtime.fleet.look_at_plugin()

    def _fall_back(self, aid: str) -> Tool | None:
        """A tool that no plugin has, where there is a command for such."""
        if self._fallback is None or not aid or "\0" in aid:
            return None
        registry = self.dispatcher.registry
        if len(self._fallen_back) >= MOST_FALLBACKS:
            registry.remove(self._fallen_back.popleft())
        one = self._fallback(aid)
        self._fallen_back.append(registry.add(describe(one), OneShot(one, self._shared, self._outgrown)))
        return self._fallen_back[-1]

    def _outgrown(self, tool: Tool) -> bool:
        """A plugin that has been replaced has the tool now."""
        self._look_at_plugins()
        return self.dispatcher.registry.get(tool.name) is not tool

    def _call(
        self, tool: Tool, text: str, timeout: float | None, key: str, lease: str, ds_state: Any, session: str
    ) -> Call:
        head = b'{"aid":' + encode(tool.name) + b',"input_json":' if ds_state is not None else tool.head
        asked = None if timeout is None else max(1, round(timeout * 1000))
        call = Call(tool, head + encode(text) + b"}\n", None, self.dispatcher.timeout(tool, asked))
        call.key = key
        call.lease = lease
        if ds_state is not None:
            call.ds_state = encode(ds_state)
        if ds_state is not None or tool.info.live:
            call.session = (self.principal, session)
        return call

    def _see_through(self, caller: _Caller) -> bytes | Refusal:
        """Until the call is answered: by this thread, or by another one that runs the same."""
        look = min(LOOK_SECONDS, self.settings.limits.queue_seconds / 4)
        while caller.answer is None:
            work = caller.work
            if work is None:
                caller.sleep(look)
                with self._lock:
                    self.dispatcher.expire(time.monotonic())
                    self._run_deferred()
                continue
            outcome = work.tool.runtime.run(work)  # type: ignore[attr-defined]
            with self._lock:
                caller.work = None
                self._settle(work, outcome)
                self._run_deferred()
        return caller.answer

    def _give_up(self, caller: _Caller) -> None:
        """A signal's handler has raised: what has not run is given back, or handed on to who waits for the same."""
        caller.leave()
        with self._lock:
            self.dispatcher.hung_up(caller)
            if caller.ticket is not None and not caller.ticket.since:
                caller.ticket.abandon(INTERRUPTED)
            self._run_deferred()

    def _settle(self, work: Work, outcome: bytes | Refusal) -> None:
        if outcome is AGAIN:  # the plugin has been replaced: its tool may be another one, or gone
            refusal = self.dispatcher.judge(work) or self.dispatcher.broken(work)
            if self.dispatcher.registry.get(work.tool.name) is not work.tool:
                refusal = Refusal(errors.NOT_FOUND, f"tool not found: {work.tool.name}")
            if refusal is None:
                work.tool.runtime.submit(work, time.monotonic())
                return
            outcome = refusal
        if isinstance(outcome, Refusal):
            work.sink.refuse(work, outcome)
        else:
            work.sink.deliver(work, outcome, 1)

    def _run_deferred(self) -> None:
        while self._deferred:
            function, argument = self._deferred.pop(0)
            function(argument)


def _settings(
    file: str | None, plugins: tuple[str, ...], binary: str | None, environ: Mapping[str, str], *, demo: bool
) -> Config:
    """broker.toml and the environment, as `broker serve` reads them."""
    loaded = config.load(file, {}, environ)
    toolhosts.add(loaded, list(plugins), binary, environ, demo=demo)
    return loaded.config


@atexit.register
def _close_all() -> None:
    for embedded in list(_alive):
        embedded.close()


def _after_fork() -> None:
    for embedded in list(_alive):
        embedded._forget()


os.register_at_fork(after_in_child=_after_fork)
