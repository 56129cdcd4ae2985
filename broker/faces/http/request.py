"""One HTTP request, as routes see it; and what they answer."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from broker import errors
from broker.errors import Refusal
from broker.faces.caller import Asker

JSON = b"application/json"
TRACE = re.compile(rb"(00-[0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2})")
VISIBLE = re.compile(rb"[\x21-\x7e\x80-\xff]([\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?")

_sorted = msgspec.json.Encoder(order="sorted").encode


def _ids() -> Iterator[bytes]:
    """Upper-case UUIDs. Their first part is random, and this process's alone; the rest counts."""
    while True:
        words = secrets.token_hex(9).upper()
        start = f"{words[:8]}-{words[8:12]}-4{words[12:15]}-A{words[15:18]}-".encode()
        for number in range(1 << 32):
            yield b"%b%012X" % (start, number)


_names = _ids()


class Response(NamedTuple):
    status: int
    body: bytes | AsyncGenerator[bytes, None]
    type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class HungUp(Exception):
    """Nobody is there any more."""


class Request:
    __slots__ = ("_query", "_receive", "asker", "headers", "id", "link", "method", "path", "raw_path")

    def __init__(
        self,
        method: str,
        path: str,
        headers: list[tuple[bytes, bytes]] | dict[bytes, bytes],
        link: Any,
        receive: Callable[[], Awaitable[Any]] | None = None,
        query: bytes = b"",
        raw_path: bytes = b"",
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers if isinstance(headers, dict) else dict(headers)
        self.link = link  # the connection
        self.raw_path = raw_path.decode("latin-1")
        self._query = query
        self._receive = receive
        asked = self.headers.get(b"x-request-id", b"").strip()
        self.id: bytes = asked if asked and VISIBLE.fullmatch(asked) else next(_names)
        self.asker: Asker  # set by the app, first of all

    @property
    def name(self) -> str:
        """The request's id, for people."""
        return self.id.decode("latin-1")

    def parameters(self) -> dict[str, str]:
        return dict(parse_qsl(self._query.decode("latin-1"), keep_blank_values=True))

    def header(self, name: bytes) -> str:
        value = self.headers.get(name)
        return value.strip().decode("latin-1") if value else ""

    def session(self) -> str:
        """Whose state it is about: as UTF-8, so that it is the same name in an address."""
        named = self.headers.get(b"broker-session", b"").strip()
        try:
            return named.decode()
        except UnicodeDecodeError:
            return named.decode("latin-1")

    def trace(self) -> bytes:
        """The trace goes on, under a span of our own; empty where there is none."""
        found = TRACE.fullmatch(self.headers.get(b"traceparent", b"").strip())
        return b"%s-%s-%s" % (found[1], secrets.token_hex(8).encode(), found[2]) if found else b""

    async def body(self, most: int) -> bytes | None:
        """All of it; None where it is longer. The rest is then read away by the connection."""
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            return None
        assert self._receive is not None
        message = await self._receive()
        whole: bytes = message.get("body", b"")
        if message["type"] == "http.request" and not message["more_body"]:
            return whole if len(whole) <= most else None
        parts, size = [whole], len(whole)
        while message["type"] == "http.request" and message["more_body"]:
            message = await self._receive()
            part = message.get("body", b"")
            parts.append(part)
            size += len(part)
            if size > most:
                return None
        if message["type"] != "http.request":
            raise HungUp
        return b"".join(parts)


def trouble(status: int, code: str, message: str, **details: Any) -> Response:
    """An error outside of a ToolResult."""
    error: dict[str, Any] = {"code": code, "message": message}
    if details:
        error["details"] = details
    return Response(status, _sorted({"error": error}))


def refused(refusal: Refusal) -> Response:
    kind = refusal.kind
    answer = trouble(
        kind.http, kind.code, refusal.text, **{k: v for k, v in refusal.extra.items() if k != "retry_after"}
    )
    return answer._replace(headers=retry_after(refusal))


def retry_after(refusal: Refusal) -> tuple[tuple[bytes, bytes], ...]:
    if refusal.kind.http not in (errors.OVERLOADED.http, errors.BREAKER_OPEN.http):
        return ()
    return ((b"retry-after", b"%d" % refusal.extra.get("retry_after", 1)),)


def answered(value: Any, status: int = 200) -> Response:
    return Response(status, _sorted(value))
