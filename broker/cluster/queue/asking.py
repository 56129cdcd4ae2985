"""What has become of a queued call: told to whoever has enqueued it, and to operators."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from broker import errors
from broker.cluster.kv import Away
from broker.cluster.queue.dead import DeadLetters
from broker.cluster.queue.names import name_of
from broker.cluster.queue.records import stored
from broker.cluster.queue.results import Results
from broker.cluster.queue.store import Store
from broker.cluster.queue.turns import Answer, Turns
from broker.errors import Refusal

if TYPE_CHECKING:
    from broker.control import Asker
    from broker.server import Broker


class Asking:
    def __init__(self, broker: Broker, store: Store, results: Results, dead: DeadLetters, turns: Turns) -> None:
        self._broker = broker
        self._store = store
        self._results = results
        self._dead = dead
        self._turns = turns
        self._patience = broker.settings.nats.wait_seconds

    async def result(self, asker: Asker, call_id: str, seconds: float) -> Answer:
        """Waiting so long, where there is none yet."""
        try:
            answer = await self._turns.take(lambda: self._now(asker, call_id))
            if seconds > 0 and isinstance(answer, dict) and "result" not in answer:
                await self._results.wait(name_of(call_id), seconds)
                answer = await self._turns.take(lambda: self._now(asker, call_id))
        except Away as error:
            return Refusal(errors.UNAVAILABLE, f"{error}; results are there", retry_after=1)
        return answer

    async def _now(self, asker: Asker, call_id: str) -> Answer:
        answer = await self._ended(asker, call_id) or await self._waits(asker, call_id)
        answer = answer or await self._ended(asker, call_id)  # it may have ended between two questions
        if answer is not None:
            return answer
        text = f"there is no call {call_id!r} of yours: it was never enqueued, or what is known of it has expired"
        return Refusal(errors.NOT_FOUND, f"{text} (queue.result_seconds)")

    async def _ended(self, asker: Asker, call_id: str) -> dict[str, Any] | None:
        outcome = await self._results.find(name_of(call_id))
        if outcome is None or not _may_see(asker, outcome.principal):
            return None
        line = await self._results.reply(outcome)
        return _told(call_id, outcome.state, outcome.tool, outcome.at, line)

    async def _waits(self, asker: Asker, call_id: str) -> dict[str, Any] | None:
        """It is in the queue; or its result has expired, and it is still among the dead."""
        name = name_of(call_id)
        queued, dead, marked = await asyncio.gather(
            self._store.call_by(name, self._patience),
            self._dead.find(call_id),
            self._store.marked(name, self._patience),
        )
        if queued is not None and _may_see(asker, (letter := stored(queued)).principal):
            running = marked is not None and b'"started"' in (marked.data or b"")
            known = self._broker.registry.get(letter.tool) is not None
            how = "running" if running else "queued"
            return {"call_id": call_id, "state": how, "tool": letter.tool, "known": known}
        if dead is not None and _may_see(asker, dead.letter.principal):
            line = Refusal(errors.KINDS.get(dead.code, errors.INTERNAL), dead.reason).line(dead.letter.tool)
            return _told(call_id, "dead", dead.letter.tool, dead.time, line)
        return None


def _told(call_id: str, state: str, tool: str, at: float, line: bytes) -> dict[str, Any]:
    result = Raw(line.rstrip(b"\n"))
    return {"call_id": call_id, "state": state, "tool": tool, "time": round(at, 3), "result": result}


def _may_see(asker: Asker, principal: str) -> bool:
    return asker.operator or asker.principal == principal
