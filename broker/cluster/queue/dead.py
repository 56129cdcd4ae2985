"""Calls that did not end well: kept with the reason, the original and the time, until an operator puts them back."""

from __future__ import annotations

from typing import Any, NamedTuple

from broker import errors
from broker.cluster import names as usual
from broker.cluster.queue import names
from broker.cluster.queue.marks import Marks
from broker.cluster.queue.names import Names, from_header, in_header
from broker.cluster.queue.records import Letter, stored
from broker.cluster.queue.requests import Requests
from broker.cluster.queue.results import Results
from broker.cluster.queue.store import Store
from broker.errors import Refusal

REASON_BYTES = 2048
SHOWN_BYTES = 4096  # of an original
LARGEST = 1 << 30  # whatever is there was within the limits


class Dead(NamedTuple):
    letter: Letter
    code: str
    reason: str
    ran: bool  # it may have run
    deliveries: int
    time: float  # wall clock

    def told(self) -> dict[str, Any]:
        letter = self.letter
        return {
            "call_id": letter.id,
            "tool": letter.tool,
            "principal": letter.principal,
            "type": self.code,
            "reason": self.reason,
            "may_have_run": self.ran,
            "deliveries": self.deliveries,
            "enqueued": round(letter.enqueued, 3),
            "time": round(self.time, 3),
            "request": letter.data[:SHOWN_BYTES].decode(errors="replace"),
            "bytes": len(letter.data),
            **({"object": letter.large} if letter.large else {}),
        }


class DeadLetters:
    def __init__(
        self, store: Store, names: Names, results: Results, marks: Marks, requests: Requests, patience: float
    ) -> None:
        self._store = store
        self._names = names
        self._results = results
        self._marks = marks
        self._requests = requests
        self._patience = patience

    async def put(self, letter: Letter, refusal: Refusal) -> None:
        letter = await self._requests.pack(letter)
        headers = letter.headers(f"{letter.name}.{letter.sequence}") | {
            names.CODE: refusal.kind.code,
            names.REASON: in_header(refusal.text)[:REASON_BYTES],
            usual.RAN: str(int(refusal.ran)),
            names.DELIVERIES: str(letter.deliveries),
            names.ENQUEUED: f"{letter.enqueued:.3f}",
        }
        await self._store.publish(self._names.dead_call(letter.name), letter.data, headers, self._patience)

    async def find(self, call_id: str) -> Dead | None:
        found = await self._store.dead_by(names.name_of(call_id), self._patience)
        return _dead(found) if found is not None else None

    async def some(self, most: int, after: int = 0) -> list[Dead]:
        """The oldest first."""
        found: list[Dead] = []
        while len(found) < most:
            message = await self._store.next(self._names.dead, self._names.all_dead, after + 1, self._patience)
            if message is None:
                break
            found.append(_dead(message))
            after = message.seq or 0
        return found

    async def requeue(self, dead: Dead, lease: str) -> str | Refusal:
        """Back into the queue, as if it had just come. Each step can be done again after a death in between."""
        letter = dead.letter
        name = letter.name
        if not letter.tool:
            return Refusal(errors.BAD_REQUEST, "nobody can tell which tool it is for")
        if lease:
            leased = await self._requests.with_lease(letter, lease, LARGEST)
            if leased is None:
                return Refusal(errors.BAD_REQUEST, "its request cannot be read: it cannot have a lease")
            letter = leased
        outcome = await self._results.forget_dead(name)
        if outcome is not None:
            await self._store.bury(name, self._patience)
            return "it has been requeued before, and has a result"
        await self._marks.forget(name)
        await self._store.consumer(letter.tool, self._patience)
        headers = letter.headers(f"{name}.again.{letter.sequence}")
        await self._store.publish(self._names.call(letter.tool, name), letter.data, headers, self._patience)
        await self._store.bury(name, self._patience)
        return ""


def _dead(message: Any) -> Dead:
    headers = message.headers or {}
    letter = stored(message)
    at = letter.enqueued
    letter.enqueued = float(headers.get(names.ENQUEUED, "0"))
    return Dead(
        letter,
        headers.get(names.CODE, ""),
        from_header(headers.get(names.REASON, "")),
        headers.get(usual.RAN) == "1",
        int(headers.get(names.DELIVERIES, "1")),
        at,
    )
