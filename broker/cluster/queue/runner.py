"""One queued call at the broker that has it: from its message to its result, and only then out of the queue."""

from __future__ import annotations

import asyncio
import fnmatch
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from broker import errors
from broker.bus import Bus
from broker.cluster.kv import Away
from broker.cluster.members import GONE_SECONDS, Members
from broker.cluster.objects import NoObject
from broker.cluster.queue.dead import DeadLetters
from broker.cluster.queue.marks import Mark, Marks, Written
from broker.cluster.queue.records import Letter, id_in
from broker.cluster.queue.requests import Requests
from broker.cluster.queue.results import Results
from broker.errors import Refusal
from broker.faces.caller import Asked, Asker, Caller, understood
from broker.faces.nats.line import Line, Reader
from broker.model import Tool
from broker.policy.rights import Rights
from broker.runtimes.serve import ServeRuntime

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from broker.server import Broker

ACK_SECONDS = 2.0  # for NATS to say that it has heard it
ACKS = 3
LATER_SECONDS = 1.0  # somebody else is at it, or NATS is away
LONGEST_DELAY = 60.0
MOST_TRIES = 3  # to begin what others seem to have begun
FOR_THE_TIME_BEING = {errors.OVERLOADED, errors.BREAKER_OPEN, errors.DRAINING, errors.UNAVAILABLE, errors.NOT_FOUND}


class Held:
    """A call that this broker has: nobody else is given it as long as we say that we are at it."""

    __slots__ = ("letter", "message", "runtime", "said")

    def __init__(self, message: Msg, letter: Letter, runtime: object) -> None:
        self.message = message
        self.letter = letter
        self.runtime = runtime
        self.said = time.monotonic()


class _Face(Caller):
    """Queued calls are whoever's who has enqueued them, and have the cluster's rights here."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker, "queue")
        self.cluster = f"nats:{broker.settings.nats.cluster}"

    def rights_of(self, principal: str) -> Rights:  # noqa: ARG002
        return super().rights_of(self.cluster)

    def asker(self, letter: Letter) -> Asker:
        principal = f"{self.cluster}/{letter.principal}" if letter.principal else self.cluster
        return Asker(principal, self.rights_of(principal), False, {})


class Runner:
    def __init__(
        self,
        broker: Broker,
        bus: Bus,
        members: Members,
        requests: Requests,
        marks: Marks,
        results: Results,
        dead: DeadLetters,
    ) -> None:
        self._broker = broker
        self._bus = bus
        self._log = broker.log
        self._members = members
        self._requests = requests
        self._marks = marks
        self._results = results
        self._dead = dead
        self._settings = broker.settings.queue
        self._limits = broker.settings.limits
        self._reader = Reader(broker.registry.strict, broker.settings.limits)
        self._face = _Face(broker)
        self.counts: Counter[str] = Counter(done=0, dead_here=0, refused=0)

    def may_run(self, tool: Tool) -> bool:
        return not tool.info.elsewhere and self._face.rights_of("").allow(tool)

    async def run(self, held: Held) -> None:
        again = held.letter.deliveries > 1
        while True:
            try:
                if again and await self._results.find(held.letter.name) is not None:
                    await self._leave(held)
                    return
                refusal = await self._attempt(held, again=again)
                break
            except Away:  # we have it until somebody else is given it, and then its mark decides
                again = True
                await asyncio.sleep(LATER_SECONDS)
        if refusal is not None:
            await self._bury(held, refusal)

    # --- it runs ------------------------------------------------------------------------------------------------------

    async def _attempt(self, held: Held, *, again: bool) -> Refusal | None:
        """Why it is dead, where it is; else its result is kept, or somebody else is given it. `again`: something may be
        known of it."""
        letter = held.letter
        request = await self._request(letter)
        if isinstance(request, Refusal):
            return request
        tool = self._broker.registry.get(letter.tool)
        for _ in range(MOST_TRIES):
            written, revision = await self._marks.find(letter.name) if again else (None, 0)
            if written is not None and written.state == "started":
                return self._begun(held, written)
            if refusal := self._lost_too_often(letter, written):
                return refusal
            mark = Mark(self._marks, letter, revision, written)
            if tool is None or not self.may_run(tool):
                answer: bytes | Refusal = Refusal(errors.NOT_FOUND, f"tool not found: {letter.tool}")
            else:
                answer = await self._call(tool, letter, request, mark)
            if isinstance(answer, bytes):
                assert tool is not None
                return await self._settle(held, understood(tool, answer), answer)
            if answer.ran or answer.kind not in FOR_THE_TIME_BEING:
                return answer
            if mark.over:
                await self._persist(lambda: self._marks.forget(letter.name))
                await self._leave(held)
                return None
            if not mark.lost:
                return await self._put_off(held, mark, answer)
            again = True
        self.let_go(held, LATER_SECONDS)
        return None

    async def _request(self, letter: Letter) -> Line | Refusal:
        try:
            data = await self._requests.of(letter, self._limits.request_bytes)
        except NoObject as error:
            return Refusal(errors.BAD_REQUEST, f"the request is gone: {error}")
        line, ids = self._reader.read(data, letter.tool)
        if isinstance(line, Refusal):
            return line
        if line.aid != letter.tool:
            return Refusal(errors.BAD_REQUEST, f"it was queued for {letter.tool}, and its request names {line.aid}")
        milliseconds = line.timeout_ms()
        if isinstance(milliseconds, Refusal):
            return milliseconds
        if letter.large and ids is not None:
            letter.id = id_in(data) or letter.id
        return line

    async def _call(self, tool: Tool, letter: Letter, line: Line, mark: Mark) -> bytes | Refusal:
        answer: asyncio.Future[bytes | Refusal] = asyncio.get_running_loop().create_future()
        asked, milliseconds = line.asked, line.timeout_ms()
        assert not isinstance(milliseconds, Refusal)
        mark.tell(lambda: self._changed(mark))
        more = Asked(
            milliseconds,
            asked.key,
            asked.lease,
            asked.session,
            asked.ds_state,
            None,
            asked.request,
            mark=None if self._may_run_again(tool, line) else mark,
        )
        self._face.begin_line(tool, line.text, self._face.asker(letter), answer.set_result, more)
        return await answer

    def _changed(self, mark: Mark) -> None:
        """It is written that it begins, or it may not."""
        if mark.problem is not None:
            self._broker.dispatcher.revise()
        self._broker.pump_soon()

    def _may_run_again(self, tool: Tool, line: Line) -> bool:
        """The configuration says that it is safe, and no promise of at most once stands against it."""
        if line.asked.key or line.asked.lease or not isinstance(tool.runtime, ServeRuntime):
            return False
        return any(fnmatch.fnmatchcase(tool.name, pattern) for pattern in tool.runtime.program.settings.rerun)

    # --- it has been here before --------------------------------------------------------------------------------------

    def _begun(self, held: Held, written: Written) -> Refusal | None:
        """By whoever had it before us. It is not run again."""
        if written.owner != self._members.me and not self._members.gone(written.owner):
            self.let_go(held, GONE_SECONDS / 2)
            return None
        text = f"the broker that ran {held.letter.tool} is gone; the call may have run"
        return Refusal(errors.CRASH, text)

    def _lost_too_often(self, letter: Letter, written: Written | None) -> Refusal | None:
        """It was delivered, and nothing was heard of it: perhaps it is what its brokers have died of."""
        lost = letter.deliveries - 1 - (written.deliveries if written is not None else 0)
        if lost < self._settings.deliveries:
            return None
        why = f"; before, it was refused: {written.why}" if written is not None else ""
        text = f"it was delivered {lost} times to brokers that were not heard of again (queue.deliveries){why}"
        return Refusal(errors.UNAVAILABLE, text)

    # --- it ends ------------------------------------------------------------------------------------------------------

    async def _settle(self, held: Held, said: object, line: bytes) -> Refusal | None:
        if isinstance(said, Refusal):  # what is kept under its key: it may have run, then
            return said
        if not await self._persist(lambda: self._results.keep(held.letter, line, dead=False)):
            self._log.warning("queued call was answered for by another broker meanwhile", aid=held.letter.tool)
        self.counts["done"] += 1
        await self._leave(held)
        return None

    async def _bury(self, held: Held, refusal: Refusal) -> None:
        letter = held.letter
        self._log.warning("queued call is dead", id=letter.id, aid=letter.tool, code=refusal.kind.code)
        line = refusal.line(letter.tool)

        async def bury() -> None:
            await self._dead.put(letter, refusal)
            await self._results.keep(letter, line, dead=True)

        await self._persist(bury)
        self.counts["dead_here"] += 1
        await self._leave(held, requested=True)

    async def _leave(self, held: Held, *, requested: bool = False) -> None:
        """Its result is kept: it leaves the queue. If NATS does not hear that, it comes again, and leaves then."""
        from nats.errors import Error

        for _ in range(ACKS):
            try:
                await self._bus.client.request(held.message.reply, b"+ACK", timeout=ACK_SECONDS)
                break
            except (Error, OSError, TimeoutError):
                await asyncio.sleep(LATER_SECONDS)
        else:
            return
        if not requested:  # the dead may be put back
            self._requests.forget(held.letter)
        await self._persist(lambda: self._marks.forget(held.letter.name))

    async def _put_off(self, held: Held, mark: Mark, refusal: Refusal) -> Refusal | None:
        """It has not run. It comes again, here or elsewhere."""
        if mark.refusals >= self._settings.refusals:
            text = f"it was refused {mark.refusals} times (queue.refusals), last: {refusal.text}"
            return Refusal(refusal.kind, text, ran=False)
        await self._persist(lambda: mark.put_off(refusal.text))
        self.counts["refused"] += 1
        hint = float(refusal.extra.get("retry_after", 0))
        delay = min(max(hint, 2.0 ** min(mark.refusals, 10)), LONGEST_DELAY)
        self.let_go(held, 0.0 if refusal.kind is errors.DRAINING else delay)
        return None

    def let_go(self, held: Held, seconds: float) -> None:
        """Somebody is given it again, so much later."""
        text = b"-NAK"
        if seconds:
            text += b' {"delay":%d}' % round(seconds * 1e9)
        self._bus.say(held.message.reply, text)

    async def _persist(self, step: Callable[[], Awaitable[object]]) -> object:
        """What has run is told, however long NATS is away."""
        while True:
            try:
                return await step()
            except Away:
                await asyncio.sleep(LATER_SECONDS)
