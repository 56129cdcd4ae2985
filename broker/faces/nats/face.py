"""The NATS face: each tool is an endpoint of a NATS micro service, called with the line protocol's request object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from broker import errors
from broker.bus import Bus
from broker.cluster import names
from broker.cluster.kv import Away
from broker.cluster.objects import NoObject, Objects
from broker.errors import Refusal
from broker.faces.caller import Asked, Asker, Caller
from broker.faces.nats.line import Line, Reader
from broker.faces.nats.micro import QUEUE, Endpoint, Service
from broker.faces.nats.recall import Recall
from broker.model import Tool, ToolInfo
from broker.ticket import is_error

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from broker.cluster.members import Members
    from broker.server import Broker

HEADER_ROOM = 1024  # of NATS' payload limit, for the headers of a reply
LONGEST_SESSION = 256
LAST_WORDS_SECONDS = 1.0
FETCHES = 4  # of large requests, at once

_encode = msgspec.json.Encoder().encode


class Reply:
    """The one answer to a message."""

    __slots__ = ("_face", "began", "call", "endpoint", "ids", "large", "object", "subject", "tool")

    def __init__(self, face: NatsFace, subject: str, headers: dict[str, str], endpoint: Endpoint | None) -> None:
        self._face = face
        self.endpoint = endpoint
        self.subject = subject  # empty: nobody listens, and the call runs all the same
        self.large = headers.get(names.ACCEPTS) == "1"  # it may come by reference
        self.call = headers.get(names.CALL, "")  # another broker's name for it
        self.object = headers.get(names.OBJECT, "")  # where its request lies
        self.tool = ""
        self.ids: bytes | None = None
        self.began = time.perf_counter_ns()

    def settle(self, answer: bytes | Refusal) -> None:
        if isinstance(answer, Refusal):
            headers: dict[str, str] | None = _about_refusal(answer)
            line, error = answer.line(self.tool or None, self.ids), answer.text
        else:
            line = b'{"id":' + self.ids[:-1] + b"," + answer[1:] if self.ids else answer
            error = _error_of(answer)
            headers = _about_error(error, errors.TOOL_ERROR.http) if error else None
        self._count(error)
        self._face.settled(self, line.rstrip(b"\n"), headers, ran=not isinstance(answer, Refusal) or answer.ran)

    def _count(self, error: str) -> None:
        endpoint = self.endpoint
        if endpoint is not None:
            endpoint.requests += 1
            endpoint.nanoseconds += time.perf_counter_ns() - self.began
            if error:
                endpoint.errors += 1
                endpoint.last_error = names.one_line(error)

    def hear(self, members: bytes) -> None:
        assert self.ids is not None  # else no stream was asked for
        self._face.say(self, b'{"id":%b,%b}' % (self.ids[:-1], members))

    def behind(self) -> bool:
        return self._face.behind(self)


class _Outcome(msgspec.Struct):
    status: str = "OK"
    error: str = ""


_outcome = msgspec.json.Decoder(_Outcome)


def _error_of(answer: bytes) -> str:
    """In words; empty where there is none."""
    if not is_error(answer):
        return ""
    try:
        said = _outcome.decode(answer)
    except msgspec.ValidationError:  # a tool may write there what it likes
        return "the tool failed"
    return said.error or said.status


class NatsFace:
    def __init__(self, broker: Broker, bus: Bus, members: Members, objects: Objects) -> None:
        self.bus = bus
        self._broker = broker
        self._members = members
        self._objects = objects
        self._cluster = broker.settings.nats.cluster
        self._caller = Caller(broker, "nats")
        self._reader = Reader(broker.registry.strict, broker.settings.limits)
        self._served: dict[str, tuple[Endpoint, ToolInfo, Subscription]] = {}  # by the tool's name
        about = {"cluster": self._cluster, names.ACCEPTS: "1", "objects": objects.bucket}
        self._service = Service(bus, members.me, about, lambda: [one for one, _, _ in self._served.values()])
        self._recall = Recall()
        self._seen = -1  # the registry's changes that are served
        self._syncing: asyncio.Task[None] | None = None
        self._fetching: set[asyncio.Task[None]] = set()
        self._fetches = asyncio.Semaphore(FETCHES)
        self._stopping = False
        self._direct: Subscription | None = None
        self._calls = 0  # without an answer,
        self._bytes = 0  # and what they hold
        bus.on_connect(self._connected)

    def _asker(self) -> Asker:
        principal = f"nats:{self._cluster}"
        rights = self._caller.rights_of(principal)
        return Asker(principal, rights, False, self._broker.registry.plain_of(rights))

    # --- what is served -----------------------------------------------------------------------------------------------

    async def _connected(self) -> None:
        """The client subscribes again by itself: the first time counts."""
        if self._direct is None:
            direct = names.direct_subject(self._cluster, self._members.me)
            self._direct = await self.bus.client.subscribe(direct, cb=self._hearing(None))
            await self._sync()
            await self._service.start()

    def expire(self, now: float) -> None:
        """Tools come and go."""
        self._recall.expire(now)
        changed = self._seen != self._broker.registry.changes
        idle = self._syncing is None or self._syncing.done()
        if changed and idle and self.bus.connected and self._direct is not None and not self._stopping:
            self._syncing = asyncio.ensure_future(self._sync())

    def use_rights(self) -> None:
        """They have changed."""
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
                    subscription = await self.bus.client.subscribe(endpoint.subject, queue=QUEUE, cb=heard)
                    self._served[name] = endpoint, tool.info, subscription
        except (Error, OSError) as error:
            self._broker.log.warning("nats", reason=f"tools are not announced: {error!r}")
            return
        self._seen = seen

    # --- calls --------------------------------------------------------------------------------------------------------

    def _hearing(self, endpoint: Endpoint | None, tool: str = "") -> Callable[[Msg], Awaitable[None]]:
        async def hear(message: Msg) -> None:
            headers = names.headers_of(message)
            call = headers.get(names.CALL, "")
            if call and (names.AGAIN in headers or names.HOLD in headers or self._recall.knows(call)):
                self._asked_about(call, message.reply, headers)
                return
            reply = Reply(self, message.reply, headers, endpoint)
            self._calls += 1
            if call:
                self._recall.begin(call)
            if refusal := self._full(len(message.data), reply):
                self._refuse(reply, refusal)
            elif names.TOOLS in headers and endpoint is None:
                reply.settle(_tools_of(endpoint for endpoint, _, _ in self._served.values()))
            elif reply.object:
                self._later(self._fetch(headers, tool, reply))
            else:
                self._begin(message.data, headers, tool, reply)

        return hear

    async def _fetch(self, headers: dict[str, str], tool: str, reply: Reply) -> None:
        """The request is larger than a message."""
        limits = self._broker.settings.limits
        try:
            async with self._fetches:
                data = await self._objects.get(reply.object, limits.request_bytes)
        except NoObject as error:
            self._refuse(reply, Refusal(errors.BAD_REQUEST, f"{names.OBJECT}: {error}"))
        except Away as error:
            self._refuse(reply, Refusal(errors.UNAVAILABLE, str(error), retry_after=1))
        else:
            if refusal := self._full(len(data), reply):
                self._refuse(reply, refusal)
            else:
                self._begin(data, headers, tool, reply)

    def _begin(self, data: bytes, headers: dict[str, str], name: str, reply: Reply) -> None:
        """`name`: the tool that the subject is about; empty: the request says which."""
        try:
            refusal = self._call(data, headers, name, reply)
        except Exception as error:  # a mistake of ours must not leave a caller waiting for ever
            self._broker.log.error("internal error", aid=name, reason=repr(error))
            refusal = Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}")
        if refusal is not None:
            self._refuse(reply, refusal)

    def _call(self, data: bytes, headers: dict[str, str], name: str, reply: Reply) -> Refusal | None:
        line, reply.ids = self._reader.read(data, name)
        if isinstance(line, Refusal):
            return line
        reply.tool = line.aid
        if name and line.aid != name:
            return Refusal(errors.BAD_REQUEST, f"the subject is {name}'s, and the request names {line.aid}")
        tool = self._broker.registry.get(line.aid)
        if tool is None or tool.info.elsewhere:  # what others have is asked of them
            return Refusal(errors.NOT_FOUND, f"tool not found: {line.aid}")
        asked = self._asked(line, headers, reply)
        if isinstance(asked, Refusal):
            return asked
        size = len(data)
        self._bytes += size

        def tell(answer: bytes | Refusal) -> None:
            self._bytes -= size
            reply.settle(answer)

        self._caller.begin_line(tool, line.text, self._asker(), tell, asked)
        return None

    def _asked(self, line: Line, headers: dict[str, str], reply: Reply) -> Asked | Refusal:
        asked, milliseconds = line.asked, line.timeout_ms()
        if isinstance(milliseconds, Refusal):
            return milliseconds
        if asked.stream and reply.ids is None:
            return Refusal(errors.BAD_REQUEST, '"stream":true needs an "id", so that events can be told from replies')
        if len(asked.session) > LONGEST_SESSION:
            return Refusal(errors.BAD_REQUEST, f'"session" may have {LONGEST_SESSION} characters')
        return Asked(
            milliseconds,
            asked.key,
            asked.lease,
            asked.session,
            asked.ds_state,
            None,
            asked.request,
            reply if asked.stream else None,
            headers.get(names.PROOF, ""),
        )

    def _full(self, size: int, reply: Reply) -> Refusal | None:
        """NATS brings messages as they come: what is more than the bounds is answered at once. Other brokers have
        bounds of their own."""
        limits = self._broker.settings.limits
        if reply.call:
            return None
        if self._calls > limits.connection_calls:
            text = f"{limits.connection_calls} calls from NATS are under way (limits.connection_calls)"
        elif self._bytes + size > limits.connection_bytes and self._bytes:
            text = f"calls of {limits.connection_bytes} bytes from NATS are under way (limits.connection_bytes)"
        else:
            return None
        return Refusal(errors.OVERLOADED, text, retry_after=1)

    def _refuse(self, reply: Reply, refusal: Refusal) -> None:
        """What has not become a call."""
        self._caller.refused[refusal.kind.code] += 1
        reply.settle(refusal)

    # --- replies ------------------------------------------------------------------------------------------------------

    def settled(self, reply: Reply, line: bytes, headers: dict[str, str] | None, *, ran: bool) -> None:
        self._calls -= 1
        if reply.object and ran and not reply.call:  # who has not run it may be asked again; brokers do so themselves
            self._objects.forget(reply.object)
        most = self.bus.largest - HEADER_ROOM
        if len(line) <= most:
            self._tell(reply, line, headers)
        elif not reply.subject:
            pass
        elif reply.large:
            self._later(self._tell_by_reference(reply, line, headers))
        else:
            text = f"the reply has {len(line)} bytes, more than NATS takes ({most}); say {names.ACCEPTS}: 1"
            self._caller.refused[errors.REPLY_TOO_LARGE.code] += 1
            self._tell_refusal(reply, Refusal(errors.REPLY_TOO_LARGE, text))

    async def _tell_by_reference(self, reply: Reply, line: bytes, headers: dict[str, str] | None) -> None:
        try:
            name = await self._objects.put(line)
        except Away as error:
            self._tell_refusal(reply, Refusal(errors.CRASH, f"{error}; the call has run, and its reply is lost"))
        else:
            self._tell(reply, b"", {**(headers or {}), names.OBJECT: name})

    def _tell_refusal(self, reply: Reply, refusal: Refusal) -> None:
        line = refusal.line(reply.tool or None, reply.ids).rstrip(b"\n")
        self._tell(reply, line, _about_refusal(refusal))

    def _tell(self, reply: Reply, line: bytes, headers: dict[str, str] | None) -> None:
        self.say(reply, line, headers)
        if reply.call:
            self._recall.end(reply.call, line, headers)

    def say(self, reply: Reply, payload: bytes, headers: dict[str, str] | None = None) -> None:
        if reply.subject:
            self.bus.say(reply.subject, payload, headers)

    def behind(self, reply: Reply) -> bool:
        return self.bus.behind() or self._recall.held(reply.call)

    def _asked_about(self, call: str, subject: str, headers: dict[str, str]) -> None:
        """What another broker says, or asks, of a call that it has sent before."""
        if names.HOLD in headers:
            self._recall.hold(call, held=headers[names.HOLD] == "1")
            self._broker.pump_soon()
            return
        told = self._recall.told(call)
        if told is not None:
            self.bus.say(subject, told.line, told.headers)
        elif not self._recall.knows(call):
            age = headers.get(names.AGAIN, "")
            if age.isdigit() and self._recall.certain(int(age) / 1000):
                refusal = Refusal(errors.UNAVAILABLE, "this call has never come")
            else:
                refusal = Refusal(errors.CRASH, "its broker does not remember this call any more; it may have run")
            line, about = refusal.line(None).rstrip(b"\n"), _about_refusal(refusal)
            self._recall.end(call, line, about)  # should it come yet, it is too late
            self.bus.say(subject, line, about)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._fetching.add(task)
        task.add_done_callback(self._fetching.discard)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def stop_accepting(self) -> None:
        """Other members of the cluster get what comes from now on; what has come is answered."""
        from nats.errors import Error

        self._stopping = True
        if not self.bus.connected:
            return
        subscriptions = [one for _, _, one in self._served.values()]
        if self._direct is not None:
            subscriptions.append(self._direct)
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                drained = [one.drain() for one in subscriptions]  # type: ignore[no-untyped-call]
                await asyncio.gather(*drained)
        except (Error, OSError, TimeoutError) as error:
            self._broker.log.warning("nats: tools are not taken back in time", reason=repr(error))
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while self._calls and time.monotonic() < deadline:  # those in queues would be refused from now on
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """All calls have their answers: they are given a moment to leave."""
        from nats.errors import Error

        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                if self._fetching:
                    await asyncio.wait(self._fetching)
                await self.bus.flush()
        except (Error, OSError, TimeoutError):
            pass
        for task in self._fetching:
            task.cancel()

    def status(self) -> dict[str, Any]:
        return {"tools": len(self._served), "calls_under_way": self._calls}


def _tools_of(endpoints: Iterable[Endpoint]) -> bytes:
    """For other brokers, where $SRV.INFO has no room for all that there is to say."""
    return _encode({"ok": True, "tools": [endpoint.metadata for endpoint in endpoints]})


def _about(tool: Tool) -> dict[str, str]:
    """What callers find out by $SRV.INFO; NATS has strings only."""
    info = tool.info
    about = {"tool": tool.name, "tier": str(tool.tier), "timeout": f"{tool.timeout:g}", "info": _encode(info).decode()}
    return about | ({"description": info.description} if info.description else {})


def _about_refusal(refusal: Refusal) -> dict[str, str]:
    return {names.RAN: "1" if refusal.ran else "0", **_about_error(refusal.text, refusal.kind.http)}


def _about_error(text: str, code: int) -> dict[str, str]:
    return {names.ERROR: names.one_line(text), names.ERROR_CODE: str(code)}
