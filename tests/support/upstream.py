"""A server that tools ask, for tests: it keeps what it was sent, and answers as it is told, byte by byte if need be."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit


class Asked(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.target).query, keep_blank_values=True)

    @property
    def page(self) -> str:
        return unquote(self.path)


def http(status: int, body: bytes | str | Any, kind: str = "application/json", *head: str) -> bytes:
    content = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Status", f"Content-Type: {kind}", f"Content-Length: {len(content)}", *head]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


Answers = Callable[[socket.socket, Asked], None]


class Upstream:
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.asked: list[Asked] = []
        self.answer: bytes | Answers = http(200, {"ok": True})
        self.ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                wire, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(wire,), daemon=True).start()

    def _serve(self, wire: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(OSError, ValueError))
            stack.enter_context(wire)
            if self._tls is not None:
                wire = stack.enter_context(self._tls.wrap_socket(wire, server_side=True))
            read = wire.makefile("rb")
            method, target, _ = read.readline().decode("latin-1").split(" ", 2)
            headers = {}
            while line := read.readline().strip().decode("latin-1"):
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            asked = Asked(method, target, headers, read.read(int(headers.get("content-length", "0"))))
            self.asked.append(asked)
            if callable(self.answer):
                self.answer(wire, asked)
            else:
                wire.sendall(self.answer)

    def close(self) -> None:
        self.ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
