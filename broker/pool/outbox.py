"""Bytes on their way out of a descriptor that does not block: written at once where possible, else when it is ready."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable


class Outbox:
    """Keeps what the peer has not taken yet. `broken` is called, once, when the peer cannot be written to any more."""

    __slots__ = ("_broken", "_chunks", "_drained", "_fd", "_loop", "_watching", "size")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        broken: Callable[[], None],
        drained: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._broken = broken
        self._drained = drained
        self._chunks: deque[bytes | memoryview] = deque()
        self._watching = False
        self.size = 0

    def put(self, data: bytes) -> None:
        """Queues; nothing is written before `flush`."""
        self._chunks.append(data)
        self.size += len(data)

    def flush(self) -> None:
        if self._chunks and not self._watching:
            self._write()

    def _write(self) -> None:
        chunks = self._chunks
        try:
            while chunks:
                if len(chunks) == 1:
                    written = os.write(self._fd, chunks[0])
                else:
                    written = os.writev(self._fd, [chunks[i] for i in range(min(len(chunks), 256))])
                self.size -= written
                while written:
                    first = chunks[0]
                    if written < len(first):
                        chunks[0] = memoryview(first)[written:]
                        break
                    written -= len(first)
                    chunks.popleft()
        except BlockingIOError:
            if not self._watching:
                self._watching = True
                self._loop.add_writer(self._fd, self._write)
            return
        except OSError:
            self.close()
            self._broken()
            return
        if self._watching:
            self._watching = False
            self._loop.remove_writer(self._fd)
            if self._drained:
                self._drained()

    def close(self) -> None:
        """Forgets what is left; the descriptor is the owner's to close."""
        if self._watching:
            self._watching = False
            self._loop.remove_writer(self._fd)
        self._chunks.clear()
        self.size = 0
