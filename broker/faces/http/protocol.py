"""uvicorn's protocol, with bounds: heads and bodies must come in time and in size, and who hangs up is noticed."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from broker.faces.http.request import Request, Response

if TYPE_CHECKING:
    from broker.config import Http
    from broker.faces.http.app import App
    from broker.faces.http.caller import Caller, HttpCall

HEAD_BYTES = 64 * 1024
EXECUTE = "/v1/tools/execute"
EXECUTE_URL = EXECUTE.encode()
READING_HEAD, READING_BODY, AT_WORK, IDLE = "head", "body", "work", "idle"


class Rules:
    """What all connections of one face share."""

    def __init__(self, app: App, caller: Caller, settings: Http, body_seconds: float) -> None:
        self.app = app
        self.caller = caller
        self.body_bytes = settings.body_bytes
        self.header_seconds = settings.header_seconds
        self.idle_seconds = settings.idle_seconds
        self.body_seconds = body_seconds
        self.most = settings.max_connections
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


class Quick:
    """A call under way that has no ASGI task of its own; what uvicorn's protocol wants to know of one is here, too."""

    __slots__ = ("body", "disconnected", "keep_alive", "link", "request", "response_complete", "response_started")

    def __init__(self, link: Guarded, request: Request, keep_alive: bool) -> None:
        self.link = link
        self.request = request
        self.keep_alive = keep_alive
        self.body = bytearray()
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


class Guarded(HttpToolsProtocol):
    rules: Rules  # of the class that a face makes of this

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.call: HttpCall | None = None
        self.stage = READING_HEAD
        self.since = self.loop.time()
        self._head = 0  # bytes of a head that has not ended
        if len(self.connections) > self.rules.most:
            text = f"there are {self.rules.most} connections already (http.max_connections)"
            self._turn_away(429, "too_many_requests", text, b"retry-after: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        call, self.call = self.call, None
        if call is not None and call.waiting():
            self.rules.caller.hang_up(call)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A caller that has said all that it wanted may still be waiting for the answer."""
        if self.cycle is None or self.cycle.response_complete or self.stage != AT_WORK:
            return None
        self.cycle.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.stage != READING_HEAD:
            return
        self._head += len(data)
        if self._head > HEAD_BYTES:
            self._turn_away(431, "head_too_large", f"the request's head is over {HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """What uvicorn prepares for an ASGI task is prepared when one is needed."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self.stage = READING_HEAD
        self.since = self.loop.time()

    def on_headers_complete(self) -> None:
        self._head = 0
        self.stage = READING_BODY
        if self._is_quick():
            request = Request("POST", EXECUTE, self.headers, self)
            self.cycle = Quick(self, request, self.parser.should_keep_alive())  # type: ignore[assignment]
            return
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expect
        self.scope["headers"] = headers
        self.scope["broker"] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def _is_quick(self) -> bool:
        """Most requests are: a call, alone on its connection, whose length is known. A task of its own for each would
        cost as much as all that is done for it."""
        if self.url != EXECUTE_URL or self.parser.get_method() != b"POST" or self.expect_100_continue:
            return False
        if (self.cycle is not None and not self.cycle.response_complete) or self.flow.write_paused:
            return False
        length = next((value for name, value in self.headers if name == b"content-length"), b"")
        return length.isdigit() and int(length) <= self.rules.body_bytes and self.parser.get_http_version() == "1.1"

    def on_body(self, body: bytes) -> None:
        cycle: Any = self.cycle
        if isinstance(cycle, Quick):
            cycle.body += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self.stage = AT_WORK
        cycle: Any = self.cycle
        if isinstance(cycle, Quick):
            self.rules.app.begin(cycle.request, bytes(cycle.body), cycle.respond)
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """As uvicorn does it, but it is the janitor who looks for idle connections: a timer a response costs more."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.stage == AT_WORK:
            self.stage = IDLE
            self.since = self.loop.time()
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)

    def look(self, now: float) -> None:
        """From time to time: is it too slow?"""
        rules = self.rules
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
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
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
