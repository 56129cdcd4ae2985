"""A call that is heard of while it runs: its events one by one, its reply in the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
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

    It has a connection of its own: whoever takes its time over an event makes the tool wait, and nobody else.
    """

    def __init__(self, aid: str, line: bytes, seconds: float, connect: Open, failure: Callable[..., Exception]) -> None:
        self.aid = aid
        self.reply: Reply | None = None
        self._failure = failure
        self._events = self._run(line, seconds, connect)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Nobody listens any more; the call itself runs to its end."""
        await self._events.aclose()  # type: ignore[attr-defined]

    async def _run(self, line: bytes, seconds: float, connect: Open) -> AsyncIterator[Event]:
        try:
            reader, writer = await connect()
        except Lost as lost:
            raise self._failure(self.aid, lost) from None
        try:
            writer.write(line)
            async for one in self._lines(reader, seconds):
                event = event_in(one)
                if event is None:
                    self.reply = read(self.aid, one)
                    return
                yield event
            raise self._failure(self.aid, Lost("the connection to the broker was lost", sent=True))
        finally:
            writer.close()

    async def _lines(self, reader: asyncio.StreamReader, seconds: float) -> AsyncIterator[bytes]:
        """`seconds` is the broker's time for the whole call, without what the reader of the events takes."""
        buffer, searched = bytearray(), 0
        while True:
            while (end := buffer.find(b"\n", searched)) >= 0:
                line = bytes(buffer[: end + 1])
                del buffer[: end + 1]
                searched = 0
                yield line
            searched = len(buffer)
            data = b""
            with contextlib.suppress(OSError):
                try:
                    async with asyncio.timeout(seconds):
                        data = await reader.read(CHUNK)
                except TimeoutError:
                    lost = Lost(f"the broker said nothing within {seconds:g} s", sent=True, late=True)
                    raise self._failure(self.aid, lost) from None
            if not data:
                return
            buffer += data
