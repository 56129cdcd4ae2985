"""One call with one child: the request in, the answer out, what it said meanwhile. Blocking, until the deadline."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from typing import Any

import msgspec

from broker.pool.verdicts import STDERR_KEPT
from broker.runtimes.python.server import Child

CHUNK = 1 << 18
LATE, TOO_LONG, DEAD, JUNK, UNASKED = "late", "too long", "dead", "junk", "unasked"
LAST_SECONDS = 0.2  # from the end of its wire to its own
HEAD_BYTES = 1 << 20  # of an answer, at most: the names of modules are in it

_encode = msgspec.json.Encoder().encode


class Head(msgspec.Struct):
    ok: bool
    size: int
    modules: list[str] = []  # that it has imported, of those that are kept warm
    sources: list[str] = []  # of the app, that it has compiled


class Heard(msgspec.Struct):
    """What came of it: an answer, or why there is none."""

    ended: str = ""
    head: Head | None = None
    text: bytes = b""
    said: bytes = b""  # on stderr


def frame(entry: str, guarded: bool, payload: bytes) -> bytes:
    """A request."""
    asked = _encode({"entry": entry, "guarded": guarded})
    return len(asked).to_bytes(4, "big") + len(payload).to_bytes(4, "big") + asked + payload


def say(child: Child, request: bytes) -> int:
    """As much of it as can be said without waiting: so many bytes."""
    try:
        return child.wire.send(request[:CHUNK], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:  # not now; or it is dead, and whoever says the rest finds that out
        return 0


def converse(child: Child, request: bytes, said: int, deadline: float, most: int) -> Heard:
    """The rest of a request, and the answer."""
    try:
        if said < len(request):
            child.wire.settimeout(max(0.001, deadline - time.monotonic()))
            child.wire.sendall(memoryview(request)[said:], socket.MSG_NOSIGNAL)
    except TimeoutError:
        return Heard(LATE)
    except OSError:  # it was dead before it had the whole of the request
        return Heard(UNASKED)
    child.wire.setblocking(False)
    return _listen(child, deadline, most)


def _listen(child: Child, deadline: float, most: int) -> Heard:
    heard = Heard()
    received, said = bytearray(), bytearray()
    poller = select.poll()
    for fd in (child.wire.fileno(), child.stderr, child.pidfd):
        poller.register(fd, select.POLLIN)
    while not heard.ended and (wait := deadline - time.monotonic()) > 0:
        ready = {fd for fd, _ in poller.poll(wait * 1000 + 1)}
        if child.stderr in ready and not _read_stderr(child, said):
            poller.unregister(child.stderr)
        if child.wire.fileno() in ready or child.pidfd in ready:
            over = _read_wire(child, received) or child.pidfd in ready
            if heard.head is None and (end := received.find(b"\n", 0, HEAD_BYTES)) >= 0:
                try:
                    heard.head = msgspec.json.decode(received[:end], type=Head)
                except msgspec.DecodeError:
                    heard.ended = JUNK
                    break
                del received[: end + 1]
            if heard.head is not None and heard.head.size > most:
                heard.ended = TOO_LONG
            elif heard.head is not None and len(received) >= heard.head.size:
                heard.text = bytes(received)
                break
            elif over:
                heard.ended = DEAD
            elif heard.head is None and len(received) > HEAD_BYTES:
                heard.ended = JUNK
    else:
        heard.ended = heard.ended or LATE
    if heard.ended == DEAD:  # it has let go of its wire; how it ends is worth a moment
        poller = select.poll()
        poller.register(child.pidfd, select.POLLIN)
        poller.poll(min(LAST_SECONDS, max(0.0, deadline - time.monotonic())) * 1000)
    _read_stderr(child, said)
    heard.said = bytes(said)
    return heard


def _read_wire(child: Child, received: bytearray) -> bool:
    """All that is there. Whether that was the last of it."""
    try:
        while data := child.wire.recv(CHUNK):
            received += data
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _read_stderr(child: Child, said: bytearray) -> bool:
    """False at its end."""
    with contextlib.suppress(BlockingIOError):
        data: Any = os.read(child.stderr, CHUNK)
        said += data
        del said[:-STDERR_KEPT]
        return bool(data)
    return True
