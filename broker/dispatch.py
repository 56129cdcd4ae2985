"""The only place where a call meets policy and a runtime. No I/O: it admits, hands over, and settles."""

from __future__ import annotations

import time
from collections.abc import Hashable

import msgspec

from broker import errors
from broker.config import Limits
from broker.errors import Fault, Refusal
from broker.model import Caller, Sink, Tool, Work
from broker.policy import sessions
from broker.policy.sessions import BadState, Session, Sessions
from broker.registry import Registry

SPLICE_ROOM = 4096  # what we write into a line does not count against its cap; our toolhost leaves this much room


class Call(msgspec.Struct):
    """One call that is more than its lines: what the policy has to know of it."""

    tool: Tool
    lines: bytes  # the toolhost's line, without `ds_state` where the caller sent one
    ids: bytes | None
    timeout: float
    ds_state: bytes | None = None
    session: Hashable = None


class Dispatcher:
    def __init__(self, registry: Registry, limits: Limits) -> None:
        self.registry = registry
        self.limits = limits
        self.sessions = Sessions(limits.sessions, limits.session_bytes, limits.session_idle_seconds)
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

    def admit(self, call: Call, caller: Caller, sink: Sink, slot: object, now: float) -> Refusal | None:
        """Starts one call, now or when its session's turn comes; or says why not, and nothing has changed."""
        if len(call.lines) > self.limits.request_bytes + SPLICE_ROOM:
            return self.too_large("the call, written as a toolhost reads it,")
        if call.ds_state is None:
            work = Work(call.tool, call.lines, 1, call.ids, caller, sink, call.timeout)
            work.slot = slot
            call.tool.runtime.submit(work, now)
            return None
        try:
            state = sessions.read(call.ds_state)
        except BadState as error:
            return Refusal(errors.BAD_REQUEST, str(error))
        session = self.sessions.get(call.session, now)
        ticket = StateTicket(self, session, call, caller, sink, slot, state)
        if session.busy or session.waiting:
            session.waiting.append(ticket.start)
            return None
        return ticket.begin(now)

    def too_large(self, what: str) -> Refusal:
        return Refusal(errors.TOO_LARGE, f"{what} is over {self.limits.request_bytes} bytes (limits.request_bytes)")

    def hung_up(self, key: Hashable) -> None:
        """A connection's own state goes with it."""
        self.sessions.drop(key)


class StateTicket:
    """A call that uses its session's state: it has the session to itself until it is answered."""

    __slots__ = ("_call", "_caller", "_dispatcher", "_session", "_sink", "_slot", "_slots", "_state")

    def __init__(
        self,
        dispatcher: Dispatcher,
        session: Session,
        call: Call,
        caller: Caller,
        sink: Sink,
        slot: object,
        state: sessions.State,
    ) -> None:
        self._dispatcher = dispatcher
        self._session = session
        self._call = call
        self._caller = caller
        self._sink = sink
        self._slot = slot
        self._state = state
        self._slots: sessions.Slots = {}

    def begin(self, now: float) -> Refusal | None:
        call = self._call
        self._slots = sessions.applied(self._session.slots, self._state)
        lines = b"{" + sessions.written(self._slots) + b"," + call.lines[1:]
        if len(lines) > self._dispatcher.limits.request_bytes + SPLICE_ROOM:
            return self._dispatcher.too_large("the call with its session's state")
        self._session.busy = True
        work = Work(call.tool, lines, 1, call.ids, self._caller, self, call.timeout)
        work.slot = self._slot
        call.tool.runtime.submit(work, now)
        return None

    def start(self, now: float) -> None:
        """Its turn has come."""
        if self._caller.gone():
            return
        refusal = self.begin(now)
        if refusal is not None:
            work = Work(self._call.tool, b"", 1, self._call.ids, self._caller, self._sink, 0.0)
            work.slot = self._slot
            self._sink.refuse(work, refusal)

    def deliver(self, work: Work, lines: bytes, count: int) -> None:
        self._end(sessions.after_reply(self._slots, lines))
        self._sink.deliver(work, lines, count)

    def refuse(self, work: Work, refusal: Refusal) -> None:
        """A call that may have run keeps what its caller sent; one that has not changes nothing."""
        self._end(self._slots if refusal.kind.fault is Fault.TOOL else None)
        self._sink.refuse(work, refusal)

    def _end(self, slots: sessions.Slots | None) -> None:
        now = time.monotonic()
        session = self._session
        if slots is not None:
            self._dispatcher.sessions.keep(session, slots, now)
        session.busy = False
        while session.waiting and not session.busy:
            session.waiting.popleft()(now)
