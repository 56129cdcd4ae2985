"""What all pools and connections of one loop share: the C module's scratch memory, and the round's pending writes."""

from __future__ import annotations

import asyncio
from typing import Protocol

from broker._native import ffi, lib


class Flushable(Protocol):
    def flush(self) -> None: ...


class Core:
    """Within one callback, replies and requests are only collected; `flush` then writes once per peer."""

    __slots__ = ("dirty", "loop", "processes", "queued_bytes", "scanned", "take_batch", "taken", "view")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.scanned = ffi.gc(lib.tb_batch_new(), lib.tb_batch_free)
        self.take_batch = ffi.gc(lib.tb_batch_new(), lib.tb_batch_free)
        self.view = ffi.new("tb_view *")
        self.taken = ffi.new("tb_taken *")
        self.dirty: list[Flushable] = []
        self.processes = 0  # of all pools
        self.queued_bytes = 0  # of all callers

    def flush(self) -> None:
        while self.dirty:
            dirty, self.dirty = self.dirty, []
            for peer in dirty:
                peer.flush()
