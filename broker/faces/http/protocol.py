"""uvicorn's protocol, with bounds: heads and bodies must come in time and in size, and who hangs up is noticed."""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from broker.faces.http.request import Request, Response
from broker.faces.http.stream import is_wanted

if TYPE_CHECKING:
    from broker.faces.caller import Caller, FaceCall
    from broker.faces.http.app import App
    from broker.settings import Http, Limits

HEAD_BYTES = 64 * 1024
FAIR_BYTES = 256 * 1024  # of a body that nobody is turned away for
LONGEST_KNOWN = 4096
EXECUTE = "/v1/tools/execute"
EXECUTE_URL = EXECUTE.encode()
OF_UPGRADES = {b"upgrade", b"connection", b"http2-settings"}
READING_HEAD, READING_BODY, AT_WORK, IDLE = "head", "body", "work", "idle"


class Rules:
    """What all connections of one face share."""

    def __init__(self, app: App, caller: Caller, settings: Http, limits: Limits) -> None:
        self.app = app
        self.caller = caller
        self.body_bytes = settings.body_bytes
        self.header_seconds = settings.header_seconds
        self.idle_seconds = settings.idle_seconds
        self.body_seconds = limits.line_seconds
        self.most = settings.max_connections
        self.most_held = limits.queue_bytes
        self.held = 0  # bytes of bodies that have not ended, of all connections
        self._usual: list[tuple[bytes, bytes]] = []
        self._beginnings: dict[int, bytes] = {}  # of heads, by status

    def head(self, response: Response, request: Request, usual: list[tuple[bytes, bytes]]) -> bytes:
        """All of a response's head but its end. `usual` (the date) is the same list for a second."""
        if usual is not self._usual:
            self._usual = usual
            self._beginnings.clear()
        beginning = self._beginnings.get(response.status)
        if beginning is None:
            beginning = STATUS_LINE[response.status] + b"".join([b"%b: %b\r\n" % header for header in usual])
            self._beginnings[response.status] = beginning
        return beginning + self.app.lines(request, response)


class Known(NamedTuple):
    """A head that has been read, of a request that came in one piece."""

    head: bytes
    size: int  # of the request
    headers: dict[bytes, bytes]
    keep_alive: bool


class Quick:
    """A call under way that has no ASGI task of its own; what uvicorn's protocol wants to know of one is here, too."""

    __slots__ = (
        "body",
        "disconnected",
        "keep_alive",
        "link",
        "request",
        "response_complete",
        "response_started",
        "whole",
    )

    def __init__(self, link: Guarded, request: Request, keep_alive: bool) -> None:
        self.link = link
        self.request = request
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.whole = b""  # all that was read with it, if that began with it
        self.disconnected = self.response_started = self.response_complete = False

    @property
    def message_event(self) -> Quick:
        return self

    def set(self) -> None:
        """Nobody waits for its messages."""

    def respond(self, response: Response) -> None:
        """Head and body in one write."""
        link, body = self.link, response.body
        link.call = None
        if self.disconnected or link.transport.is_closing():
            return
        assert isinstance(body, bytes)
        head = link.rules.head(response, self.request, link.server_state.default_headers)
        if not self.keep_alive:
            head += b"connection: close\r\n"
        link.transport.write(b"%b\r\n%b" % (head, body))
        self.response_started = self.response_complete = True
        if not self.keep_alive:
            link.transport.close()
        link.on_response_complete()


class Flow(FlowControl):
    """Nothing more is read while requests that are here already wait for their turn: they are held in memory."""

    def __init__(self, link: Guarded) -> None:
        super().__init__(link.transport)
        self._link = link

    def resume_reading(self) -> None:
        if not self._link.pipeline and not self._link.last_words:
            super().resume_reading()


class Guarded(HttpToolsProtocol):
    rules: Rules  # of the class that a face makes of this

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.last_words: tuple[int, str, str] | None = None  # when those who came before have their answers
        self.flow = Flow(self)
        self.call: FaceCall | None = None
        self._open = 0  # requests whose heads are here, and their answers not yet
        self._ended = False  # the caller says no more
        self._held = 0  # bytes of a body that has not ended
        self._known: Known | None = None  # the head of its last call
        self._reading = b""  # what is being read, where it is the beginning of a request
        self._upgrades = False  # the request asks for another protocol
        self._mixed = False  # what is being read has the end of a head, or of a body, in it
        self.stage = READING_HEAD
        self.since = self.loop.time()
        self._head = 0  # bytes of a head that has not ended
        if len(self.connections) > self.rules.most:
            text = f"there are {self.rules.most} connections already (http.max_connections)"
            self._turn_away(429, "too_many_requests", text, b"retry-after: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._let_go()
        call, self.call = self.call, None
        if call is not None and call.waiting():
            self.rules.caller.hang_up(call)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A caller that has said all that it wanted may still be waiting for answers."""
        if self._unfinished() and not self._is_owing():
            return None
        if self._unfinished():
            self._drop_unfinished()
        elif self.cycle is not None:
            self.cycle.keep_alive = False
        self._ended = True
        return self._open > 0

    def data_received(self, data: bytes) -> None:
        known = self._known
        same = known is not None and len(data) == known.size and data.startswith(known.head)
        if known is not None and same and self.stage == IDLE and not self.flow.write_paused:  # it reads its answers
            self._begin_as_before(known, data)
            return
        self._parse(data)
        cycle: Any = self.cycle
        if isinstance(cycle, Quick) and cycle.whole is data and self.stage in (AT_WORK, IDLE):
            end = data.find(b"\r\n\r\n", 0, LONGEST_KNOWN) + 4
            if end + len(cycle.body) == len(data):  # nothing else was in it
                self._known = Known(data[:end], len(data), cycle.request.headers, cycle.keep_alive)

    def _begin_as_before(self, known: Known, data: bytes) -> None:
        """Callers that keep their connection send the same head again and again: it is not read twice."""
        request = Request("POST", EXECUTE, known.headers, self)
        cycle = Quick(self, request, known.keep_alive)
        self.cycle = cycle  # type: ignore[assignment]
        self._open += 1
        self.stage = AT_WORK
        self.rules.app.begin(request, data[len(known.head) :], cycle.respond)

    def _parse(self, data: bytes) -> None:
        self._reading = data if self.stage == IDLE else b""
        self._mixed = self.stage == READING_BODY
        while data:
            size, rest = len(data), b""
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                rest = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            data = rest
        if self.stage != READING_HEAD:
            return
        self._head = 1 if self._mixed else self._head + size
        if self._head > HEAD_BYTES:
            self._turn_away(431, "head_too_large", f"the request's head is over {HEAD_BYTES} bytes")

    def is_old(self) -> bool:
        """HTTP/1.0 knows no chunks: what has no length ends with the connection."""
        scope: Any = self.scope
        return bool(scope["http_version"] == "1.0")

    def begin_unmeasured(self) -> None:
        self.cycle.chunked_encoding = False
        self.cycle.expected_content_length = sys.maxsize

    def end_unmeasured(self) -> None:
        self.cycle.expected_content_length = 0

    def _without_upgrade(self) -> bytes:
        """No other protocol is spoken here, and then the request counts as if it had not asked for one. (The parser
        takes what follows its head for the other protocol's.)"""
        self._upgrades = False
        close = b"" if self.parser.should_keep_alive() else b"connection: close\r\n"
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] not in OF_UPGRADES]
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b%b\r\n" % (method, self.url, version, b"".join(lines), close)

    def on_message_begin(self) -> None:
        """What uvicorn prepares for an ASGI task is prepared when one is needed."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self.stage = READING_HEAD
        self.since = self.loop.time()

    def on_headers_complete(self) -> None:
        self._head = 0
        self._mixed = True
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("no tunnels")
            self._upgrades = True
            return
        if self._is_quick():
            request = Request("POST", EXECUTE, self.headers, self)
            self.cycle = Quick(self, request, self.parser.should_keep_alive())  # type: ignore[assignment]
            self._open += 1
            self.stage = READING_BODY
            return
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expect
        self.scope["headers"] = headers
        self.scope["broker"] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._open += 1
        self.stage = READING_BODY

    def _is_quick(self) -> bool:
        """Most requests are: a call, alone on its connection, whose length is known, and that
        wants one answer. A task of its own for each would
        cost as much as all that is done for it."""
        if self.url != EXECUTE_URL or self.parser.get_method() != b"POST" or self.expect_100_continue:
            return False
        if self._open or self.flow.write_paused:
            return False
        headers = dict(self.headers)
        if is_wanted(headers.get(b"accept", b"")):
            return False
        length = headers.get(b"content-length", b"")
        return length.isdigit() and int(length) <= self.rules.body_bytes and self.parser.get_http_version() == "1.1"

    def on_body(self, body: bytes) -> None:
        cycle: Any = self.cycle
        self._held += len(body)
        self.rules.held += len(body)
        if self.rules.held > self.rules.most_held and self._held > FAIR_BYTES:
            text = "bodies on their way are too many bytes in all, and this one is long (limits.queue_bytes)"
            self._turn_away(429, "overloaded", text, b"retry-after: 1\r\n")
            return
        if isinstance(cycle, Quick):
            cycle.body += body
        else:
            super().on_body(body)

    def _let_go(self) -> None:
        """Its body has come whole, or never will."""
        self.rules.held -= self._held
        self._held = 0

    def on_message_complete(self) -> None:
        self._let_go()
        if self._upgrades:
            return
        self.stage = AT_WORK if self._open else IDLE
        cycle: Any = self.cycle
        if isinstance(cycle, Quick):
            cycle.whole = self._reading  # unless more follows: then it is not all that was read
            self._reading = b""
            self.rules.app.begin(cycle.request, bytes(cycle.body), cycle.respond)
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """As uvicorn does it, but it is the janitor who looks for idle connections: a timer a response costs more."""
        self.server_state.total_requests += 1
        self._open -= 1
        if self.transport.is_closing():
            return
        self.since = self.loop.time()  # whoever had to wait for us has its whole time from now on
        if self.stage == AT_WORK and not self._open:
            self.stage = IDLE
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            task = self.loop.create_task(cycle.run_asgi(app))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
        elif self.last_words is not None and not self._open:
            self._turn_away(*self.last_words)
        elif self._ended and not self._open:
            self.transport.close()
        self.flow.resume_reading()

    def _unfinished(self) -> bool:
        """A request is being read, and not answered before its end."""
        return self.stage == READING_BODY and not self.cycle.response_complete

    def _is_owing(self) -> bool:
        """Requests that came before the one that is being read have no answers yet."""
        return self._open > self._unfinished()

    def _drop_unfinished(self) -> None:
        """It waits behind others, and its end will never come."""
        self.pipeline.popleft()
        self._open -= 1
        self.stage = AT_WORK

    def look(self, now: float) -> None:
        """From time to time: is it too slow?"""
        rules = self.rules
        if self._is_owing():
            return
        if self.stage == READING_HEAD and now - self.since > rules.header_seconds:
            if not self._head:  # it has said nothing at all
                self.transport.close()
            else:
                text = f"the request's head has not ended within {rules.header_seconds:g} s (http.header_seconds)"
                self._turn_away(408, "request_timeout", text)
        elif self.stage == IDLE and now - self.since > rules.idle_seconds:
            self.transport.close()
        elif self.stage == READING_BODY and now - self.since > rules.body_seconds:
            text = f"the request's body has not ended within {rules.body_seconds:g} s (limits.line_seconds)"
            self._turn_away(408, "request_timeout", text)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP at all."""
        self._turn_away(400, "invalid_request", msg)

    def _turn_away(self, status: int, code: str, text: str, more: bytes = b"") -> None:
        """An answer from outside the app, and the end of the connection."""
        if self.transport.is_closing():
            return
        if self._is_owing():
            if self._unfinished():
                self._drop_unfinished()
            self.stage = AT_WORK
            self.last_words = (status, code, text)
            self.flow.pause_reading()
            return
        if self.stage != READING_BODY or not self.cycle.response_started:  # nobody gets two answers
            body = msgspec.json.encode({"error": {"code": code, "message": text}})
            head = [
                STATUS_LINE[status],
                b"content-type: application/json\r\nconnection: close\r\n",
                more,
                b"x-request-id: %s\r\n" % str(uuid.uuid4()).upper().encode(),
                b"content-length: %d\r\n\r\n" % len(body),
            ]
            self.transport.write(b"".join(head) + body)
        self.stage = AT_WORK
        self.transport.close()


def guarded(rules: Rules) -> Any:
    """The protocol of one face."""
    return type("GuardedProtocol", (Guarded,), {"rules": rules})
