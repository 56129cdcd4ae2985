"""Tools that other brokers of the cluster have: a call is one message there, and one or more back.

Whether a call has run is never guessed: a broker whose connection broke asks the other one what has become of it, and
only what has certainly not run is sent to another one.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from broker import errors
from broker.bus import NO_RESPONDERS, Bus
from broker.cluster import names
from broker.cluster.elsewhere import Elsewhere
from broker.cluster.kv import Away
from broker.cluster.objects import NoObject, Objects
from broker.errors import Refusal
from broker.model import Work
from broker.pool import verdicts
from broker.pool.core import Core
from broker.runtimes.waiting import Waiting
from broker.settings import Config
from broker.ticket import Ticket, is_error
from broker.wire import is_json

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

HEADER_ROOM = 1024  # of NATS' payload limit
GRACE_SECONDS = 5.0  # for a reply that was there in time
LOOK_SECONDS = 0.1
AGAIN_SECONDS = 1.0  # between two questions about a call, while its broker cannot be reached
ELSEWHERE = {kind.code for kind in (errors.UNAVAILABLE, errors.DRAINING, errors.BREAKER_OPEN, errors.OVERLOADED)}
ELSEWHERE |= {errors.NOT_FOUND.code}  # another broker may run what this one would not

_encode = msgspec.json.Encoder().encode


class _Refusal(msgspec.Struct):
    error: str = ""
    type: str = ""


class _Patch(msgspec.Struct):
    patch: Raw = Raw(b"{}")


class _Event(msgspec.Struct):
    type: str = ""


class _Heard(msgspec.Struct):
    event: Raw = Raw(b"{}")


class RemoteCall:
    """One call, from one broker to the next until one of them has answered."""

    __slots__ = (
        "again",
        "began",
        "connections",
        "deadline",
        "held",
        "large",
        "name",
        "payload",
        "sent",
        "since",
        "tried",
        "unheard",
        "who",
        "why",
        "work",
    )

    def __init__(self, name: str, work: Work, now: float) -> None:
        self.name = name
        self.work = work
        self.payload = b""  # what is sent,
        self.large = ""  # or where it lies
        self.who = ""  # is asked; empty: nobody could be found yet
        self.sent = 0.0  # when it was; 0: it has not been yet
        self.connections = 0  # that broker's then
        self.again = 0.0  # when it was asked what has become of it, last; 0: it has not been
        self.unheard = False  # and nobody was there
        self.held = False  # it says nothing more, until our caller has read what there is
        self.since = now  # that nobody could be found
        self.began = now
        self.deadline = math.inf
        self.tried: set[str] = set()
        self.why: Refusal | None = None  # the last of those would not run it

    @property
    def may_move(self) -> bool:
        """A lease that another broker has taken comes back too late for a third one."""
        return not (isinstance(self.work.ticket, Ticket) and self.work.ticket.call.lease)


class Remote(Waiting):
    source = "another broker of the cluster (nats.remote)"

    def __init__(self, settings: Config, core: Core, bus: Bus, elsewhere: Elsewhere, objects: Objects) -> None:
        super().__init__(settings.limits.connection_calls, settings.limits, core)
        self.timeout = settings.limits.timeout_seconds
        self._patience = settings.nats.wait_seconds
        self._cluster = settings.nats.cluster
        self._bus = bus
        self._elsewhere = elsewhere
        self._objects = objects
        self._inbox = f"_INBOX.{secrets.token_hex(12)}"
        self._subscription: Subscription | None = None
        self._calls: dict[str, RemoteCall] = {}
        self._names = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: set[RemoteCall] = set()
        self._next_look = 0.0
        bus.on_connect(self._connected)

    # --- a call goes out ----------------------------------------------------------------------------------------------

    def _room(self) -> int:
        return self._most - self.running  # there are no processes of ours

    def _start(self, work: Work) -> None:
        self.running += 1
        self._names += 1
        now = time.monotonic()
        call = RemoteCall(str(self._names), work, now)
        self._calls[call.name] = call
        if work.live is not None:
            work.live.begin()
        call.payload = _request(work)
        if len(call.payload) > self._bus.largest - HEADER_ROOM:
            self._later(self._put(call))
        else:
            self._send(call, now)

    async def _put(self, call: RemoteCall) -> None:
        try:
            call.large = await self._objects.put(call.payload)
        except Away as error:
            self._end(call, Refusal(errors.UNAVAILABLE, f"{error}; larger calls need it", retry_after=1))
            return
        call.payload = b""
        self._send(call, time.monotonic())

    def _send(self, call: RemoteCall, now: float) -> None:
        """To whom it had better go; if to nobody, it is tried again."""
        tool = call.work.tool
        who = self._elsewhere.choose(tool.name, call.tried) if self._bus.connected and self._subscription else ""
        if not who:
            if call.why is not None:
                self._end(call, call.why)
            return
        ticket = call.work.ticket
        if ticket is not None and not ticket.handed:
            ticket.handed_over()
        call.who, call.sent, call.again, call.unheard, call.held = who, now, 0.0, False, False
        call.connections = self._elsewhere.connections(who)
        call.deadline = now + self._limits.queue_seconds + call.work.timeout + GRACE_SECONDS
        self._elsewhere.begin(who)
        headers = {names.ACCEPTS: "1"}
        if call.large:
            headers[names.OBJECT] = call.large
        if isinstance(ticket, Ticket) and ticket.lease is not None:
            headers[names.PROOF] = ticket.lease.proof
        self._say(call, call.payload, headers)

    def _say(self, call: RemoteCall, payload: bytes, headers: dict[str, str]) -> None:
        """Its name is where its reply goes: another one for each broker that is asked."""
        name = f"{self._inbox}.{call.name}.{len(call.tried)}"
        self._bus.say(names.direct_subject(self._cluster, call.who), payload, {names.CALL: name, **headers}, name)

    def _ask_again(self, call: RemoteCall, now: float) -> None:
        """What has become of it? Its request, or its reply, may be lost."""
        call.again, call.unheard = now, False
        call.connections = self._elsewhere.connections(call.who)
        self._say(call, b"", {names.ACCEPTS: "1", names.AGAIN: str(math.ceil((now - call.sent) * 1000))})
        if call.held:
            self._say(call, b"", {names.HOLD: "1"})

    # --- what comes back ----------------------------------------------------------------------------------------------

    async def _connected(self) -> None:
        if self._subscription is None:
            self._subscription = await self._bus.client.subscribe(f"{self._inbox}.>", cb=self._hear)
        now = time.monotonic()
        for call in list(self._calls.values()):  # what was on its way may be lost
            if call.sent:
                self._ask_again(call, now)
        self._look(now)

    async def _hear(self, message: Msg) -> None:
        _, _, name, attempt = message.subject.split(".")
        call = self._calls.get(name)
        if call is None or not call.sent or attempt != str(len(call.tried)):
            return
        headers = names.headers_of(message)
        if not message.data and headers.get("Status") == NO_RESPONDERS:
            if call.again:  # it has come to that broker, perhaps, which has yet to connect again
                call.unheard = True
            else:
                self._refused(call, Refusal(errors.UNAVAILABLE, "the broker that had it has just gone", retry_after=1))
        elif large := headers.get(names.OBJECT):
            self._later(self._fetch(call, large, headers))
        else:
            self._understand(call, message.data, headers)

    async def _fetch(self, call: RemoteCall, name: str, headers: dict[str, str]) -> None:
        try:
            line = await self._objects.get(name, self._limits.reply_bytes + HEADER_ROOM)
        except NoObject as error:
            self._end(call, Refusal(errors.BAD_REPLY, f"{call.work.tool.name}: its reply is lost: {error}"))
        except Away as error:
            self._end(call, Refusal(errors.CRASH, f"{error}; the call has run, and its reply is lost"))
        else:
            self._objects.forget(name)
            self._understand(call, line, headers)

    def _understand(self, call: RemoteCall, line: bytes, headers: dict[str, str]) -> None:
        if call.name not in self._calls:
            return
        work = call.work
        try:
            if names.RAN in headers:
                self._refused(call, _refusal(line, ran=headers[names.RAN] == "1"))
            elif work.live is None:
                self._reply(call, line)
            elif line.startswith(EVENT):
                self._event(call, line[len(ID) :])
            else:
                self._reply(call, b"{" + line.removeprefix(ID))
        except (msgspec.DecodeError, KeyError):  # not what a broker says
            self._end(call, verdicts.bad_reply(work.tool.name, verdicts.junk(line[:160])))

    def _event(self, call: RemoteCall, rest: bytes) -> None:
        """The session is where its caller is."""
        work = call.work
        assert work.live is not None
        event = bytes(msgspec.json.decode(b"{" + rest, type=_Heard).event)
        if msgspec.json.decode(event, type=_Event).type == "state_patch":
            problem = work.live.patch(bytes(msgspec.json.decode(event, type=_Patch).patch))
            if problem:
                self._end(call, verdicts.bad_reply(work.tool.name, problem))
                return
        if work.live.stream:
            work.sink.tell(work, rest[:-1])
            self._core.flush()
            if not call.held and work.caller.behind():
                self._hold(call, held=True)

    def _hold(self, call: RemoteCall, *, held: bool) -> None:
        call.held = held
        (self._held.add if held else self._held.discard)(call)
        self._say(call, b"", {names.HOLD: "1" if held else "0"})

    def pump(self) -> None:
        super().pump()
        for call in [call for call in self._held if not call.work.caller.behind()]:
            self._hold(call, held=False)

    def _reply(self, call: RemoteCall, line: bytes) -> None:
        work, most = call.work, self._limits.reply_bytes
        if len(line) > most:
            self._end(call, verdicts.oversize(work.tool.name, most))
            return
        line = _with_state(line, work.live.state()) if work.live is not None else line
        if not line.startswith(b"{") or b"\n" in line or not is_json(line, self._limits.depth):
            raise msgspec.DecodeError
        self._core.policy.answered(work.tool, 1, int(not is_error(line)), time.monotonic())
        self._end(call, line)

    def _refused(self, call: RemoteCall, refusal: Refusal) -> None:
        """What has not run may be run by another one."""
        self._leave(call)
        if refusal.ran or refusal.kind.code not in ELSEWHERE or not call.may_move:
            self._end(call, refusal)
            return
        call.why = refusal
        call.tried.add(call.who)
        call.sent, call.who = 0.0, ""
        self._send(call, time.monotonic())

    def _leave(self, call: RemoteCall) -> None:
        self._held.discard(call)
        if call.who:
            self._elsewhere.end(call.who)

    def _end(self, call: RemoteCall, answer: bytes | Refusal) -> None:
        if self._calls.pop(call.name, None) is None:
            return
        work = call.work
        self.running -= 1
        if call.sent:
            self._leave(call)
        if call.large:
            self._objects.forget(call.large)
        if work.live is not None:
            work.live.end()
        if isinstance(answer, Refusal):
            if answer.ran:  # whose fault it was is known to the breaker of the broker that ran it
                work.tool.calls += 1
                work.tool.failed += 1
                self._core.policy.noted(work.tool.name, answer.kind.code, answer.text)
            work.sink.refuse(work, answer)
        else:
            work.tool.took(work.caller.face, time.monotonic() - call.began)
            ids = b"" if work.ids is None else b'"id":' + work.ids[:-1] + b","
            work.sink.deliver(work, b"{" + ids + answer[1:] + b"\n", 1)
        self.pump()
        self._core.flush()

    # --- time ---------------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        super().expire(now)
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look(now)

    def _look(self, now: float) -> None:
        for call in list(self._calls.values()):
            aid = call.work.tool.name
            if call.name not in self._calls:  # one before it has ended this one, too
                continue
            if not call.sent:
                if call.payload or call.large:
                    self._send(call, now)
                if not call.sent and now - call.since > self._patience:
                    why = "no broker of the cluster can run it now" if self._bus.connected else "NATS is away"
                    self._end(call, Refusal(errors.UNAVAILABLE, f"{aid}: {why} (nats.wait_seconds)", retry_after=1))
            elif self._elsewhere.gone(call.who):
                self._end(call, Refusal(errors.CRASH, f"{aid}: the broker that ran it is gone; it may have run"))
            elif now > call.deadline:
                self._end(call, verdicts.timeout(aid, call.work.timeout))
            elif self._doubtful(call, now) and self._bus.connected:
                self._ask_again(call, now)

    def _doubtful(self, call: RemoteCall, now: float) -> bool:
        """Its broker has had another connection since; or it was asked, and nobody was there."""
        if call.connections != self._elsewhere.connections(call.who):
            return True
        return call.unheard and now - call.again > AGAIN_SECONDS

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self, refusal: Refusal) -> None:
        self.drain(refusal)
        for call in list(self._calls.values()):
            self._end(call, refusal)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


ID = b'{"id":0,'
EVENT = ID + b'"event":'
STATELESS = b'{"ds_state":{"slots":{}},'


def _request(work: Work) -> bytes:
    """The request object: what the toolhost would read, and what the other broker has to know beside it."""
    line = work.lines.rstrip(b"\n")
    if line.startswith(STATELESS):  # as the scanner writes it, or a face: it need not be told so
        line = b"{" + line[len(STATELESS) :]
    elif line.startswith(work.tool.head):
        line = b'{"aid":' + _encode(work.tool.name) + b',"input_json":' + line[len(work.tool.head) :]
    more: dict[str, Any] = {}
    if work.timeout != work.tool.timeout:  # which is what the other broker has said that it is
        more["timeout_ms"] = max(1, math.ceil(work.timeout * 1000))
    ticket = work.ticket
    if isinstance(ticket, Ticket) and ticket.call.lease:  # also one that only the other broker asks for
        more["_lease_token"] = ticket.call.lease
    if work.live is not None:
        more |= {"stream": True}
        if work.live.request:
            more["request_id"] = work.live.request
    opening = ID if work.live is not None else b"{"
    return opening + (_encode(more)[1:-1] + b"," if more else b"") + line[1:]


def _refusal(line: bytes, *, ran: bool) -> Refusal:
    try:
        said = msgspec.json.decode(line, type=_Refusal)
        members = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return Refusal(errors.INTERNAL, "another broker's refusal cannot be understood", ran=ran)
    kind = errors.KINDS.get(said.type, errors.INTERNAL)
    known = {"ok", "status", "error", "type", "aid", "id", "kind", "text", "ran"}
    extra = {name: value for name, value in members.items() if name not in known}
    return Refusal(kind, said.error, ran=ran, **extra)


def _with_state(line: bytes, state: bytes) -> bytes:
    """An event tool's output has its session's document: the one that is here."""
    members = msgspec.json.decode(line, type=dict[str, Raw])
    output = msgspec.json.decode(msgspec.json.decode(members["output_json"], type=str), type=dict[str, Raw])
    output["state"] = Raw(state)
    members["output_json"] = Raw(_encode(_encode(output).decode()))
    return _encode(members)
