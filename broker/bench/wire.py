"""One connection: equal lines out in batches, lines in counted by their ends, nothing decoded."""

from __future__ import annotations

import re
import socket
from collections import deque

from broker.bench.model import Lost, failure

CONNECT_SECONDS = 5.0
CHUNK = 1 << 16  # a read; below malloc's threshold for mapping, so that it is never mapped anew
BLOCK = 1 << 18  # of prebuilt lines
# Members without quotes in them, then the status: whatever begins with these bytes is a success, and no other need be.
HEAD = re.compile(rb'\{(?:"\w+": ?(?:true|null|\d+), ?)*"status": ?"OK"')


class Connection:
    """Every line is the same, so what is still to be sent is only a number of bytes."""

    __slots__ = ("_block", "_line", "_parts", "answered", "blocked", "index", "runs", "socket", "started", "unsent")

    def __init__(self, connected: socket.socket, line: bytes, index: int = 0) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.index = index
        self._line = len(line)
        self._block = memoryview(line * max(1, BLOCK // len(line)))
        self._parts: list[bytes] = []  # of a reply whose end has not arrived
        self.unsent = 0
        self.blocked = False  # the socket has taken all that it can
        self.started = 0
        self.answered = 0
        self.runs: deque[tuple[int, int]] = deque()  # closed loop: (when, how many were begun)

    def begin(self, calls: int) -> None:
        self.started += calls
        self.unsent += calls * self._line
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes."""
        self.blocked = False
        while self.unsent:
            at = -self.unsent % self._line  # the last byte that is due ends a line
            try:
                sent = self.socket.send(self._block[at : at + self.unsent])
            except BlockingIOError:
                self.blocked = True
                return
            except OSError as error:
                raise Lost(f"the broker has closed the connection ({error.strerror or error})") from None
            self.unsent -= sent

    def written(self) -> int:
        """How many lines the socket has taken."""
        return self.started - -(-self.unsent // self._line)

    def receive(self) -> bytes:
        """What is there; empty if nothing is."""
        try:
            data = self.socket.recv(CHUNK)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise Lost(f"the broker has closed the connection ({error.strerror or error})") from None
        if not data:
            raise Lost("the broker has closed the connection")
        return data

    def replies(self, data: bytes, head: bytes) -> tuple[int, list[bytes] | None]:
        """How many replies have ended with this data; their lines, too, if not all of them begin with `head`."""
        end = data.rfind(b"\n") + 1
        parts = self._parts
        if not end:
            parts.append(data)
            return 0, None
        count = data.count(b"\n", 0, end)
        first = parts[0] if parts else data
        usual = data.count(b"\n" + head, 0, end) + first.startswith(head) if head else 0
        lines = None
        if usual != count:
            lines = (b"".join(parts) + data[:end]).split(b"\n")[:-1]
        parts.clear()
        if end < len(data):
            parts.append(data[end:])
        self.answered += count
        if self.answered > self.started:
            raise Lost("the broker said something that it was not asked, and so cannot be matched with calls")
        return count, lines

    @staticmethod
    def reason(line: bytes) -> tuple[str, str] | None:
        """A reply's code and words, if it is not a success."""
        return failure(line)

    def close(self) -> None:
        self.socket.close()


def connect(place: str | tuple[str, int]) -> socket.socket:
    """A Unix socket's path, or a host and a port."""
    connected = None
    try:
        if not isinstance(place, str):
            connected = socket.create_connection(place, CONNECT_SECONDS)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connected
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(CONNECT_SECONDS)
        connected.connect(place)
    except OSError as error:
        if connected is not None:
            connected.close()
        raise Lost(f"no connection to the broker could be made ({error.strerror or error})") from None
    return connected


def head_of(line: bytes) -> bytes:
    """How a success of this tool begins, if that tells it from others; else nothing."""
    found = HEAD.match(line)
    return found.group() if found else b""
