"""The NATS face: each tool is an endpoint of a NATS micro service, called with the line protocol's request object."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from broker import errors
from broker.bus import Bus
from broker.errors import Refusal
from broker.faces.caller import Asked, Asker, Caller
from broker.faces.nats import names
from broker.faces.nats.line import Line, Reader
from broker.faces.nats.micro import QUEUE, Endpoint, Service
from broker.model import Tool, ToolInfo

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from broker.cluster.members import Members
    from broker.policy.rights import Book
    from broker.server import Broker

HEADER_ROOM = 1024  # of NATS' payload limit, for the headers of a reply
BEHIND = 1024 * 1024  # bytes that NATS has not taken yet, before tools that speak have to wait
LONGEST_SESSION = 256
LAST_WORDS_SECONDS = 1.0

_encode = msgspec.json.Encoder().encode


class Reply:
    """The one answer to a message."""

    __slots__ = ("began", "endpoint", "face", "ids", "large", "subject", "tool")

    def __init__(self, face: NatsFace, message: Msg, endpoint: Endpoint | None) -> None:
        self.face = face
        self.endpoint = endpoint
        self.subject: str = message.reply
        self.large = bool(message.headers and message.headers.get(names.ACCEPTS) == "1")
        self.tool = ""
        self.ids: bytes | None = None
        self.began = time.perf_counter_ns()

    def settle(self, answer: bytes | Refusal) -> None:
        headers: dict[str, str] | None = None
        if isinstance(answer, Refusal):
            headers = {names.RAN: "1" if answer.ran else "0"}
            line, code, text = answer.line(self.tool or None, self.ids), answer.kind.http, answer.text
        else:
            line = b'{"id":' + self.ids[:-1] + b"," + answer[1:] if self.ids else answer
            said = _outcome.decode(answer)
            code, text = (0, "") if said.status == "OK" else (errors.TOOL_ERROR.http, said.error or said.status)
        if code:
            headers = (headers or {}) | {names.ERROR: names.one_line(text), names.ERROR_CODE: str(code)}
        self._count(text if code else "")
        self.face.settled(self, line.rstrip(b"\n"), headers)

    def _count(self, error: str) -> None:
        endpoint = self.endpoint
        if endpoint is not None:
            endpoint.requests += 1
            endpoint.nanoseconds += time.perf_counter_ns() - self.began
            if error:
                endpoint.errors += 1
                endpoint.last_error = names.one_line(error)

    def hear(self, members: bytes) -> None:
        ids = self.ids or b"null\n"
        self.face.say(self.subject, b'{"id":%b,%b}' % (ids[:-1], members), None)

    def behind(self) -> bool:
        return self.face.behind()


class _Outcome(msgspec.Struct):
    status: str = "OK"
    error: str | None = ""


_outcome = msgspec.json.Decoder(_Outcome)


class NatsFace:
    def __init__(self, broker: Broker, bus: Bus, members: Members) -> None:
        self._broker = broker
        self._bus = bus
        self._members = members
        self._cluster = broker.settings.nats.cluster
        self._caller = Caller(broker, "nats")
        self._reader = Reader(broker.registry.strict, broker.settings.limits)
        self._served: dict[str, tuple[Endpoint, ToolInfo, Subscription]] = {}  # by the tool's name
        self._service = Service(bus, members.me, self._metadata(), lambda: [one for one, _, _ in self._served.values()])
        self._outgoing: deque[tuple[str, bytes, dict[str, str] | None]] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._seen = -1  # the registry's changes that are served
        self._syncing: asyncio.Task[None] | None = None
        self._stopping = False
        self._direct: Subscription | None = None
        self.outstanding = 0
        self.bytes = 0
        bus.on_connect(self._connected)

    def _metadata(self) -> dict[str, str]:
        return {"cluster": self._cluster, names.ACCEPTS: "1"}

    def _asker(self) -> Asker:
        principal = f"nats:{self._cluster}"
        return Asker(principal, self._caller.rights_of(principal), False, {})

    # --- what is served -----------------------------------------------------------------------------------------------

    async def _connected(self) -> None:
        """The client subscribes again by itself: the first time counts."""
        if self._direct is None:
            direct = names.direct_subject(self._cluster, self._members.me)
            self._direct = await self._bus.client.subscribe(direct, cb=self._hearing(None))
            await self._sync()
            await self._service.start()

    def expire(self, now: float) -> None:  # noqa: ARG002
        """Tools come and go."""
        changed = self._seen != self._broker.registry.changes
        idle = self._syncing is None or self._syncing.done()
        if changed and idle and self._bus.connected and self._direct is not None and not self._stopping:
            self._syncing = asyncio.ensure_future(self._sync())

    def revise(self, _: Book) -> None:
        """Rights have changed."""
        self._seen = -1

    async def _sync(self) -> None:
        from nats.errors import Error

        registry = self._broker.registry
        seen, rights = registry.changes, self._asker().rights
        tools = {tool.name: tool for tool in registry if not tool.info.elsewhere and rights.allow(tool)}
        try:
            for name in [name for name, one in self._served.items() if name not in tools or one[1] != tools[name].info]:
                _, _, subscription = self._served.pop(name)
                await subscription.drain()  # type: ignore[no-untyped-call]
            for name, tool in tools.items():
                if name not in self._served:
                    endpoint = Endpoint(names.endpoint_of(name), names.subject_of(self._cluster, name), _about(tool))
                    heard = self._hearing(endpoint, name)
                    subscription = await self._bus.client.subscribe(endpoint.subject, queue=QUEUE, cb=heard)
                    self._served[name] = endpoint, tool.info, subscription
        except (Error, OSError) as error:
            self._broker.log.warning("nats", reason=f"tools are not announced: {error!r}")
            return
        self._seen = seen

    # --- calls --------------------------------------------------------------------------------------------------------

    def _hearing(self, endpoint: Endpoint | None, tool: str = "") -> Callable[[Msg], Awaitable[None]]:
        async def hear(message: Msg) -> None:
            reply = Reply(self, message, endpoint)
            self.outstanding += 1
            try:
                self._begin(message, tool, reply)
            except Exception as error:  # a mistake of ours must not leave a caller waiting for ever
                self._broker.log.error("internal error", subject=message.subject, reason=repr(error))
                reply.settle(Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}"))

        return hear

    def _begin(self, message: Msg, name: str, reply: Reply) -> None:
        """`name`: the tool that the subject is about; empty: the request says which."""
        line, reply.ids = self._reader.read(message.data, name)
        refusal = self._full(len(message.data))
        if isinstance(line, Refusal):
            self._refuse(reply, line)
            return
        reply.tool = line.aid
        if name and line.aid != name:
            text = f"{message.subject} is {name}, and the request names {line.aid}"
            refusal = Refusal(errors.BAD_REQUEST, text)
        tool = self._broker.registry.get(line.aid)
        if tool is None or tool.info.elsewhere:  # what others have is asked of them
            refusal = refusal or Refusal(errors.NOT_FOUND, f"tool not found: {line.aid}")
        if refusal is None:
            assert tool is not None
            refusal = self._call(tool, line, message, reply)
        if refusal is not None:
            self._refuse(reply, refusal)

    def _call(self, tool: Tool, line: Line, message: Msg, reply: Reply) -> Refusal | None:
        asked, milliseconds = line.asked, line.timeout_ms()
        if isinstance(milliseconds, Refusal):
            return milliseconds
        if asked.stream and reply.ids is None:
            return Refusal(errors.BAD_REQUEST, '"stream":true needs an "id", so that events can be told from replies')
        if len(asked.session) > LONGEST_SESSION:
            return Refusal(errors.BAD_REQUEST, f'"session" may have {LONGEST_SESSION} characters')
        more = Asked(
            milliseconds,
            asked.key,
            asked.lease,
            asked.session,
            asked.ds_state,
            None,
            asked.request,
            reply if asked.stream else None,
            (message.headers or {}).get(names.PROOF, ""),
        )
        size = len(message.data)
        self.bytes += size

        def tell(answer: bytes | Refusal) -> None:
            self.bytes -= size
            reply.settle(answer)

        self._caller.begin_line(tool, line.text, self._asker(), tell, more)
        return None

    def _full(self, size: int) -> Refusal | None:
        """NATS brings messages as they come: what is more than the bounds is answered at once."""
        limits = self._broker.settings.limits
        if self.outstanding > limits.connection_calls:
            text = f"{limits.connection_calls} calls from NATS are under way (limits.connection_calls)"
        elif self.bytes + size > limits.connection_bytes and self.bytes:
            text = f"calls of {limits.connection_bytes} bytes from NATS are under way (limits.connection_bytes)"
        else:
            return None
        return Refusal(errors.OVERLOADED, text, retry_after=1)

    def _refuse(self, reply: Reply, refusal: Refusal) -> None:
        """What has not become a call."""
        self._caller.refused[refusal.kind.code] += 1
        reply.settle(refusal)

    # --- replies ------------------------------------------------------------------------------------------------------

    def settled(self, reply: Reply, line: bytes, headers: dict[str, str] | None) -> None:
        self.outstanding -= 1
        most = self._bus.client.max_payload - HEADER_ROOM
        if len(line) > most:
            text = f"the reply has {len(line)} bytes, more than NATS takes ({most}); say {names.ACCEPTS}: 1"
            self._caller.refused[errors.REPLY_TOO_LARGE.code] += 1
            refusal = Refusal(errors.REPLY_TOO_LARGE, text)
            headers = {names.RAN: "1", names.ERROR: names.one_line(text), names.ERROR_CODE: str(refusal.kind.http)}
            line = refusal.line(reply.tool or None, reply.ids).rstrip(b"\n")
        self.say(reply.subject, line, headers)

    def say(self, subject: str, payload: bytes, headers: dict[str, str] | None) -> None:
        if subject:
            self._outgoing.append((subject, payload, headers))
            if self._sending is None or self._sending.done():
                self._sending = asyncio.ensure_future(self._send())

    def behind(self) -> bool:
        return bool(self._bus.client.pending_data_size > BEHIND)

    async def _send(self) -> None:
        from nats.errors import Error

        while self._outgoing:
            subject, payload, headers = self._outgoing.popleft()
            try:
                await self._bus.client.publish(subject, payload, headers=headers)
            except (Error, OSError) as error:  # NATS is away, and what waits for it is as much as may wait
                self._broker.log.warning("nats: a reply is lost", subject=subject, reason=repr(error))

    # --- the end ------------------------------------------------------------------------------------------------------

    async def stop_accepting(self) -> None:
        """Other members of the cluster get what comes from now on; what has come is answered."""
        from nats.errors import Error

        self._stopping = True
        if not self._bus.connected:
            return
        subscriptions = [one for _, _, one in self._served.values()]
        if self._direct is not None:
            subscriptions.append(self._direct)
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await asyncio.gather(
                    *(one.drain() for one in subscriptions)  # type: ignore[no-untyped-call]
                )
        except (Error, OSError, TimeoutError) as error:
            self._broker.log.warning("nats: tools are not taken back in time", reason=repr(error))

    async def close(self) -> None:
        """All calls have their answers: they are given a moment to leave."""
        from nats.errors import Error

        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                if self._sending is not None:
                    await self._sending
                if self._bus.connected:
                    await self._bus.client.flush()
        except (Error, OSError, TimeoutError):
            pass

    def status(self) -> dict[str, Any]:
        return {"tools": len(self._served), "calls_under_way": self.outstanding}


def _about(tool: Tool) -> dict[str, str]:
    """What callers find out by $SRV.INFO; NATS has strings only."""
    info = tool.info
    about = {"tool": tool.name, "tier": str(tool.tier), "info": _encode(info).decode()}
    return about | ({"description": info.description} if info.description else {})
