"""Calls over HTTP: POST /v1/tools/execute on connections that are kept alive, one call at a time on each."""

from __future__ import annotations

import http.client
import itertools
import re
import select
import socket
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from broker.bench.load import Closed, run
from broker.bench.model import LATE_NS, Lost, Plan, Tally, Tick, clock
from broker.bench.wire import Connection, connect
from broker.cli.common import Unreachable

EXECUTE = "/v1/tools/execute"
OPEN_CONNECTIONS = 32  # of an open loop; a call that is due while all are busy starts late
IDLE_SECONDS = 30.0
ANSWER_SECONDS = 330.0
USUAL = b"HTTP/1.1 200 "
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
END = b"\r\n\r\n"


class Address(NamedTuple):
    host: str
    port: int


class Metrics(Struct):
    error_code: str = ""


class Trouble(Struct):
    code: str = ""
    message: str = ""


class Failure(Struct):
    """What tells of a failure: a ToolResult's members, or those of whoever does not even ask the tool."""

    metrics: Metrics = msgspec.field(default_factory=Metrics)
    stderr: str = ""
    error: Trouble = msgspec.field(default_factory=Trouble)


_decode = msgspec.json.Decoder(Failure).decode


def address(url: str) -> Address:
    """Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ValueError(f"{url!r} is not http://HOST:PORT")
    return Address(parts.hostname, 80 if parts.port is None else parts.port)


def url(place: Address) -> str:
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"http://{host}:{place.port}"


def open_connections(rate: float) -> int:
    """Not so many that they wait for so long that the broker closes them."""
    return max(1, min(OPEN_CONNECTIONS, int(rate * IDLE_SECONDS)))


def ask(place: Address, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """One request on a connection of its own: the answer's status and body."""
    connection = http.client.HTTPConnection(place.host, place.port, timeout=ANSWER_SECONDS)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, UnicodeError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        text = f"no broker serves {url(place)} ({reason}); start one with `broker serve --http HOST:PORT`"
        raise Unreachable(text) from None
    finally:
        connection.close()


def call(tool: str, text: str) -> bytes:
    """A request's body."""
    return b'{"tool":%b,"input":%b}' % (msgspec.json.encode(tool), text.encode())


def request(place: Address, body: bytes) -> bytes:
    host = url(place).removeprefix("http://")
    head = f"POST {EXECUTE} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head.encode(), len(body), body)


def failure(status: int, body: bytes) -> tuple[str, str]:
    """An answer's code and words, if it is not a success."""
    try:
        told = _decode(body)
    except msgspec.DecodeError as error:
        return "bad_reply", f"the answer with status {status} cannot be read: {error}"
    code = told.metrics.error_code or told.error.code or f"http_{status}"
    return code, told.stderr or told.error.message or f"status {status}"


class Http:
    """The HTTP face of a broker, or of somebody who pretends to be one."""

    def __init__(self, place: Address, name: str = "http") -> None:
        self._place = place
        self.name = name

    def measure(self, plan: Plan, tally: Tally, tick: Tick) -> None:
        line = request(self._place, call(plan.tool, plan.input))
        run(
            plan, tally, tick, lambda index: _Exchange(connect(self._place), line, index), _Due if plan.rate else Closed
        )

    def close(self) -> None:
        """A connection lives as long as its case."""


class _Exchange(Connection):
    """Requests go out as lines do; where an answer ends, its head says."""

    __slots__ = ("_missing",)

    def __init__(self, connected: socket.socket, line: bytes, index: int) -> None:
        super().__init__(connected, line, index)
        self._missing = 0  # bytes at least, of an answer that has begun

    def replies(self, data: bytes, head: bytes) -> tuple[int, list[bytes] | None]:  # noqa: ARG002
        """How many answers are whole with this data; the answers, too, if not all of them are successes."""
        parts = self._parts
        parts.append(data)
        if len(data) < self._missing:
            self._missing -= len(data)
            return 0, None
        data = b"".join(parts)
        parts.clear()
        ends = [0]
        while (end := data.find(END, ends[-1])) >= 0:
            length = LENGTH.search(data, ends[-1], end)
            if length is None:
                raise Lost("an answer does not say how long it is, so it cannot be told from the next")
            whole = end + len(END) + int(length[1])
            if whole > len(data):
                break
            ends.append(whole)
        if ends[-1] < len(data):
            parts.append(data[ends[-1] :])
        self._missing = whole - len(data) if end >= 0 else 0
        count = len(ends) - 1
        self.answered += count
        if self.answered > self.started:
            raise Lost("the broker said something that it was not asked")
        if all(data.startswith(USUAL, at) for at in ends[:-1]):
            return count, None
        return count, [data[at:end] for at, end in itertools.pairwise(ends)]

    @staticmethod
    def reason(line: bytes) -> tuple[str, str] | None:
        if line.startswith(USUAL):
            return None
        status = line[len("HTTP/1.1 ") :][:3]
        return failure(int(status) if status.isdigit() else 0, line.partition(END)[2])


class _Due(Closed):
    """Call n is due n / rate seconds after the start, and takes the connection that has been idle longest."""

    def __init__(
        self, plan: Plan, tally: Tally, tick: Tick, connections: list[Connection], epoll: select.epoll
    ) -> None:
        super().__init__(plan, tally, tick, connections, epoll)
        self._idle = list(connections)
        self._begun = self._upto = 0

    def _due(self, number: int) -> int:
        return self.born + int(number * 1e9 / self.plan.rate)

    def start(self, now: int) -> int:
        self._upto = int((min(now, self.end - 1) - self.born) * self.plan.rate / 1e9) + 1
        while self._idle and self._begun < self._upto:
            self._next(self._idle.pop(0))
        return self._due(self._upto)

    def make_room(self, connection: Connection, calls: int) -> None:  # noqa: ARG002
        """At the end, too: what was due before it still has to be called."""
        if self._begun < self._upto:
            self._next(connection)
        else:
            self._idle.append(connection)

    def _next(self, connection: Connection) -> None:
        due = self._due(self._begun)
        self._begun += 1
        connection.runs.append((due, 1))
        self.send(connection, 1)
        self.tally.late += due >= self.begin and clock() - due > LATE_NS

    def waiting_since(self) -> Iterator[int]:
        yield from super().waiting_since()
        yield from (self._due(number) for number in range(self._begun, self._upto))
