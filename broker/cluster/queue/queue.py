"""Durable calls: kept by NATS from when they are enqueued until a broker has run them and their result is kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from broker.bus import Bus
from broker.cluster.kv import Away
from broker.cluster.members import Members
from broker.cluster.objects import Objects
from broker.cluster.queue.asking import Asking
from broker.cluster.queue.dead import DeadLetters
from broker.cluster.queue.marks import Marks
from broker.cluster.queue.names import Names
from broker.cluster.queue.producer import WATCH_SECONDS, Producer
from broker.cluster.queue.puller import Puller
from broker.cluster.queue.requests import Requests
from broker.cluster.queue.results import Results
from broker.cluster.queue.runner import Runner
from broker.cluster.queue.store import Store
from broker.cluster.queue.sweep import Sweep
from broker.cluster.queue.turns import Turns

if TYPE_CHECKING:
    from broker.server import Broker

DRAIN_SECONDS = 1.0


class Queue:
    def __init__(self, broker: Broker, bus: Bus, members: Members) -> None:
        settings, nats = broker.settings.queue, broker.settings.nats
        patience = nats.wait_seconds
        names = Names(nats.cluster)
        self.names = names
        self.patience = patience
        self.store = Store(bus, names, settings, nats.replicas)
        objects = Objects(bus, names.requests, nats.replicas, patience, None)
        requests = Requests(self.store, objects)
        self.results = Results(bus, names, settings, nats.replicas, patience)
        self.marks = Marks(self.store, self.results, members.me, patience)
        self.dead = DeadLetters(self.store, names, self.results, self.marks, requests, patience)
        turns = Turns(bus, patience, broker.settings.limits.queue_seconds)
        self.producer = Producer(broker, names, self.store, requests, self.results, self.dead, turns)
        self.asking = Asking(broker, self.store, self.results, self.dead, turns)
        self.runner = Runner(broker, bus, members, requests, self.marks, self.results, self.dead)
        self.puller = Puller(broker, bus, names, self.store, self.runner)
        self._sweep = Sweep(bus, names, self.store, members, objects, patience)
        self._watching: asyncio.Task[None] | None = None
        self._seen = (0, 0)  # calls in the queue, and dead, when it was looked at last
        bus.on_connect(self._connected)

    async def _connected(self) -> None:
        await self.puller.connected()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
            self._sweep.start()

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(Away):
                calls = await self.store.state(self.names.calls, self.patience)
                dead = await self.store.state(self.names.dead, self.patience)
                self._seen = calls.messages, dead.messages
                self.producer.kept = await self.store.size(self.patience)
            await asyncio.sleep(WATCH_SECONDS)

    # --- what is told -------------------------------------------------------------------------------------------------

    def brief(self) -> dict[str, int]:
        """As it was a moment ago; what this broker has, and has done, is so now."""
        calls, dead = self._seen
        return {"calls": calls, "dead": dead, "running_here": self.puller.held, **self.runner.counts}

    async def status(self) -> dict[str, Any]:
        """As it is now, everywhere."""
        consumers = await self.store.consumers(self.patience)
        calls = await self.store.state(self.names.calls, self.patience)
        dead = await self.store.state(self.names.dead, self.patience)
        tools: list[dict[str, Any]] = [
            {
                "tool": tool,
                "queued": one.num_pending or 0,
                "running": one.num_ack_pending or 0,
                "again": one.num_redelivered or 0,
                "brokers": bool(one.num_waiting or one.num_ack_pending),
            }
            for tool, one in sorted(consumers.items())
        ]
        queued, running = (sum(one[what] for one in tools) for what in ("queued", "running"))
        return {
            "calls": calls.messages,
            "bytes": await self.store.size(self.patience),
            "queued": queued,
            "running": running,
            "others": max(0, calls.messages - queued - running),  # of tools that no broker knows
            "dead": dead.messages,
            "tools": [one for one in tools if one["queued"] or one["running"]],
            "time": round(time.time(), 3),
        }

    # --- the end ------------------------------------------------------------------------------------------------------

    async def stop_accepting(self) -> None:
        self.results.stop()
        await self.puller.stop_pulling(DRAIN_SECONDS)

    async def stop(self, seconds: float) -> None:
        for task in (self._watching, self._sweep.task):
            if task is not None:
                task.cancel()
        await self.puller.stop(seconds)
