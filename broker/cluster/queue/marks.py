"""Where it is written that a queued call has begun: once and for all, before anything of it runs.

What was delivered but not begun is run by another broker when its own dies. What has begun is not run again: the mark
is there for as long as the call is in the queue, longer than any key. A broker that was frozen, or cut off, may come to
write one when the call is over and its mark is gone: so it looks, once it has written, whether the call is still there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from broker import errors
from broker.cluster.kv import Away
from broker.cluster.queue.records import Letter
from broker.cluster.queue.results import Results
from broker.cluster.queue.store import Store
from broker.errors import Refusal

LONGEST_WHY = 512


class Written(Struct, omit_defaults=True):
    """What is known of a call that is in the queue."""

    state: Literal["started", "refused"]
    owner: str  # the broker, of this start
    sequence: int = 0  # of the call's message
    refusals: int = 0  # for the time being
    deliveries: int = 0  # until the last refusal: whoever refused has lived to say so
    why: str = ""  # the last one
    at: float = 0.0  # wall clock


decode_mark = msgspec.json.Decoder(Written).decode
_encode = msgspec.json.Encoder().encode


class Mark:
    """One call's, at the broker that has it now."""

    __slots__ = ("_changed", "_letter", "_marks", "_starting", "_was", "over", "problem", "revision", "started")

    def __init__(self, marks: Marks, letter: Letter, revision: int, was: Written | None) -> None:
        self._marks = marks
        self._letter = letter
        self._was = was
        self._starting: asyncio.Task[None] | None = None
        self._changed: Callable[[], None] = lambda: None
        self.revision = revision  # 0: there is none
        self.started = False
        self.over = False  # the call has been run
        self.problem: Refusal | None = None

    @property
    def refusals(self) -> int:
        return self._was.refusals if self._was is not None else 0

    @property
    def lost(self) -> bool:
        """Another broker was quicker."""
        return self.revision < 0

    def tell(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def may_start(self) -> bool:
        if not self.started and self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return self.started

    async def _start(self) -> None:
        try:
            revision = await self._marks.write(self._letter, "started", self.revision, self.refusals, "")
            over = bool(revision) and await self._marks.is_over(self._letter)
        except Away as error:
            self.problem = Refusal(errors.UNAVAILABLE, f"{error}; the call has not begun", retry_after=1)
        except Exception as error:  # whatever it is, nobody may wait for ever
            self.problem = Refusal(errors.UNAVAILABLE, f"it could not be written that the call begins: {error!r}")
        else:
            if over:
                self.over = True
                self.problem = Refusal(errors.UNAVAILABLE, "another broker has run it")
            elif revision:
                self.revision, self.started = revision, True
            else:
                self.revision = -1
                self.problem = Refusal(errors.UNAVAILABLE, "another broker has it")
        self._changed()

    async def put_off(self, why: str) -> bool:
        """The call has not run, and may be run by whoever gets it next. False: another broker has written here."""
        if self._starting is not None:
            await self._starting
        return not self.lost and await self._marks.put_off(self._letter, self.revision, self.refusals + 1, why)


class Marks:
    def __init__(self, store: Store, results: Results, me: str, patience: float) -> None:
        self._store = store
        self._results = results
        self._me = me
        self._patience = patience

    async def find(self, name: str) -> tuple[Written | None, int]:
        """What is written, and its revision."""
        found = await self._store.marked(name, self._patience)
        if found is None:
            return None, 0
        return decode_mark(found.data or b""), found.seq or 0

    async def write(
        self, letter: Letter, state: Literal["started", "refused"], last: int, refusals: int, why: str
    ) -> int:
        """Its revision; 0 where it is not as it was any more."""
        written = Written(state, self._me, letter.sequence, refusals, letter.deliveries, why[:LONGEST_WHY], time.time())
        return await self._store.mark(letter.name, _encode(written), last, self._patience)

    async def is_over(self, letter: Letter) -> bool:
        """It has a result (the server may have forgotten since that it has left the queue), or has left the queue (its
        result may have expired since)."""
        outcome, there = await asyncio.gather(
            self._results.find(letter.name), self._store.has(self._store.names.calls, letter.sequence, self._patience)
        )
        return outcome is not None or not there

    async def put_off(self, letter: Letter, last: int, refusals: int, why: str) -> bool:
        if await self.write(letter, "refused", last, refusals, why):
            return True
        was, revision = await self.find(letter.name)  # that it begins may have been written, though nobody told us so
        if was is None or was.owner != self._me:
            return False
        return bool(await self.write(letter, "refused", revision, refusals, why))

    async def forget(self, name: str) -> None:
        await self._store.unmark(name, self._patience)
