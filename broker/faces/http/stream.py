"""Server-sent events of one call: `event` for each of the tool's, and in the end `result`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from broker.faces.http.request import Response

KIND = b"text/event-stream"
HIGH = 256 * 1024  # bytes that nobody has read yet, before the tool has to wait
QUIET_SECONDS = 15.0  # then a word is said, so that nobody between takes the stream for dead
FRESH = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))


def is_wanted(accept: bytes) -> bool:
    return KIND in accept.lower()


class CallStream:
    """What a call says while it runs, until it has its result."""

    def __init__(self, room: Callable[[], object]) -> None:
        self.answer: Response | None = None  # where there is nothing to stream: the call was refused
        self._room = room  # told when what was waiting has been read
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._bell = asyncio.Event()
        self._over = False
        self._begun = False

    def hear(self, members: bytes) -> None:
        self._say(b"event: event\ndata: {%b}\n\n" % members)

    def behind(self) -> bool:
        return not self._over and self._size > HIGH

    def done(self, response: Response) -> None:
        """The call's answer. A refusal before the stream has begun is the request's."""
        if not self._begun and response.status != 200:
            self.answer = response
            return
        body = response.body
        assert isinstance(body, bytes)
        self._over = True
        self._say(b"event: result\ndata: %b\n\n" % body)

    def begin(self) -> Response:
        self._begun = True
        return Response(200, self._read(), KIND, FRESH)

    def _say(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        self._bell.set()

    async def _read(self) -> AsyncGenerator[bytes, None]:
        try:
            while self._parts or not self._over:
                if not self._parts:
                    self._bell.clear()
                    try:
                        await asyncio.wait_for(self._bell.wait(), QUIET_SECONDS)
                    except TimeoutError:
                        yield b": still running\n\n"
                    continue
                part = self._parts.popleft()
                waited = self.behind()
                self._size -= len(part)
                if waited and not self.behind():
                    self._room()
                yield part
        finally:
            self._over = True
            self._room()
