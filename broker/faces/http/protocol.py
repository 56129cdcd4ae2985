"""uvicorn's protocol, with bounds: heads and bodies must come in time and in size, and who hangs up is noticed."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

if TYPE_CHECKING:
    from broker.faces.http.caller import Caller, HttpCall

HEAD_BYTES = 64 * 1024
READING_HEAD, READING_BODY, AT_WORK = "head", "body", "work"


class Rules:
    """What all connections of one face share."""

    def __init__(self, caller: Caller, header_seconds: float, body_seconds: float, most: int) -> None:
        self.caller = caller
        self.header_seconds = header_seconds
        self.body_seconds = body_seconds
        self.most = most


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
        if call is not None and not call.answer.done():
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
        super().on_message_begin()
        self.scope["broker"] = self  # type: ignore[typeddict-unknown-key]
        self.stage = READING_HEAD
        self.since = self.loop.time()

    def on_headers_complete(self) -> None:
        self._head = 0
        self.stage = READING_BODY
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.stage = AT_WORK
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.stage == AT_WORK:
            self.stage = ""
        super().on_response_complete()

    def look(self, now: float) -> None:
        """From time to time: is it too slow?"""
        rules = self.rules
        if self.stage == READING_HEAD and now - self.since > rules.header_seconds:
            if not self._head:  # it has said nothing at all
                self.transport.close()
            else:
                text = f"the request's head has not ended within {rules.header_seconds:g} s (http.header_seconds)"
                self._turn_away(408, "request_timeout", text)
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
        self.stage = ""
        self.transport.close()


def guarded(rules: Rules) -> Any:
    """The protocol of one face."""
    return type("GuardedProtocol", (Guarded,), {"rules": rules})
