"""A call on its way: what the gates have lent to it, settled once, whatever answer comes from wherever.

A refusal knows whether the call may have run, and that alone decides: keep, or give back.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from broker.errors import Refusal
from broker.model import HUNG_UP, Caller, Place, Sink, Tool, Work
from broker.policy import sessions
from broker.policy.breaker import Breaker
from broker.policy.idempotency import Entry, new_entry
from broker.policy.leases import Lease
from broker.policy.sessions import Session, Sessions, WaitingRoom

if TYPE_CHECKING:
    from broker.cluster.keys import Claim
    from broker.dispatch import Dispatcher

OWN_ERROR = "the tool's own error"


class Mark(Protocol):
    """A place that outlives the broker, where it is written that a call has begun."""

    problem: Refusal | None  # why it may not begin

    @property
    def started(self) -> bool: ...

    def may_start(self) -> bool:
        """It is written. If not, that is begun, and the runtime is pumped then."""


class Call(msgspec.Struct):
    """One call that is more than its lines: what the policy has to know of it."""

    tool: Tool
    lines: bytes  # the toolhost's line, without `ds_state` where the caller sent one
    ids: bytes | None
    timeout: float
    at: int = -1  # its place in the order of replies; negative: it may overtake
    key: str = ""
    lease: str = ""
    proof: str = ""  # whoever took the lease has sent the call here
    ds_state: bytes | None = None
    session: Hashable = None
    stream: bool = False  # the caller wants to hear of it while it runs
    request: str = ""  # the caller's own name for it
    job: Place | None = None  # where files of its may be put
    options: dict[str, Any] | None = None  # of the tool, for this call
    secret: bool = False  # there are values of variables in it, that its answer must not show
    mark: Mark | None = None  # where it is written that it has begun

    def input_json(self) -> str:
        """What the tool is given."""
        return msgspec.json.decode(self.lines, type=_Line).input_json

    def say(self, input_json: str) -> None:
        """The tool is given something else."""
        members: dict[str, Any] = msgspec.json.decode(self.lines, type=dict[str, msgspec.Raw])
        self.lines = msgspec.json.encode(members | {"input_json": input_json}) + b"\n"


class _Line(msgspec.Struct):
    input_json: str = "{}"


class Follower(NamedTuple):
    """A duplicate of a call under way, that waits for its answer."""

    caller: Caller
    sink: Sink
    work: Work


class Ticket:
    """A key, the probe of a breaker, a lease, a session: each is settled once."""

    __slots__ = (
        "_dispatcher",
        "_outcome",
        "_probe",
        "_session",
        "_sink",
        "_slots",
        "_state",
        "call",
        "caller",
        "claim",
        "done",
        "entry",
        "handed",
        "key",
        "lease",
        "room",
        "since",
        "weight",
    )

    def __init__(
        self, dispatcher: Dispatcher, call: Call, caller: Caller, sink: Sink, state: sessions.State | None
    ) -> None:
        self._dispatcher = dispatcher
        self._sink = sink
        self._state = state
        self._session: Session | None = None
        self._slots: sessions.Slots = {}
        self._probe: tuple[Breaker, int] | None = None
        self._outcome: bytes | Refusal | None = None  # what it is being settled with
        self.done = False  # it is settled
        self.call = call
        self.caller = caller
        self.key: bytes | None = None
        self.entry: Entry | None = None
        self.lease: Lease | None = None
        self.claim: Claim | None = None  # on its key, in the cluster
        self.handed = False  # a toolhost has been given the call
        self.room: WaitingRoom | None = None  # where it waits, before its turn comes,
        self.since = 0.0  # since when,
        self.weight = 0  # and the bytes that it holds meanwhile

    # --- start ------------------------------------------------------------------------------------------------------

    def probes(self, breaker: Breaker) -> bool:
        return self._probe is not None and self._probe[0] is breaker

    def take_probe(self, breaker: Breaker, now: float) -> bool:
        """It is the one call that finds out whether the tool is well again."""
        number = breaker.may_probe(now)
        if number:
            self._probe = (breaker, number)
        return number > 0

    def begin(self, now: float) -> Refusal | None:
        """All gates are passed."""
        self.hold_key()
        return self.proceed(now)

    def hold_key(self) -> None:
        """Whoever asks for the same from now on waits for this call."""
        if self.key is not None:
            self.entry = new_entry(self.key)
            self._dispatcher.cache.begin(self.entry)

    def proceed(self, now: float) -> Refusal | None:
        """To the queue, or first to its session's."""
        if self._state is None:
            self._submit(self.call.lines, now)
            return None
        session = self._dispatcher.sessions.get(self.call.session, now)
        if session.busy or session.waiting:
            self.wait_in(self._dispatcher.waiting, session, now)
            return None
        return self.enter(session, now)

    def wait_in(self, room: WaitingRoom, row: Session, now: float) -> None:
        self.room, self.since = room, now
        self.weight = sum(map(len, (self.call.lines, self.call.ids or b"", self.call.ds_state or b"")))
        room.enter(self, row)

    def go_on(self) -> None:
        """It has waited for long enough."""
        self.room = None
        self.since = 0.0

    def enter(self, session: Session, now: float) -> Refusal | None:
        """The session is this call's until it ends."""
        assert self._state is not None
        self._slots = sessions.applied(session.slots, self._state)
        lines = b"{" + sessions.written(self._slots) + b"," + self.call.lines[1:]
        if self._dispatcher.is_too_large(lines):
            return self._dispatcher.too_large("the call with its session's state")
        self._session = session
        session.holder = self
        self._submit(lines, now)
        return None

    def give_up(self, refusal: Refusal) -> None:
        """It has waited for its session, and will not run."""
        self.refuse(self._work(b""), refusal)

    def _work(self, lines: bytes) -> Work:
        """A ticket that holds nothing, and might not have to ask for anything, stays out of the way."""
        lent = self.entry or self._probe or self.call.lease or self._session or self.call.mark or self.call.secret
        call, sink = self.call, self if lent else self._sink
        work = Work(call.tool, lines, 1, call.ids, self.caller, sink, call.timeout)
        work.ticket = self if lent else None
        work.moved = self.weight > 0  # it has waited
        work.at = self.call.at
        work.job, work.options = call.job, call.options
        if call.tool.info.live:
            work.live = LiveCall(call, self._dispatcher.sessions, self._dispatcher.limits.state_bytes)
        return work

    def _submit(self, lines: bytes, now: float) -> None:
        self.call.tool.runtime.submit(self._work(lines), now)

    # --- on the way -------------------------------------------------------------------------------------------------

    @property
    def once(self) -> bool:
        """A key promises at most one execution, and a lease permits one."""
        return self.entry is not None or self.lease is not None

    @property
    def settled(self) -> bool:
        """In a cluster, the others know that it may run from now on."""
        mark = self.call.mark
        return (self.claim is None or self.claim.started) and (mark is None or mark.started)

    def ready(self) -> bool:
        mark = self.call.mark
        return (self.claim is None or self.claim.may_start()) and (mark is None or mark.may_start())

    @property
    def problem(self) -> Refusal | None:
        """Why it may not run after all."""
        for promise in (self.claim, self.call.mark):
            if promise is not None and promise.problem is not None:
                return promise.problem
        return None

    @property
    def urgent(self) -> bool:
        """Others wait for its outcome: a caller that does not read its replies must not hold them."""
        if self._probe is not None:
            return True
        return self.entry is not None and any(one.caller is not self.caller for one in self.entry.waiting)

    def handed_over(self) -> None:
        """A toolhost is given the call: its lease is spent, and that is written down before anything can happen."""
        self.handed = True
        if self.lease is not None and not self.lease.used:
            self._dispatcher.leases.use(self.lease)
            self._note("lease_used", self.lease)

    def _note(self, event: str, lease: Lease) -> None:
        tool = self.call.tool
        self._dispatcher.audit.write(event, self.caller.principal, tool.name, tool.tier, lease.fingerprint)

    # --- end --------------------------------------------------------------------------------------------------------

    # Each of these can be done again from its beginning: where a signal's handler raises in the middle, `abandon` does.

    def deliver(self, work: Work, lines: bytes, count: int) -> None:
        now = time.monotonic()
        if self.call.secret:
            lines = self._dispatcher.secrets.line(lines)
        self._outcome = lines
        if self._session is not None:
            self._leave(sessions.after_reply(self._slots, lines), now)
        if self._probe is not None:
            breaker, number = self._probe
            if work.tool.counts_errors and is_error(lines):
                breaker.probe_failed(number, OWN_ERROR, now)
            else:
                breaker.probe_passed(number)
            self._dispatcher.registry.gate(work.tool)
        if self.entry is not None:
            self._finish(self.entry, lines, now)
        self._sink.deliver(work, lines, count)
        self.done = True

    def tell(self, work: Work, members: bytes) -> None:
        if self.call.secret:
            members = self._dispatcher.secrets.line(b"{%b}" % members).rstrip()[1:-1]
        self._sink.tell(work, members)

    def repeat(self, work: Work, entry: Entry) -> None:
        """A duplicate has no ticket of its own."""
        self.deliver(work, entry.hit(work.ids), 1)

    def refuse(self, work: Work, refusal: Refusal) -> None:
        """A call that may have run keeps its key, its lease and its state; one that has not gives them back."""
        now = time.monotonic()
        if refusal is HUNG_UP and self.hand_on():
            work.caller, work.ids, work.at = self.caller, self.call.ids, self.call.at
            work.queued = 0.0
            work.moved = True
            work.tool.runtime.submit(work, now)
            return
        if self.call.secret:
            refusal = self._dispatcher.secrets.refusal(refusal)
        self._outcome = refusal
        if self._session is not None:
            self._leave(self._slots if refusal.ran else None, now)
        if refusal.ran:
            if self._probe is not None:
                breaker, number = self._probe
                breaker.probe_failed(number, refusal.text, now)
            if self.entry is not None:
                self._finish(self.entry, refusal.line(self.call.tool.name), now)
        else:
            self.hand_back(refusal)
        self._sink.refuse(work, refusal)
        self.done = True

    def abandon(self, interrupted: Refusal) -> None:
        """Its caller was interrupted. If the call was being settled just then, that is ended; else it is given up."""
        if self.done:
            return
        work = self._work(b"")
        if isinstance(self._outcome, bytes):
            self.deliver(work, self._outcome, 1)
        else:
            self.refuse(work, self._outcome or (interrupted if self.handed else HUNG_UP))

    def hand_back(self, refusal: Refusal | None = None) -> None:
        """The call has not run and will not."""
        if self._probe is not None:
            breaker, number = self._probe
            breaker.probe_lost(number)
        if self.lease is not None:
            if self.lease.used:
                self._note("lease_returned", self.lease)
            self._dispatcher.give_back(self.lease)
        if self.claim is not None and self._dispatcher.gate is not None:
            claim, self.claim = self.claim, None
            self._dispatcher.gate.free(claim)
        if self.entry is not None:
            self._dispatcher.cache.free(self.entry)
            if refusal is not None:
                self._tell(self.entry, refusal)

    def hand_on(self) -> bool:
        """The caller has hung up before its call ran: the next one that asked for the same, if any, takes its place."""
        waiting = self.entry.waiting if self.entry is not None else []
        while waiting:
            follower = waiting.pop(0)
            if follower.caller.gone():
                continue
            room = self.room
            row = room.step_out(self) if room is not None else None
            self.caller, self._sink = follower.caller, follower.sink
            self.call.ids, self.call.at = follower.work.ids, follower.work.at
            if room is not None and row is not None:
                self.since = time.monotonic()
                room.step_in(self, row)
            return True
        return False

    def _finish(self, entry: Entry, line: bytes, now: float) -> None:
        self._dispatcher.cache.finish(entry, line, now)
        if self.claim is not None and self._dispatcher.gate is not None:
            claim, self.claim = self.claim, None
            self._dispatcher.gate.finish(claim, entry.hit(None))
        self._tell(entry, None)

    def known(self, line: bytes) -> None:
        """Another broker has the answer: for this caller, and all who wait, it is a hit. It is kept there."""
        entry, cache = self.entry, self._dispatcher.cache
        assert entry is not None
        cache.finish(entry, line, time.monotonic())
        cache.hits += 1
        self._sink.repeat(self._work(b""), entry)
        self._tell(entry, None)
        cache.free(entry)
        self.done = True

    def _tell(self, entry: Entry, refusal: Refusal | None) -> None:
        """Everybody who asked for the same gets the same."""
        while entry.waiting:
            follower = entry.waiting[0]
            if refusal is None:
                follower.sink.repeat(follower.work, entry)
            else:
                follower.sink.refuse(follower.work, refusal)
            entry.waiting.pop(0)

    def _leave(self, slots: sessions.Slots | None, now: float) -> None:
        """The session is free for the next call."""
        session = self._session
        assert session is not None
        if session.holder is self:
            if slots is not None:
                self._dispatcher.sessions.keep(session, slots, now)
            session.holder = None
        if session.waiting:
            self._dispatcher.defer(self._dispatcher.next_in, session)
        self._session = None


class LiveCall:
    """A call of a tool that tells of itself while it runs: its part of the session."""

    __slots__ = ("_call", "_most", "_session", "_sessions")

    def __init__(self, call: Call, sessions: Sessions, most: int) -> None:
        self._call = call
        self._sessions = sessions
        self._most = most
        self._session = Session()  # of nobody else, where it has none

    @property
    def stream(self) -> bool:
        return self._call.stream

    @property
    def request(self) -> str:
        return self._call.request

    def begin(self) -> None:
        if self._call.session is not None:
            self._session = self._sessions.get(self._call.session, time.monotonic())
        self._session.users += 1

    def patch(self, patch: bytes) -> str:
        return self._sessions.patch(self._session, patch, self._most, time.monotonic())

    def state(self) -> bytes:
        return self._session.text

    def end(self) -> None:
        self._session.users -= 1


class Convoy:
    """The ticket of a run of calls with keys: as long as all goes well the board settles them, and Python sees only the
    run. Where something happens to a call, it gets a ticket of its own."""

    __slots__ = ("_dispatcher", "_sink")

    once = True
    handed = False
    settled = True  # there is no cluster where the board looks keys up

    def ready(self) -> bool:
        return True

    def __init__(self, dispatcher: Dispatcher, sink: Sink) -> None:
        self._dispatcher = dispatcher
        self._sink = sink

    def handed_over(self) -> None:
        """Nothing is lent that would be spent by it."""

    def deliver(self, work: Work, lines: bytes, count: int) -> None:  # noqa: ARG002
        """Of a call that had its toolhost to itself."""
        self._alone(work).deliver(work, lines, 1)

    def tell(self, work: Work, members: bytes) -> None:
        """The board has no such tools."""

    def repeat(self, work: Work, entry: Entry) -> None:
        """These calls are the first of their keys."""

    def refuse(self, work: Work, refusal: Refusal) -> None:
        for _ in range(work.count):
            one = work.take(1) if work.count > 1 else work
            self._alone(one).refuse(one, refusal)

    def _alone(self, work: Work) -> Ticket:
        assert work.entries is not None
        call = Call(work.tool, work.lines, work.ids, work.timeout, work.at)
        ticket = Ticket(self._dispatcher, call, work.caller, self._sink, None)
        ticket.entry = self._dispatcher.cache.adopt(work.entries[0])
        work.entries = None
        work.ticket = work.sink = ticket
        return ticket


class _Outcome(msgspec.Struct):
    ok: bool = False
    status: str | None = None


def is_error(line: bytes) -> bool:
    """A tool's own: `status` is read first, `ok` where it is missing."""
    try:
        outcome = msgspec.json.decode(line, type=_Outcome)
    except msgspec.ValidationError:
        return True
    return not outcome.ok if outcome.status is None else outcome.status != "OK"
