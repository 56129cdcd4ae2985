"""Calls out of the queue: as many as this broker can run, of the tools that it has."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from broker.bus import Bus
from broker.cluster.kv import Away
from broker.cluster.queue import names
from broker.cluster.queue.names import Names
from broker.cluster.queue.records import arrived
from broker.cluster.queue.runner import LATER_SECONDS, Held, Runner
from broker.cluster.queue.store import Store
from broker.model import Tool
from broker.policy.breaker import State
from broker.runtimes.serve import ServeRuntime
from broker.runtimes.waiting import Waiting

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from broker.server import Broker

ROUND_SECONDS = 5.0  # between two looks for which tools there are calls
BEAT_SECONDS = 0.25
EXPIRES_SECONDS = 20.0  # NATS forgets that it was asked for one call,
SOON_SECONDS = 0.25  # or for several: other tools of the runtime want its room, too
GRACE_SECONDS = 2.0
QUICK_SECONDS = 0.01  # tools that take less are given more at once than there are processes
AHEAD = 4  # times
USUAL = 4  # calls at once, of a runtime that does not say

_encode = msgspec.json.Encoder().encode


class Pull:
    """What NATS has been asked for, of one tool."""

    def __init__(self, tool: str, consumer: str, inbox: str) -> None:
        self.tool = tool
        self.consumer = consumer
        self.inbox = inbox
        self.subscription: Subscription | None = None
        self.asked = 0
        self.until = 0.0
        self.came = 0.0  # when there was a call last

    def due(self, now: float) -> bool:
        """It is not known to be asked for anything."""
        return not self.asked or now > self.until


class Puller:
    def __init__(self, broker: Broker, bus: Bus, names: Names, store: Store, runner: Runner) -> None:
        self._broker = broker
        self._bus = bus
        self._names = names
        self._store = store
        self._runner = runner
        self._patience = broker.settings.nats.wait_seconds
        self._silence = broker.settings.queue.redeliver_seconds / 3  # of ours, that NATS may hear
        self._pulls: dict[str, Pull] = {}
        self._held: dict[str, Held] = {}  # by the name of the call
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._look_again = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def held(self) -> int:
        return len(self._held)

    # --- whose calls --------------------------------------------------------------------------------------------------

    async def connected(self) -> None:
        """What NATS was asked for is forgotten there."""
        for pull in self._pulls.values():
            pull.asked = 0
        self._look_again.set()
        if self._looking is None and not self._stopping:
            await self._bus.client.subscribe(self._names.news, cb=self._news)
            self._looking = asyncio.create_task(self._look_now_and_then())
            self._beating = asyncio.create_task(self._beat())

    async def _news(self, message: Msg) -> None:
        if self._broker.registry.get(message.data.decode(errors="replace")) is not None:
            self._look_again.set()

    async def _look_now_and_then(self) -> None:
        while not self._stopping:
            try:
                if self._bus.connected:
                    await self._look()
            except Away:
                pass
            except Exception as error:  # the next look may be luckier
                self._broker.log.warning("queue", reason=repr(error))
            try:
                await asyncio.wait_for(self._look_again.wait(), ROUND_SECONDS)
            except TimeoutError:
                continue
            self._look_again.clear()

    async def _look(self) -> None:
        """Tools come and go, here and in the queue."""
        consumers = await self._store.consumers(self._patience)
        known = sum((one.num_pending or 0) + (one.num_ack_pending or 0) for one in consumers.values())
        if (await self._store.state(self._names.calls, self._patience)).messages > known:
            await self._look_for_others(set(consumers))
        for name in [name for name in self._pulls if name not in consumers or self._tool(name) is None]:
            pull = self._pulls.pop(name)
            if pull.subscription is not None:
                await pull.subscription.drain()  # type: ignore[no-untyped-call]
        for name, consumer in consumers.items():
            if name not in self._pulls and self._tool(name) is not None:
                await self._begin(name, consumer.name)
        self._ask()

    async def _look_for_others(self, known: set[str]) -> None:
        """Calls that did not come through a broker."""
        waiting = {subject.split(".")[2] for subject in await self._store.subjects(self._patience)}
        for tool in self._broker.registry:
            if tool.name not in known and names.token_of(tool.name) in waiting:
                await self._store.consumer(tool.name, self._patience)
                self._look_again.set()

    def _tool(self, name: str) -> Tool | None:
        tool = self._broker.registry.get(name)
        return tool if tool is not None and self._runner.may_run(tool) else None

    async def _begin(self, tool: str, consumer: str) -> None:
        pull = Pull(tool, consumer, self._bus.client.new_inbox())

        async def hear(message: Msg) -> None:
            self._hear(pull, message)

        pull.subscription = await self._bus.client.subscribe(pull.inbox, cb=hear)
        self._pulls[tool] = pull

    # --- how many -----------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """A tool that nothing has come for is asked for one call; others for what there is room for, for a moment."""
        if self._stopping or not self._bus.connected:
            return
        now = time.monotonic()
        held: Counter[int] = Counter(id(one.runtime) for one in self._held.values())
        taken = held.copy()
        tools = {name: self._tool(name) for name in self._pulls}
        for name, pull in self._pulls.items():
            if (tool := tools[name]) is not None and not pull.due(now) and pull.asked > 1:
                taken[id(tool.runtime)] += pull.asked
        for name in list(self._pulls):
            pull, tool = self._pulls[name], tools[name]
            if tool is None or not pull.due(now) or not _goes(tool, now):
                continue
            capacity = _capacity(tool)
            if capacity <= held[id(tool.runtime)]:
                continue
            count = max(1, capacity - taken[id(tool.runtime)]) if now - pull.came < SOON_SECONDS else 1
            if count > 1:
                taken[id(tool.runtime)] += count
            self._say(pull, count, now)
            self._pulls[name] = self._pulls.pop(name)  # the others come first next time

    def _say(self, pull: Pull, count: int, now: float) -> None:
        seconds = EXPIRES_SECONDS if count == 1 else SOON_SECONDS
        pull.asked, pull.until = count, now + seconds + GRACE_SECONDS
        request = {"batch": count, "expires": round(seconds * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._names.calls}.{pull.consumer}"
        self._bus.say(subject, _encode(request), reply=pull.inbox)

    # --- what comes ---------------------------------------------------------------------------------------------------

    def _hear(self, pull: Pull, message: Msg) -> None:
        status = (message.headers or {}).get("Status")
        if status and not message.reply:
            if status not in ("404", "408"):  # the consumer is gone, or NATS is in trouble: it is asked after a while
                pull.until = time.monotonic() + LATER_SECONDS
                self._look_again.set()
                return
            left = (message.headers or {}).get("Nats-Pending-Messages", "")
            pull.asked = max(0, pull.asked - int(left)) if left.isdigit() else 0
            self._ask()
            return
        pull.asked = max(0, pull.asked - 1)
        pull.came = time.monotonic()
        self._take(pull.tool, message)
        if not pull.asked:
            self._ask()

    def _take(self, name: str, message: Msg) -> None:
        letter = arrived(message, name)
        tool = self._broker.registry.get(name)
        held = self._held.get(letter.name)
        if held is not None:
            if held.letter.sequence == letter.sequence:  # NATS was away, and gives us again what we have
                held.message = message
            else:  # the same call twice in the queue: one of the two is enough
                self._bus.say(message.reply, b"+ACK")
            return
        held = Held(message, letter, tool.runtime if tool is not None else None)
        if self._stopping:
            self._runner.let_go(held, 0.0)
            return
        self._held[letter.name] = held
        task = asyncio.ensure_future(self._run(letter.name, held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, name: str, held: Held) -> None:
        try:
            await self._runner.run(held)
        except Exception as error:  # it comes again, and in the end is dead
            self._broker.log.error("internal error", aid=held.letter.tool, reason=repr(error))
            self._runner.let_go(held, LATER_SECONDS)
        finally:
            del self._held[name]
            self._ask()

    async def _beat(self) -> None:
        """NATS hears that we are at it, or gives it to another broker."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            if self._bus.connected:
                for held in self._held.values():
                    if now - held.said > self._silence:
                        held.said = now
                        self._bus.say(held.message.reply, b"+WPI")
                self._ask()

    # --- the end ------------------------------------------------------------------------------------------------------

    async def stop_pulling(self, seconds: float) -> None:
        """What is on its way to us goes back at once."""
        from nats.errors import Error

        self._stopping = True
        if self._looking is not None:
            self._looking.cancel()
        if not self._bus.connected:
            return
        drained = [one.subscription.drain() for one in self._pulls.values() if one.subscription is not None]  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*drained)
        except (Error, OSError, TimeoutError) as error:
            self._broker.log.warning("queue", reason=f"NATS does not hear that we take no more calls: {error!r}")

    async def stop(self, seconds: float) -> None:
        """Calls have ended: their results are given a moment to be kept."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()
        if self._beating is not None:
            self._beating.cancel()


def _goes(tool: Tool, now: float) -> bool:
    """It would be run now: an operator has not paused it, and its breaker is closed or due to be tried."""
    breaker = tool.breaker
    return not tool.paused and (
        breaker.state is State.CLOSED or (breaker.state is State.OPEN and not breaker.wait(now))
    )


def _capacity(tool: Tool) -> int:
    """So many of its runtime's calls at once; the rest stays in the queue, for others."""
    runtime = tool.runtime
    if isinstance(runtime, ServeRuntime):
        most = runtime.program.settings.max
        return most * AHEAD if 0 < tool.stats.best < QUICK_SECONDS else most
    return runtime.most if isinstance(runtime, Waiting) else USUAL
