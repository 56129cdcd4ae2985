"""What brokers that died have left behind of calls that are over: marks, and requests beside their messages."""

from __future__ import annotations

import asyncio
import random
import time

from broker.bus import Bus
from broker.cluster.kv import Away
from broker.cluster.members import Members
from broker.cluster.objects import Objects
from broker.cluster.queue.marks import decode_mark
from broker.cluster.queue.names import Names
from broker.cluster.queue.store import Store

FIRST_SECONDS = 60.0
PAUSE_SECONDS = 1800.0
YOUNG_SECONDS = 600.0  # it may be in use, though nothing shows it


class Sweep:
    def __init__(
        self, bus: Bus, names: Names, store: Store, members: Members, objects: Objects, patience: float
    ) -> None:
        self._bus = bus
        self._names = names
        self._store = store
        self._members = members
        self._objects = objects
        self._patience = patience
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self._now_and_then())

    async def _now_and_then(self) -> None:
        pause = FIRST_SECONDS
        while True:
            await asyncio.sleep(pause * random.uniform(1.0, 2.0))  # not all brokers at once
            pause = PAUSE_SECONDS
            try:
                await self.sweep(time.time() - YOUNG_SECONDS)
            except Away:
                continue

    async def sweep(self, before: float) -> int:
        """Of what was there before."""
        return await self._marks(before) + await self._requests(before)

    async def _marks(self, before: float) -> int:
        swept = at = 0
        while found := await self._store.next(self._names.marks, self._names.all_marks, at + 1, self._patience):
            at = found.seq or 0
            mark = decode_mark(found.data or b"")
            if mark.at > before or not self._members.gone(mark.owner):
                continue
            if not await self._store.has(self._names.calls, mark.sequence, self._patience):
                await self._store.unmark((found.subject or "").rpartition(".")[2], self._patience)
                swept += 1
        return swept

    async def _requests(self, before: float) -> int:
        swept = 0
        for name, put in await self._objects.names():
            call = name.partition(".")[0]
            if put > before or await self._store.call_by(call, self._patience):
                continue
            if not await self._store.dead_by(call, self._patience):
                self._objects.forget(name)
                swept += 1
        return swept
