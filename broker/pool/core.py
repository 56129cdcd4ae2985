"""The loop's switchboard (native/board.h): what passes by itself stays in C; rows are brought to those they are for."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

from broker._native import ffi, lib
from broker.model import Policy, Tool, Work
from broker.pool.rules import SPIN_SECONDS
from broker.settings import Limits

IDLE_WINDOW_SECONDS = 0.1
OUTBOX_HIGH = 1024 * 1024  # a caller that does not read its replies is not read from either
WHO, ROW = lib.TB_R_WHO, lib.TB_ROW


class Peer(Protocol):
    """A caller's connection or a toolhost, as the board knows it by its number."""

    def row(self, row: list[int], data: Any) -> None:
        """Something of its own needs a judgement (TB_ROW_…). `data` is valid for now."""


class Core:
    """What all pools and connections of one loop share. Within one callback, replies and requests are only collected;
    `flush` then writes once per peer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits) -> None:
        self.loop = loop
        self.board = ffi.gc(lib.tb_board_new([_limits(limits)]), lib.tb_board_free)
        if self.board == ffi.NULL:
            raise MemoryError
        self.peers: dict[int, Peer] = {}
        self.tools: dict[int, Tool] = {}  # by index
        self.policy: Policy  # set once, by the broker
        self.make_room: Callable[[], None]  # an idle process leaves, if one can; also the broker's
        self.processes = 0  # of all pools
        self.queued_bytes = 0  # of all callers
        self.waiting_bytes: Callable[[], int] = int  # of calls that wait for their sessions; the broker's
        self._names = itertools.count(1)
        self._rows = ffi.new("tb_rows *")
        self._busy = False
        self._resuming = False
        self._cpu = (0.0, 0, 0, 1.0)  # when, idle ticks and all ticks then, the idle share until then
        loop.add_reader(lib.tb_board_fd(self.board), self._turn)

    def close(self) -> None:
        self.loop.remove_reader(lib.tb_board_fd(self.board))

    def name(self) -> int:
        """A number that no other peer has."""
        return next(self._names)

    def learn(self, tool: Tool) -> None:
        """From now on the board knows the tool."""
        self.tools[tool.index] = tool
        if lib.tb_board_tool(self.board, tool.stats):
            raise MemoryError

    def forget(self, kept: set[int]) -> None:
        """All tools but these are gone, and nobody has calls of theirs any more."""
        for index in self.tools.keys() - kept:
            lib.tb_board_forget(self.board, index)
            del self.tools[index]

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

    def hand(self, work: Work) -> bool:
        """A plain call goes straight to a toolhost, where nothing stands against it; its reply goes to its sink."""
        number = next(self._names)
        name = lib.tb_board_hand(self.board, work.tool.stats, work.caller.number, number, work.lines, len(work.lines))
        if not name:
            return False
        self.peers[name].works[number] = work  # type: ignore[attr-defined]
        return True

    # --- turns ------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        rows = self._rows
        if lib.tb_board_turn(self.board, rows):
            self._complain(MemoryError("the switchboard is out of memory"))
        if rows.count or rows.again:
            self._work_off()

    def flush(self) -> None:
        """Writes what there is to write, and sees to what comes of it."""
        if self._busy:  # whoever is at it flushes in the end
            return
        self._fetch()
        if self._rows.count or self._rows.again:
            self._work_off()

    def _fetch(self) -> None:
        self.board.queued_bytes = self.queued_bytes + self.waiting_bytes()
        if lib.tb_board_fetch(self.board, self._rows):
            self._complain(MemoryError("the switchboard is out of memory"))

    def _work_off(self) -> None:
        self._busy = True
        try:
            while self._rows.count:
                self._see_to_rows()
                self._fetch()
        finally:
            self._busy = False
        if self._rows.again and not self._resuming:
            self._resuming = True
            self.loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        self._turn()

    def _see_to_rows(self) -> None:
        count, data = self._rows.count, self._rows.data
        numbers = ffi.unpack(self._rows.rows, count * ROW)
        for at in range(0, count * ROW, ROW):
            peer = self.peers.get(numbers[at + WHO])
            if peer is None:
                continue  # it has left
            try:
                peer.row(numbers[at : at + ROW], data)
            except Exception as error:  # one peer's trouble is not the others'
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        self.loop.call_exception_handler({"message": "a peer could not be served", "exception": error})


def _limits(limits: Limits) -> dict[str, Any]:
    return {
        "connection_calls": limits.connection_calls,
        "connection_bytes": limits.connection_bytes,
        "outbox_bytes": OUTBOX_HIGH,
        "queue_bytes": limits.queue_bytes,
        "request_bytes": limits.request_bytes,
        "reply_bytes": limits.reply_bytes,
        "depth": limits.depth,
        "max_timeout": limits.max_timeout_seconds,
        "spin": SPIN_SECONDS,
    }
