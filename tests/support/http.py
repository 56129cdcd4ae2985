"""An HTTP client for tests: one request a call, as bytes on the wire where that matters."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Web:
    """The HTTP face of a broker. (Its ready line says where it is.)"""

    def __init__(self, ready: str) -> None:
        place = next(word for word in ready.split() if word.startswith("http://")).removeprefix("http://")
        self.host, _, port = place.rpartition(":")
        self.port = int(port)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 20.0
    ) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            if body is not None and not isinstance(body, bytes | str):
                body = json.dumps(body)
            content = body.encode() if isinstance(body, str) else body
            connection.request(method, path, content, headers or {})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def execute(self, tool: str, given: Any = None, *, headers: dict[str, str] | None = None, **more: Any) -> Answer:
        return self.ask("POST", "/v1/tools/execute", {"tool": tool, "input": given, **more}, headers)

    def socket(self, timeout: float = 20.0) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout)

    def raw(self, data: bytes, timeout: float = 20.0) -> bytes:
        """All that comes until the connection ends."""
        with self.socket(timeout) as wire:
            wire.sendall(data)
            received = b""
            while part := wire.recv(65536):
                received += part
            return received


def answer_on(wire: socket.socket) -> Answer:
    """The next one, however many pieces it comes in; what follows stays in the socket."""
    response = http.client.HTTPResponse(_Unbuffered(wire))  # type: ignore[arg-type]
    response.begin()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


class _Unbuffered:
    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire

    def makefile(self, mode: str) -> Any:
        return self._wire.makefile(mode, buffering=0)  # type: ignore[call-overload]


def until_the_end(wire: socket.socket) -> bytes:
    received = b""
    while part := wire.recv(65536):
        received += part
    return received
