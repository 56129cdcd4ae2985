"""A call that is heard of while it runs: its events one by one, its reply in the end."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from broker.client.reply import Reply, read
from broker.client.sync import Lost

CHUNK = 64 * 1024

Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Event(Struct, frozen=True):
    """What a tool has said while it ran, and what the broker has made of it."""

    body: dict[str, Any]  # as the tool wrote it
    asset: dict[str, Any] | None = None  # what became of the file: its `url` where it was registered, else a `reason`
    choice: dict[str, Any] | None = None  # `prompt` and `choices` of a narrative_choice, in one form
    placeholder: dict[str, Any] | None = None  # of what cannot be shown: a `text`, and all that there is

    @property
    def type(self) -> str:
        return str(self.body["type"])


class _Line(Struct):
    event: Raw = Raw(b"")
    asset: dict[str, Any] | None = None
    choice: dict[str, Any] | None = None
    placeholder: dict[str, Any] | None = None


_line = msgspec.json.Decoder(_Line)


def event_in(line: bytes) -> Event | None:
    """The event that a line from the broker tells of; none where it is the reply."""
    said = _line.decode(line)
    if not bytes(said.event):
        return None
    return Event(msgspec.json.decode(said.event), said.asset, said.choice, said.placeholder)


class EventStream:
    """An asynchronous iterator of events. After the last one, `reply` is there; a call that failed raises then.

    It has a connection of its own: whoever takes its time over an event makes the tool wait, and nobody else. An event
    that was not waited for (`asyncio.wait_for(anext(stream), 1)`) is there the next time.
    """

    def __init__(self, aid: str, line: bytes, seconds: float, connect: Open, failure: Callable[..., Exception]) -> None:
        self.aid = aid
        self.reply: Reply | None = None
        self._line = line
        self._seconds = seconds  # the broker's time for the whole call, without what the reader of the events takes
        self._connect = connect
        self._failure = failure
        self._reader: asyncio.StreamReader | None = None
        self._hang_up: Callable[[], object] = lambda: None
        self._over = False
        self._buffer = bytearray()
        self._searched = 0

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        try:
            line = await self._next_line()
            event = event_in(line)
            if event is not None:
                return event
            self._over = True
            self.reply = read(self.aid, line)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._over = True
            raise
        finally:
            if self._over:
                self._hang_up()
        raise StopAsyncIteration

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Nobody listens any more; the call itself runs to its end."""
        self._over = True
        self._hang_up()

    async def _opened(self) -> asyncio.StreamReader:
        """With the first event that is asked for."""
        if self._reader is None:
            try:
                self._reader, writer = await self._connect()
            except Lost as lost:
                raise self._failure(self.aid, lost) from None
            # also where it is just dropped, in the middle of the events
            self._hang_up = weakref.finalize(self, _close, asyncio.get_running_loop(), writer)
            writer.write(self._line)
        return self._reader

    async def _next_line(self) -> bytes:
        reader, buffer = await self._opened(), self._buffer
        while (end := buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(buffer)
            data = b""
            try:
                async with asyncio.timeout(self._seconds):
                    data = await reader.read(CHUNK)
            except TimeoutError:
                lost = Lost(f"the broker said nothing within {self._seconds:g} s", sent=True, late=True)
                raise self._failure(self.aid, lost) from None
            except OSError:
                pass  # it is lost
            if not data:
                raise self._failure(self.aid, Lost("the connection to the broker was lost", sent=True))
            buffer += data
        line = bytes(buffer[: end + 1])
        del buffer[: end + 1]
        self._searched = 0
        return line


def _close(loop: asyncio.AbstractEventLoop, writer: asyncio.StreamWriter) -> None:
    """From any thread, and where the loop may have ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(writer.close)
