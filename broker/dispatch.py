"""The only place where a call meets policy and a runtime. No I/O: it admits, hands over, and settles.

Gates, in this order: rights, caps, schema, idempotency, breaker, lease, queue. A call that passed any but the last
carries a ticket, which is its sink: it settles what the gates have lent, then passes the answer on. What waits is asked
again when its tool, its caller's rights or its lease have changed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from broker import errors
from broker.errors import Kind, Refusal
from broker.model import HUNG_UP, Caller, Named, Sink, Tool, Work
from broker.observe.audit import Audit
from broker.observe.recent import Recent
from broker.policy import sessions
from broker.policy.breaker import State
from broker.policy.idempotency import Cache, Entry, key_of
from broker.policy.leases import Lease, Leases, fingerprint
from broker.policy.schema import Schema
from broker.policy.sessions import BadState, Session, Sessions, WaitingRoom
from broker.pool.verdicts import unquoted
from broker.registry import Registry
from broker.secrets import Secrets
from broker.settings import Config
from broker.ticket import OWN_ERROR, Call, Convoy, Follower, Ticket
from broker.utp import args

if TYPE_CHECKING:
    from broker.cluster.gate import Gate

SPLICE_ROOM = 4096  # what we write into a line; our toolhost leaves this much room
PROBE_SECONDS = 1.0  # what those who come while a probe is on its way are told to wait


class Dispatcher:
    def __init__(
        self,
        registry: Registry,
        settings: Config,
        audit: Audit,
        defer: Callable[[Callable[..., None], Session], object],
        secrets: Secrets,
    ) -> None:
        self.registry = registry
        self.defer = defer  # calls a function soon, but not now
        self.limits = settings.limits
        self.enforce_leases = settings.lease.enforce
        self.audit = audit
        self.secrets = secrets
        limits, kept = settings.limits, settings.idempotency
        self.sessions = Sessions(limits.sessions, limits.session_bytes, limits.session_idle_seconds)
        self.waiting = WaitingRoom(limits.queue_seconds, "its session (limits.queue_seconds)")
        self.rooms = [self.waiting]  # all of those where calls wait before they come to a queue
        self.gate: Gate | None = None  # what the brokers of a cluster decide together
        self.cache = Cache(kept.ttl_seconds, kept.entries, kept.bytes)
        self.leases = Leases()
        self.draining = False
        self.recent = Recent()
        self.refused: Counter[str] = Counter()  # calls that were not run, or not to their end, by code

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
        refusal = self.rights(call.tool, caller)
        if refusal is not None:
            return refusal
        if self.is_too_large(call.lines):
            return self.too_large("the call, written as a toolhost reads it,")
        if call.tool.options is not None:
            refusal = self._complete(call, call.tool.options)
        elif call.tool.schema is not None:
            refusal = self._unfit(call.tool.schema, call.input_json())
        if refusal is not None:
            return refusal
        state = None
        if call.ds_state is not None:
            try:
                state = sessions.read(call.ds_state)
            except BadState as error:
                return Refusal(errors.BAD_REQUEST, str(error))
        ticket = Ticket(self, call, caller, sink, state)
        caller.took(ticket)
        if call.key:
            key = key_of(caller.principal, call.tool.name, call.key)
            entry = self.cache.find(key, now)
            if entry is not None:
                ticket.done = True  # it has, and needs, nothing
                self._duplicate(entry, call, caller, sink)
                return None
            ticket.key = key
        try:
            if self.gate is not None and self.gate.concerns(ticket):
                ticket.hold_key()
                self.gate.enter(ticket, now)
                return None
            refusal = self.breaker(ticket, now) or self._lease(ticket, caller, call.tool, now)
            if refusal is None:
                refusal = ticket.begin(now)
        except BaseException:
            ticket.hand_back()
            raise
        if refusal is not None:
            ticket.hand_back()
        return refusal

    def _unfit(self, schema: Schema, given: str) -> Refusal | None:
        problem = schema.problem(given, self.secrets.hidden.text)
        return Refusal(errors.BAD_REQUEST, problem) if problem else None

    def _complete(self, call: Call, options: dict[str, Any]) -> Refusal | None:
        """The tool is given what its options say beside what the caller says, which alone has to fit the schema."""
        tool, rules = call.tool, args.read(options)
        try:
            given = msgspec.json.decode(call.input_json(), type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError) as error:
            return Refusal(errors.BAD_REQUEST, f"the input of {tool.name} has to be an object, it has options: {error}")
        arguments = rules.defaults | {name: value for name, value in given.items() if name not in rules.hidden}
        if tool.schema is not None:
            refusal = self._unfit(tool.schema, _text(arguments))
            if refusal is not None:
                return refusal
        try:
            complete = args.with_values(arguments | rules.fixed, rules.envs, self.secrets)
        except args.NoValue as error:
            return Refusal(errors.UNAVAILABLE, f"{tool.name}: {error}")
        call.say(_text(complete))
        call.options = call.options or options
        call.secret = call.secret or bool(rules.envs)
        return self.too_large("the call, with what its tool's options add,") if self.is_too_large(call.lines) else None

    def urgent(self, work: Work) -> bool:
        """Others wait for its outcome: a caller that does not read its replies must not hold it."""
        if work.entries is not None:
            return any(self.cache.waits(entry, work.caller) for entry in work.entries)
        return isinstance(work.ticket, Ticket) and work.ticket.urgent

    def keyed(self, work: Work) -> None:
        """A run of calls with keys that the board has looked up: they are the first."""
        work.ticket = work.sink = Convoy(self, work.sink)

    def kept(self, name: int) -> None:
        """The board has brought an answer that others wait for."""
        entry = self.cache.kept(name)
        if entry is not None:
            waiting, entry.waiting = entry.waiting, []
            for follower in waiting:
                follower.sink.repeat(follower.work, entry)

    def rights(self, tool: Tool, caller: Named) -> Refusal | None:
        if caller.rights.allow(tool):
            return None
        return Refusal(errors.FORBIDDEN, f"{caller.principal} may not call {tool.name} (see [[principal]])")

    def _duplicate(self, entry: Entry, call: Call, caller: Caller, sink: Sink) -> None:
        """One execution, N replies: this one waits for the first, or repeats it."""
        self.cache.hits += 1
        work = Work(call.tool, b"", 1, call.ids, caller, sink, 0.0)
        work.at = call.at
        if entry.until:
            sink.repeat(work, entry)
        else:
            entry.waiting.append(Follower(caller, sink, work))

    def breaker(self, ticket: Ticket, now: float) -> Refusal | None:
        """At the gate, and again when it has waited."""
        tool = ticket.call.tool
        if tool.breaker.state is State.CLOSED or ticket.probes(tool.breaker):
            return None
        if ticket.take_probe(tool.breaker, now):
            return None
        return self._breaker_open(tool, now)

    def _breaker_open(self, tool: Tool, now: float) -> Refusal:
        wait = tool.breaker.wait(now) or PROBE_SECONDS
        return Refusal(
            errors.BREAKER_OPEN,
            f"{tool.name} has failed too often, last: {tool.breaker.last_reason}",
            retry_after=max(1, round(wait)),
            next_probe_ms=round(wait * 1000),
        )

    def _lease(self, ticket: Ticket | None, caller: Caller, tool: Tool, now: float) -> Refusal | None:
        """A call without a ticket has shown no lease."""
        if not self.wants_lease(tool):
            return None
        if ticket is None or not ticket.call.lease:
            return self.lease_required(caller, tool)
        if ticket.lease is None:
            if self.gate is not None:
                return Refusal(errors.UNAVAILABLE, "the tool's tier has risen while the call waited; ask again")
            lease = self.leases.reserve(ticket.call.lease, tool.name, tool.tier, now)
            if isinstance(lease, Lease):
                ticket.lease = lease
                return None
            reason = lease
        else:
            reason = self.leases.doubt(ticket.lease, tool.tier)
            if not reason:
                return None
        return self.lease_rejected(ticket, caller, tool, reason)

    def wants_lease(self, tool: Tool) -> bool:
        return self.enforce_leases and tool.tier > 0

    def lease_required(self, caller: Named, tool: Tool) -> Refusal:
        self.audit.write("lease_required", caller.principal, tool.name, tool.tier, fingerprint(""))
        return Refusal(errors.LEASE_REQUIRED, "lease_required", tier=tool.tier)

    def lease_rejected(self, ticket: Ticket, caller: Named, tool: Tool, reason: str) -> Refusal:
        token = fingerprint(ticket.call.lease)
        self.audit.write("lease_rejected", caller.principal, tool.name, tool.tier, token, reason=reason)
        return Refusal(errors.LEASE_REJECTED, "lease_rejected", reason=reason)

    def give_back(self, lease: Lease) -> None:
        """Its call never ran."""
        self.leases.give_back(lease)
        if self.gate is not None:
            self.gate.give_back(lease)

    def is_too_large(self, lines: bytes) -> bool:
        """Neither what we write into a line nor the escapes of `inputs` that became a string count."""
        most = self.limits.request_bytes + SPLICE_ROOM
        return len(lines) > most and len(lines) - lines.count(b"\\") > most

    def too_large(self, what: str) -> Refusal:
        return Refusal(errors.TOO_LARGE, f"{what} is over {self.limits.request_bytes} bytes (limits.request_bytes)")

    # --- what has waited is asked again -----------------------------------------------------------------------------

    def judge(self, work: Work) -> Refusal | None:
        """Of a call that waits in a queue: may it run, as its tool, its caller and its lease are now?"""
        ticket = work.ticket if isinstance(work.ticket, Ticket) else None
        if ticket is not None and ticket.problem is not None:
            return ticket.problem
        return self.rights(work.tool, work.caller) or self._lease(ticket, work.caller, work.tool, time.monotonic())

    def broken(self, work: Work) -> Refusal | None:
        """The breaker has opened since the call was admitted, and it is not the probe."""
        breaker, ticket = work.tool.breaker, work.ticket
        if breaker.state is State.CLOSED or (isinstance(ticket, Ticket) and ticket.probes(breaker)):
            return None
        return self._breaker_open(work.tool, time.monotonic())

    def revise(self) -> None:
        """Rights or leases have changed: also for those who wait."""
        for runtime in {tool.runtime for tool in self.registry}:
            runtime.revise(self.judge)

    def rehome(self, work: Work, closed: Refusal) -> None:
        """Its pool has closed: it goes to where its tool is now, unless that is nowhere, or the broker stops."""
        tool = self.registry.get(work.tool.name)
        if self.draining or tool is work.tool:
            refusal: Refusal | None = closed
        elif tool is None:
            refusal = _not_found(work.tool)
        else:
            work.tool = tool
            refusal = self.judge(work)
        if refusal is None:
            work.tool.runtime.submit(work, time.monotonic())
        else:
            work.sink.refuse(work, refusal)

    def in_turn(self, ticket: Ticket, session: Session, now: float) -> None:
        """The session is free for this call."""
        self._again(ticket, lambda: ticket.enter(session, now), now)

    def go_on(self, ticket: Ticket, now: float) -> None:
        """The cluster lets it pass."""
        self._again(ticket, lambda: ticket.proceed(now), now)

    def _again(self, ticket: Ticket, proceed: Callable[[], Refusal | None], now: float) -> None:
        """What has waited is asked again."""
        ticket.go_on()
        call = ticket.call
        tool = self.registry.get(call.tool.name)
        refusal = self.refusal()
        if refusal is None and tool is None:
            refusal = _not_found(call.tool)
        if refusal is None and tool is not None:
            call.tool = tool
            refusal = self.rights(tool, ticket.caller) or self.breaker(ticket, now)
            refusal = refusal or self._lease(ticket, ticket.caller, tool, now) or proceed()
        if refusal is not None:
            ticket.give_up(refusal)

    # --- what happens elsewhere -------------------------------------------------------------------------------------

    def answered(self, tool: Tool, count: int, succeeded: int, now: float) -> None:
        """Replies have come. A tool's own errors count for its breaker only where the configuration says so."""
        self.catch_up(tool)
        tool.calls += count
        errors = count - succeeded
        tool.failed += errors
        if not errors or not tool.counts_errors:
            tool.breaker.succeeded(count, now)
            return
        if succeeded:
            tool.breaker.succeeded(succeeded, now)
        for _ in range(errors):
            if tool.breaker.failed(OWN_ERROR, now):
                self._tripped(tool, now)

    def failed(self, tool: Tool, kind: Kind, reason: str, now: float) -> None:
        """A crash, a timeout, a broken or oversize reply."""
        self.catch_up(tool)
        reason = self.secrets.hidden.text(reason)
        self.noted(tool.name, kind.code, reason)
        if tool.breaker.failed(reason, now):
            self._tripped(tool, now)

    def noted(self, what: str, code: str, reason: str) -> None:
        """For whoever asks what went wrong of late."""
        self.recent.add(what, code, unquoted(self.secrets.hidden.text(reason)).removeprefix(f"{what}: "))

    def catch_up(self, tool: Tool) -> None:
        """Plain calls are only counted, by threads or by the board, and told of when something else happens, or from
        time to time."""
        stats, count = tool.stats, tool.untold
        if count:
            tool.untold -= count
            tool.breaker.succeeded(count, tool.used)
        if stats.passed:
            count += stats.passed
            tool.breaker.succeeded(stats.passed, stats.used)
            tool.failed += stats.failed
            stats.passed = stats.failed = 0
        tool.calls += count

    def catch_up_all(self) -> None:
        for tool in self.registry:
            self.catch_up(tool)

    def _tripped(self, tool: Tool, now: float) -> None:
        """A breaker has opened: whatever waits for the tool is answered at once."""
        self.registry.gate(tool)
        refusal = self._breaker_open(tool, now)
        self.noted(tool.name, refusal.kind.code, refusal.text)
        self._refuse_waiting_for(tool, refusal)

    def _refuse_waiting_for(self, tool: Tool, refusal: Refusal) -> None:
        tool.runtime.revise(lambda _: refusal, tool.index)

    def reset_breaker(self, tool: Tool) -> None:
        tool.breaker.reset()
        self.registry.gate(tool)

    def revoke_lease(self, name: str) -> Lease | None:
        """Also one that a waiting call has reserved: that call will not run."""
        lease = self.leases.revoke(name, time.monotonic())
        if lease is not None and lease.spent:
            self.revise()
        return lease

    def changed(self, tools: list[Tool], gone: list[Tool]) -> None:
        """A plugin has been replaced: those who wait for its tools wait for what these are now."""
        for tool in tools:
            tool.runtime.revise(self.judge, tool.index)
        for tool in gone:
            self._refuse_waiting_for(tool, _not_found(tool))

    def next_in(self, session: Session) -> None:
        """A session is free: its next call begins. From the loop, never from within another call's end."""
        if session.waiting and not session.busy:
            self.in_turn(self.waiting.next_of(session), session, time.monotonic())
            if session.waiting and not session.busy:
                self.defer(self.next_in, session)

    def hung_up(self, caller: Caller) -> None:
        """A connection's own state goes with it, and so does what it has waiting for a session."""
        self.sessions.drop(caller)
        for room in self.rooms:
            self._give_up(room, [ticket for ticket in room.of(caller) if not ticket.hand_on()], HUNG_UP)

    def refuse_waiting(self) -> None:
        """The broker stops."""
        refusal = self.refusal()
        assert refusal is not None
        for room in self.rooms:
            self._give_up(room, room.everybody(), refusal)

    def expire(self, now: float) -> None:
        for room in self.rooms:
            text = f"the call waited {room.seconds:g} s for {room.what}"
            refusal = Refusal(errors.OVERLOADED, text, retry_after=1)
            overdue = room.overdue(now - room.seconds)
            for ticket in overdue:
                self.noted(ticket.call.tool.name, refusal.kind.code, text)
            self._give_up(room, overdue, refusal)
        self.sessions.expire(now)
        self.cache.expire(now)

    def _give_up(self, room: WaitingRoom, tickets: list[Ticket], refusal: Refusal) -> None:
        room.leave(tickets)
        for ticket in tickets:
            ticket.give_up(refusal)


def _text(arguments: dict[str, Any]) -> str:
    return msgspec.json.encode(arguments).decode()


def _not_found(tool: Tool) -> Refusal:
    return Refusal(errors.NOT_FOUND, f"tool not found: {tool.name}")
