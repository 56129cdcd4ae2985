"""Words about the queue: callers put calls into it and ask for results, operators look after it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from broker import errors
from broker.cluster.kv import Away
from broker.cluster.queue.dead import Dead
from broker.cluster.queue.turns import Answer
from broker.errors import Refusal

if TYPE_CHECKING:
    from broker.cluster.queue.queue import Queue
    from broker.control import Asker
    from broker.server import Broker

Word = Callable[["Asker", bytes], Awaitable[Answer]]

LONGEST_WAIT = 300.0
SHOWN = 100  # of the dead
MOST_SHOWN = 1000
AT_ONCE = 100  # of those that are requeued
WITHOUT = (
    "durable calls are kept by NATS, and this broker has none: start it with --nats nats://HOST:PORT ([nats] url), "
    "at a nats-server that runs with JetStream (nats-server -js)"
)


class _Enqueue(Struct):
    call: Raw | UnsetType = UNSET


class _Result(Struct):
    call_id: str = ""
    wait_ms: float = 0.0


class _Dead(Struct):
    limit: int = SHOWN
    after: int = 0


class _Requeue(Struct):
    call_id: str = ""
    all: bool = False
    force: bool = False
    lease: str = ""


class QueueWords:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.callers: dict[str, Word] = {"_enqueue": self._enqueue, "_result": self._result}
        self.operators: dict[str, Word] = {
            "_queue.status": self._status,
            "_queue.dead": self._dead,
            "_queue.requeue": self._requeue,
        }

    def _queue(self) -> Queue | None:
        return self._broker.cluster.queue if self._broker.cluster is not None else None

    # --- callers' -----------------------------------------------------------------------------------------------------

    async def _enqueue(self, asker: Asker, line: bytes) -> Answer:
        queue = self._queue()
        if queue is None:
            return _without()
        call = msgspec.json.decode(line, type=_Enqueue).call
        if call is UNSET:
            return Refusal(errors.BAD_REQUEST, '_enqueue needs a "call": the request object, perhaps with an "id"')
        return await queue.producer.enqueue(asker, bytes(call))

    async def _result(self, asker: Asker, line: bytes) -> Answer:
        queue = self._queue()
        if queue is None:
            return _without()
        asked = msgspec.json.decode(line, type=_Result)
        if not asked.call_id:
            return Refusal(errors.BAD_REQUEST, '_result needs a "call_id"')
        return await queue.asking.result(asker, asked.call_id, min(asked.wait_ms / 1000, LONGEST_WAIT))

    # --- operators' ---------------------------------------------------------------------------------------------------

    async def _status(self, asker: Asker, line: bytes) -> Answer:  # noqa: ARG002
        queue = self._queue()
        if queue is None:
            return _without()
        try:
            return {"queue": await queue.status()}
        except Away as error:
            return Refusal(errors.UNAVAILABLE, str(error), retry_after=1)

    async def _dead(self, asker: Asker, line: bytes) -> Answer:  # noqa: ARG002
        queue = self._queue()
        if queue is None:
            return _without()
        asked = msgspec.json.decode(line, type=_Dead)
        try:
            dead = await queue.dead.some(max(1, min(asked.limit, MOST_SHOWN)), asked.after)
        except Away as error:
            return Refusal(errors.UNAVAILABLE, str(error), retry_after=1)
        return {"dead": [one.told() for one in dead], "after": dead[-1].letter.sequence if dead else asked.after}

    async def _requeue(self, asker: Asker, line: bytes) -> Answer:
        queue = self._queue()
        if queue is None:
            return _without()
        asked = msgspec.json.decode(line, type=_Requeue)
        if bool(asked.call_id) == asked.all:
            return Refusal(errors.BAD_REQUEST, "_queue.requeue needs a call_id, or all; one of the two")
        try:
            answer = await (self._all(queue, asked) if asked.all else self._one(queue, asked))
        except Away as error:
            return Refusal(errors.UNAVAILABLE, str(error), retry_after=1)
        if isinstance(answer, dict):
            self._broker.log.info("requeued", who=asker.principal, calls=len(answer["requeued"]))
        return answer

    async def _one(self, queue: Queue, asked: _Requeue) -> Answer:
        dead = await queue.dead.find(asked.call_id)
        if dead is None:
            return Refusal(errors.NOT_FOUND, f"there is no dead call {asked.call_id!r}; `broker queue dead` shows them")
        wrong = await self._again(queue, dead, asked)
        if isinstance(wrong, Refusal):
            return wrong
        if wrong:
            return Refusal(errors.BAD_REQUEST, f"{asked.call_id}: {wrong}")
        return {"requeued": [asked.call_id], "left": []}

    async def _all(self, queue: Queue, asked: _Requeue) -> Answer:
        """Those that are dead now: one that dies again meanwhile stays where it is."""
        requeued: list[str] = []
        left: list[dict[str, str]] = []
        last = (await queue.store.state(queue.names.dead, queue.patience)).last_seq or 0
        at = 0
        while some := await queue.dead.some(AT_ONCE, at):
            for one in some:
                at = one.letter.sequence
                if at > last:
                    return {"requeued": requeued, "left": left}
                wrong = await self._again(queue, one, asked)
                if not wrong:
                    requeued.append(one.letter.id)
                else:
                    why = wrong.text if isinstance(wrong, Refusal) else wrong
                    left.append({"call_id": one.letter.id, "why": why})
        return {"requeued": requeued, "left": left}

    async def _again(self, queue: Queue, dead: Dead, asked: _Requeue) -> str | Refusal:
        if dead.ran and not asked.force:
            return f"{dead.reason}: to run it again, say --force"
        return await queue.dead.requeue(dead, asked.lease)


def _without() -> Refusal:
    return Refusal(errors.UNAVAILABLE, WITHOUT)
