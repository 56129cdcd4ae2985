"""The only place where a call meets policy and a runtime. No I/O: it admits, hands over, and settles.

Gates, in this order: rights, caps, schema, idempotency, breaker, lease, queue. A call that passed any but the last
carries a ticket, which is its sink: it settles what the gates have lent, then passes the answer on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

import msgspec

from broker import errors
from broker.config import Config
from broker.errors import Refusal
from broker.model import HUNG_UP, Caller, Sink, Tool, Work
from broker.observe.audit import Audit
from broker.policy import sessions
from broker.policy.breaker import State
from broker.policy.idempotency import Cache, Entry, key_of
from broker.policy.leases import Lease, Leases
from broker.policy.sessions import BadState, Session, Sessions
from broker.registry import Registry

SPLICE_ROOM = 4096  # what we write into a line does not count against its cap; our toolhost leaves this much room


class Call(msgspec.Struct):
    """One call that is more than its lines: what the policy has to know of it."""

    tool: Tool
    lines: bytes  # the toolhost's line, without `ds_state` where the caller sent one
    ids: bytes | None
    timeout: float
    slot: object = None  # the sink's: its place in the order of replies
    key: str = ""
    lease: str = ""
    ds_state: bytes | None = None
    session: Hashable = None


class Follower(NamedTuple):
    """A duplicate of a call under way, that waits for its answer."""

    caller: Caller
    sink: Sink
    work: Work


class Dispatcher:
    def __init__(
        self,
        registry: Registry,
        settings: Config,
        audit: Audit,
        defer: Callable[[Callable[..., None], Session], object],
    ) -> None:
        self.registry = registry
        self.defer = defer  # calls a function soon, but not now
        self.limits = settings.limits
        self.enforce_leases = settings.lease.enforce
        self.audit = audit
        limits, kept = settings.limits, settings.idempotency
        self.sessions = Sessions(limits.sessions, limits.session_bytes, limits.session_idle_seconds)
        self.cache = Cache(kept.ttl_seconds, kept.entries, kept.bytes)
        self.leases = Leases()
        self.draining = False

    def timeout(self, tool: Tool, asked_ms: int | None) -> float:
        """The call's own, else the tool's; nobody may hold a toolhost for ever."""
        seconds = tool.timeout if asked_ms is None else asked_ms / 1000
        return min(seconds, self.limits.max_timeout_seconds)

    def refusal(self) -> Refusal | None:
        """Why nothing is admitted now."""
        if self.draining:
            return Refusal(errors.DRAINING, "the broker is shutting down; ask again when it is back", retry_after=1)
        return None

    def span(self, tool: Tool, lines: bytes, count: int, ids: bytes | None, caller: Caller, sink: Sink) -> Work:
        """A run of plain calls, admitted as one. The caller submits it to the tool's runtime."""
        return Work(tool, lines, count, ids, caller, sink, self.timeout(tool, None))

    # --- one call ---------------------------------------------------------------------------------------------------

    def admit(self, call: Call, caller: Caller, sink: Sink, now: float) -> Refusal | None:
        """Answers from the cache, or starts the call, now or in its turn; or says why not, and nothing has changed."""
        tool = call.tool
        if not caller.rights.allow(tool):
            return Refusal(errors.FORBIDDEN, f"{caller.principal} may not call {tool.name} (see [[principal]])")
        if len(call.lines) > self.limits.request_bytes + SPLICE_ROOM:
            return self.too_large("the call, written as a toolhost reads it,")
        state = None
        if call.ds_state is not None:
            try:
                state = sessions.read(call.ds_state)
            except BadState as error:
                return Refusal(errors.BAD_REQUEST, str(error))
        ticket = Ticket(self, call, caller, sink, state)
        if call.key:
            key = key_of(caller.principal, tool.name, call.key)
            entry = self.cache.find(key, now)
            if entry is not None:
                self._duplicate(entry, call, caller, sink)
                return None
            ticket.key = key
        refusal = self.asks_breaker(ticket, now) or self._lease(ticket, now)
        if refusal is None:
            refusal = ticket.begin(now)
        if refusal is not None:
            ticket.hand_back()
        return refusal

    def _duplicate(self, entry: Entry, call: Call, caller: Caller, sink: Sink) -> None:
        """One execution, N replies: this one waits for the first, or repeats it."""
        self.cache.hits += 1
        work = Work(call.tool, b"", 1, call.ids, caller, sink, 0.0)
        work.slot = call.slot
        if entry.until:
            sink.deliver(work, entry.hit(call.ids), 1)
        else:
            entry.waiting.append(Follower(caller, sink, work))

    def asks_breaker(self, ticket: Ticket, now: float) -> Refusal | None:
        """At the gate, and again when it has waited for its session."""
        tool = ticket.call.tool
        if tool.breaker.state is State.CLOSED or ticket.probe:
            return None
        if tool.breaker.may_probe(now):
            ticket.probe = True
            return None
        return self.breaker_open(tool, now)

    def breaker_open(self, tool: Tool, now: float) -> Refusal:
        wait = tool.breaker.wait(now)
        return Refusal(
            errors.BREAKER_OPEN,
            f"{tool.name} has failed too often, last: {tool.breaker.last_reason}",
            retry_after=max(1, round(wait)),
            next_probe_ms=round(wait * 1000),
        )

    def _lease(self, ticket: Ticket, now: float) -> Refusal | None:
        call = ticket.call
        tool = call.tool
        if not self.enforce_leases or not tool.tier:
            return None
        if not call.lease:
            return Refusal(errors.LEASE_REQUIRED, "lease_required", tier=tool.tier)
        lease = self.leases.reserve(call.lease, tool.name, tool.tier, now)
        if isinstance(lease, str):
            self.audit.write("lease_rejected", ticket.caller.principal, tool.name, tool.tier, call.lease, reason=lease)
            return Refusal(errors.LEASE_REJECTED, "lease_rejected", reason=lease)
        ticket.lease = lease
        return None

    def too_large(self, what: str) -> Refusal:
        return Refusal(errors.TOO_LARGE, f"{what} is over {self.limits.request_bytes} bytes (limits.request_bytes)")

    # --- what happens elsewhere -------------------------------------------------------------------------------------

    def tripped(self, tool: Tool) -> None:
        """A breaker has opened: whatever waits for the tool is answered at once."""
        self.registry.gate(tool)
        tool.runtime.refuse_tool(tool.index, self.breaker_open(tool, time.monotonic()))

    def reset_breaker(self, tool: Tool) -> None:
        tool.breaker.reset()
        self.registry.gate(tool)

    def next_in(self, session: Session) -> None:
        """A session is free: its next call begins. From the loop, never from within another call's end."""
        if session.waiting and not session.busy:
            session.waiting.popleft().in_turn(time.monotonic())
            if session.waiting and not session.busy:
                self.defer(self.next_in, session)

    def refuse_waiting(self) -> None:
        """The broker stops: what waits for its session is refused, as `refusal` says."""
        now = time.monotonic()
        for session in self.sessions:
            while session.waiting:
                session.waiting.popleft().in_turn(now)

    def hung_up(self, key: Hashable) -> None:
        """A connection's own state goes with it."""
        self.sessions.drop(key)

    def expire(self, now: float) -> None:
        for session in self.sessions:
            while session.waiting and session.waiting[0].since < now - self.limits.queue_seconds:
                ticket = session.waiting.popleft()
                text = f"{ticket.call.tool.name} waited {self.limits.queue_seconds:g} s for its session"
                ticket.give_up(Refusal(errors.OVERLOADED, f"{text} (limits.queue_seconds)", retry_after=1))
        self.sessions.expire(now)
        self.cache.expire(now)


class Ticket:
    """What the gates lent to one call: a key, the probe of a breaker, a lease, a session. Each is settled once."""

    __slots__ = (
        "_dispatcher",
        "_session",
        "_sink",
        "_slots",
        "_state",
        "_waits_for",
        "call",
        "caller",
        "entry",
        "key",
        "lease",
        "probe",
        "since",
    )

    def __init__(
        self, dispatcher: Dispatcher, call: Call, caller: Caller, sink: Sink, state: sessions.State | None
    ) -> None:
        self._dispatcher = dispatcher
        self._sink = sink
        self._state = state
        self._session: Session | None = None
        self._waits_for: Session | None = None
        self.since = 0.0  # it has been waiting for its session
        self._slots: sessions.Slots = {}
        self.call = call
        self.caller = caller
        self.key: Hashable = None
        self.entry: Entry | None = None
        self.lease: Lease | None = None
        self.probe = False

    # --- start ------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> Refusal | None:
        """All gates are passed: to the queue, or first to its session's."""
        if self.key is not None:
            self.entry = self._dispatcher.cache.begin(self.key)
        if self._state is None:
            self._submit(self.call.lines, now)
            return None
        session = self._dispatcher.sessions.get(self.call.session, now)
        if session.busy or session.waiting:
            self._waits_for = session
            self.since = now
            session.waiting.append(self)
            return None
        return self._with(session, now)

    def _with(self, session: Session, now: float) -> Refusal | None:
        assert self._state is not None
        self._slots = sessions.applied(session.slots, self._state)
        lines = b"{" + sessions.written(self._slots) + b"," + self.call.lines[1:]
        if len(lines) > self._dispatcher.limits.request_bytes + SPLICE_ROOM:
            return self._dispatcher.too_large("the call with its session's state")
        session.busy = True
        self._session = session
        self._submit(lines, now)
        return None

    def in_turn(self, now: float) -> None:
        """The session is free for this call."""
        assert self._waits_for is not None
        session, self._waits_for = self._waits_for, None
        refusal = self._dispatcher.refusal() or self._dispatcher.asks_breaker(self, now)
        if refusal is None:
            refusal = HUNG_UP if self.caller.gone() and not self._awaited() else self._with(session, now)
        if refusal is not None:
            self.refuse(self._work(b""), refusal)

    def give_up(self, refusal: Refusal) -> None:
        """It has waited for its session for too long."""
        self._waits_for = None
        self.refuse(self._work(b""), refusal)

    def _awaited(self) -> bool:
        return self.entry is not None and bool(self.entry.waiting)

    def _work(self, lines: bytes) -> Work:
        lent = self.entry is not None or self.probe or self.lease is not None or self._session is not None
        sink = self if lent else self._sink
        work = Work(self.call.tool, lines, 1, self.call.ids, self.caller, sink, self.call.timeout)
        work.slot = self.call.slot
        return work

    def _submit(self, lines: bytes, now: float) -> None:
        self.call.tool.runtime.submit(self._work(lines), now)

    # --- end --------------------------------------------------------------------------------------------------------

    def deliver(self, work: Work, lines: bytes, count: int) -> None:
        now = time.monotonic()
        if self._session is not None:
            self._leave(sessions.after_reply(self._slots, lines), now)
        if self.probe:
            tool = self.call.tool
            if tool.counts_errors and _is_error(lines):
                tool.breaker.probe_failed("the tool's own error", now)
            else:
                tool.breaker.probe_passed()
            self._dispatcher.registry.gate(tool)
        self._spend()
        if self.entry is not None:
            self._tell(self._dispatcher.cache.finish(self.entry, lines, now), self.entry, None)
        self._sink.deliver(work, lines, count)

    def refuse(self, work: Work, refusal: Refusal) -> None:
        """A call that may have run keeps its key, its lease and its state; one that has not gives them back."""
        now = time.monotonic()
        if refusal is HUNG_UP and self._awaited():
            self._hand_on(work, now)
            return
        if self._session is not None:
            self._leave(self._slots if refusal.ran else None, now)
        if refusal.ran:
            if self.probe:
                self.call.tool.breaker.probe_failed(refusal.text, now)
            self._spend()
            if self.entry is not None:
                line = refusal.line(self.call.tool.name)
                self._tell(self._dispatcher.cache.finish(self.entry, line, now), self.entry, None)
        else:
            self.hand_back(refusal)
        self._sink.refuse(work, refusal)

    def hand_back(self, refusal: Refusal | None = None) -> None:
        """The call has not run and will not."""
        if self.probe:
            self.call.tool.breaker.probe_lost()
        if self.lease is not None:
            self._dispatcher.leases.give_back(self.lease)
        if self.entry is not None:
            waiting = self._dispatcher.cache.free(self.entry)
            if refusal is not None:
                self._tell(waiting, self.entry, refusal)

    def _hand_on(self, work: Work, now: float) -> None:
        """The first caller has hung up before its call ran; the next one that asked for the same takes its place."""
        assert self.entry is not None
        follower = self.entry.waiting.pop(0)
        self.caller, self._sink = follower.caller, follower.sink
        work.caller, work.ids, work.slot = follower.caller, follower.work.ids, follower.work.slot
        self.call.ids, self.call.slot = work.ids, work.slot
        work.queued = 0.0
        work.tool.runtime.submit(work, now)

    def _tell(self, waiting: list[Follower], entry: Entry, refusal: Refusal | None) -> None:
        """Everybody who asked for the same gets the same."""
        for follower in waiting:
            if refusal is None:
                follower.sink.deliver(follower.work, entry.hit(follower.work.ids), 1)
            else:
                follower.sink.refuse(follower.work, refusal)

    def _spend(self) -> None:
        if self.lease is not None:
            tool = self.call.tool
            self._dispatcher.leases.use(self.lease)
            self._dispatcher.audit.write("lease_used", self.caller.principal, tool.name, tool.tier, self.lease.token)

    def _leave(self, slots: sessions.Slots | None, now: float) -> None:
        """The session is free for the next call."""
        session, self._session = self._session, None
        assert session is not None
        if slots is not None:
            self._dispatcher.sessions.keep(session, slots, now)
        session.busy = False
        if session.waiting:
            self._dispatcher.defer(self._dispatcher.next_in, session)


class _Outcome(msgspec.Struct):
    ok: bool = False
    status: str | None = None


def _is_error(line: bytes) -> bool:
    """A tool's own: `status` is read first, `ok` where it is missing."""
    try:
        outcome = msgspec.json.decode(line, type=_Outcome)
    except msgspec.ValidationError:
        return True
    return not outcome.ok if outcome.status is None else outcome.status != "OK"
