"""What came of queued calls, by id, until it expires. The first thing that is said of a call is what counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from broker.bus import Bus
from broker.cluster.kv import Bucket
from broker.cluster.objects import NoObject, Objects
from broker.cluster.queue.names import Names
from broker.cluster.queue.records import Letter, Outcome, outcome_of, written
from broker.errors import INTERNAL, Refusal
from broker.settings import Queue as Settings

ROOM = 4096  # of NATS' payload limit, for what stands around a reply
LOOK_SECONDS = 5.0  # at a result that is waited for, beside hearing of it
SOON_SECONDS = (0.002, 0.01, 0.05, 0.2, 1.0)  # it is heard of before it is on the server's disk, and can be had
LARGEST = 1 << 40  # whatever was put there was within the limits


class Results:
    def __init__(self, bus: Bus, names: Names, settings: Settings, replicas: int, patience: float) -> None:
        self._bucket = Bucket(bus, names.results, settings.result_seconds, replicas)
        self._large = Objects(bus, names.replies, replicas, patience, settings.result_seconds)
        self._patience = patience
        self._over = asyncio.Event()

    async def keep(self, letter: Letter, line: bytes, *, dead: bool) -> bool:
        """False where something was said of it before."""
        outcome = Outcome(
            letter.id, letter.tool, letter.principal, letter.digest, "dead" if dead else "done", time.time()
        )
        if len(line) > self._bucket.largest - ROOM:
            outcome.large = await self._large.put(line)
        else:
            outcome.reply = type(outcome.reply)(line.rstrip(b"\n"))
        return isinstance(await self._bucket.create(letter.name, written(outcome), self._patience), int)

    async def find(self, name: str) -> Outcome | None:
        found = await self._bucket.get(name, self._patience)
        return outcome_of(found.value) if found is not None else None

    async def reply(self, outcome: Outcome) -> bytes:
        """The reply line."""
        if not outcome.large:
            return bytes(outcome.reply)
        try:
            return await self._large.get(outcome.large, LARGEST)
        except NoObject as error:
            return Refusal(INTERNAL, f"the reply is gone: {error}").line(outcome.tool)

    async def wait(self, name: str, seconds: float) -> Outcome | None:
        """Until there is one, or the time is over, or the broker stops."""
        end = time.monotonic() + seconds
        outcome = await self.find(name)
        if outcome is not None or seconds <= 0:
            return outcome
        changes = await self._bucket.changes(name)
        heard = changes.heard
        try:
            looks: Iterator[float] = iter(())
            while True:
                heard.clear()
                outcome = await self.find(name)
                left = end - time.monotonic()
                if outcome is not None or left <= 0 or self._over.is_set():
                    return outcome
                await self._either(heard, min(left, next(looks, LOOK_SECONDS)))
                if heard.is_set():
                    looks = iter(SOON_SECONDS)
        finally:
            await changes.stop()

    async def _either(self, heard: asyncio.Event, seconds: float) -> None:
        waits = [asyncio.ensure_future(one.wait()) for one in (heard, self._over)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def forget_dead(self, name: str) -> Outcome | None:
        """That it was dead: it is to be run again. What else there is, is returned."""
        found = await self._bucket.get(name, self._patience)
        if found is None:
            return None
        outcome = outcome_of(found.value)
        if outcome.state == "done" or not await self._bucket.delete(name, found.revision, self._patience):
            return outcome
        return None

    def stop(self) -> None:
        """Nobody waits here any longer."""
        self._over.set()
