"""What all pools and connections of one loop share: the C module's scratch memory, and the round's pending writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from broker._native import ffi, lib
from broker.model import Policy

IDLE_WINDOW_SECONDS = 0.1


class Flushable(Protocol):
    def flush(self) -> None: ...


class Core:
    """Within one callback, replies and requests are only collected; `flush` then writes once per peer."""

    __slots__ = (
        "_cpu",
        "dirty",
        "loop",
        "make_room",
        "partial_bytes",
        "policy",
        "processes",
        "queued_bytes",
        "round",
        "scanned",
        "take_batch",
        "taken",
        "view",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.scanned = ffi.gc(lib.tb_batch_new(), lib.tb_batch_free)
        self.take_batch = ffi.gc(lib.tb_batch_new(), lib.tb_batch_free)
        self.view = ffi.new("tb_view *")
        self.taken = ffi.new("tb_taken *")
        self.dirty: list[Flushable] = []
        self._cpu = (0.0, 0, 0, 1.0)  # when, idle ticks and all ticks then, the idle share until then
        self.policy: Policy  # set once, by the broker
        self.make_room: Callable[[], None]  # an idle process leaves, if one can; also the broker's
        self.round = 0  # counts the reads from callers: what was true at the last one need not be looked at again
        self.processes = 0  # of all pools
        self.queued_bytes = 0  # of all callers
        self.partial_bytes = 0  # of long lines that have not ended, of all callers

    def idle(self) -> float:
        """The share of the machine's processors that has been idle recently."""
        now = time.monotonic()
        when, idle, total, share = self._cpu
        if now - when >= IDLE_WINDOW_SECONDS:
            try:
                with open("/proc/stat", "rb") as stat:
                    ticks = [int(part) for part in stat.readline().split()[1:9]]
            except OSError:  # out of descriptors: what was true is the best guess
                return share
            idle_now, total_now = ticks[3] + ticks[4], sum(ticks)
            if when and total_now > total:
                share = (idle_now - idle) / (total_now - total)
            self._cpu = (now, idle_now, total_now, share)
        return share

    def flush(self) -> None:
        while self.dirty:
            dirty, self.dirty = self.dirty, []
            for peer in dirty:
                try:
                    peer.flush()
                except Exception as error:  # one peer's trouble is not the others'
                    self.loop.call_exception_handler({"message": "a peer could not be written to", "exception": error})
