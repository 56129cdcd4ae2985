"""CommonGround's tools: commands from NATS to the tools that serve them, for as many targets as are configured."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from broker.bus import Bus
from broker.errors import ConfigError
from broker.faces.utp.claims import Claims
from broker.faces.utp.executor import PAUSES, Executor
from broker.faces.utp.hand import Hand
from broker.faces.utp.intake import Intake
from broker.faces.utp.streams import Unusable, make_consumer, make_streams
from broker.faces.utp.targets import Target
from broker.faces.utp.wake import Doorbell
from broker.utp import subjects
from broker.utp.stores import make_stores
from broker.utp.stores.base import StoreAway

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from broker.server import Broker

MOST_BURIED = 64
MOST_BEAT_SECONDS = 10.0
LOOK_SECONDS = 5.0  # at targets that do not get their commands
LAST_WORDS_SECONDS = 3.0  # for what has run to be written, at the end


class UtpFace:
    def __init__(self, broker: Broker, bus: Bus) -> None:
        settings = broker.settings.utp
        self._broker = broker
        self._bus = bus
        self._log = broker.log
        self._replicas = broker.settings.nats.replicas
        self.stores = make_stores(settings)
        self._claims = Claims(bus, self._replicas, settings.lease_seconds)
        doorbell = Doorbell(bus, self._replicas, broker.log)
        self._executor = Executor(broker, self.stores, self._claims, doorbell, self)
        self._targets = [Target(name, one) for name, one in settings.served().items()]
        self._buried: deque[dict[str, Any]] = deque(maxlen=MOST_BURIED)
        self._trouble = ""  # of store or NATS, while it lasts
        self._ready = False  # the store is there, with all that is needed
        self._preparing: asyncio.Task[None] | None = None
        self._next_look = 0.0
        self._stopping = False
        bus.on_connect(self._connected)

    # --- start --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """A store that lacks something stops the start-up; one that is away is looked for."""
        for target in self._targets:
            if self._broker.registry.get(target.settings.tool) is None:
                self._log.warning("utp: a target's tool is not there", target=target.name, aid=target.settings.tool)
        try:
            await self.stores.store.open()
            self._ready = True
        except StoreAway as error:
            self.troubled(str(error))

    async def _connected(self) -> None:
        for target in self._targets:
            if target.intake is not None:
                target.intake.begin_anew()
        self._prepare_soon()

    def expire(self, now: float) -> None:
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            if not self._ready or any(one.status()["reason"] for one in self._targets):
                self._prepare_soon()

    def _prepare_soon(self) -> None:
        idle = self._preparing is None or self._preparing.done()
        if idle and self._bus.connected and not self._stopping:
            self._preparing = asyncio.create_task(self._prepare())

    async def _prepare(self) -> None:
        """Until each target gets its commands, or it is known why not."""
        from nats.errors import Error

        attempts = 0
        while not self._ready:
            try:
                await self.stores.store.open()
                self._ready = True
                self.well()
            except (StoreAway, ConfigError) as error:
                self.troubled(str(error))
                await asyncio.sleep(PAUSES[min(attempts, len(PAUSES) - 1)] * random.uniform(0.5, 1.0))
                attempts += 1
        for target in self._targets:
            try:
                await make_streams(self._bus, self._replicas)
                await self._serve(target)
                trouble = ""
            except Unusable as error:
                trouble = str(error)
            except (Error, OSError, TimeoutError) as error:
                trouble = f"NATS: {str(error) or type(error).__name__}"
            if trouble and trouble != target.trouble:
                self._log.warning("utp: a target does not get its commands", target=target.name, reason=trouble)
            target.trouble = trouble

    async def _serve(self, target: Target) -> None:
        info = await make_consumer(self._bus, target.name)
        target.ack_seconds = info.config.ack_wait or target.ack_seconds
        if (info.config.max_deliver or 0) > 0:  # else for ever; three attempts at what fails are enough all the same
            target.most_deliveries = info.config.max_deliver or target.most_deliveries
        if target.intake is None:
            intake = Intake(
                self._bus,
                subjects.COMMANDS,
                subjects.consumer(target.name),
                target.room,
                lambda message: self._take(target, message),
            )
            await intake.start()
            target.intake = intake
            self._log.info("utp: serving", target=target.name, aid=target.settings.tool)
        else:
            target.intake.trouble = ""
            target.intake.begin_anew()

    # --- commands -----------------------------------------------------------------------------------------------------

    def _take(self, target: Target, message: Msg) -> None:
        every = min(MOST_BEAT_SECONDS, target.ack_seconds / 3, self._claims.lease / 3)
        task = asyncio.create_task(self._executor.handle(target, Hand(message, every)))
        target.in_hand.add(task)
        task.add_done_callback(lambda done: self._let_go(target, done))

    def _let_go(self, target: Target, task: asyncio.Task[None]) -> None:
        target.in_hand.discard(task)
        if target.intake is not None:
            target.intake.wake()

    def bury(self, target: Target, hand: Hand, reason: str, tool_call_id: str = "") -> None:
        """For an operator: it is not tried again, and its agent does not hear of it."""
        record = {
            "time": time.time(),
            "target": target.name,
            "subject": hand.message.subject,
            "sequence": hand.sequence,
            "tool_call_id": tool_call_id,
            "reason": reason,
        }
        self._buried.append(record)
        target.counts["buried"] += 1
        self._log.warning("utp: a command is given up", **{name: one for name, one in record.items() if name != "time"})

    def troubled(self, reason: str) -> None:
        if reason != self._trouble:
            self._log.warning("utp: waiting", reason=reason)
        self._trouble = reason

    def well(self) -> None:
        if self._trouble:
            self._log.info("utp: going on")
        self._trouble = ""

    # --- the end ------------------------------------------------------------------------------------------------------

    async def stop_accepting(self) -> None:
        """What comes from now on is somebody else's."""
        self._stopping = True
        if self._preparing is not None:
            self._preparing.cancel()
        await asyncio.gather(*(one.intake.stop() for one in self._targets if one.intake is not None))

    async def close(self) -> None:
        """All calls have their answers: these are written. What cannot be, comes again elsewhere."""
        tasks = [task for target in self._targets for task in target.in_hand]
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_WORDS_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.stores.store.close()

    def status(self) -> dict[str, Any]:
        return {
            "store": {**self.stores.status(), "ready": self._ready},
            "trouble": self._trouble,
            "targets": [one.status() for one in self._targets],
            "given_up": list(self._buried),
        }
