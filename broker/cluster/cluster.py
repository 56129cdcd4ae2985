"""What this broker shares with the others of its cluster."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from broker.bus import Bus
from broker.cluster.elsewhere import Beat, Elsewhere, Offer, beat_of
from broker.cluster.gate import Gate
from broker.cluster.keys import Keys
from broker.cluster.kv import Bucket
from broker.cluster.leases import KEEP_SECONDS, SharedLeases
from broker.cluster.members import Members
from broker.cluster.names import objects_of
from broker.cluster.objects import Objects
from broker.cluster.queue.queue import Queue
from broker.faces.nats.face import NatsFace
from broker.policy.breaker import State
from broker.runtimes.remote import Remote

if TYPE_CHECKING:
    from broker.server import Broker

MARGIN_SECONDS = 60.0
LAST_WORDS_SECONDS = 2.0


class Cluster:
    def __init__(self, broker: Broker, bus: Bus) -> None:
        settings, limits = broker.settings.nats, broker.settings.limits
        ttl = broker.settings.idempotency.ttl_seconds
        name = f"broker_{settings.cluster}"
        self._bus = bus
        self._broker = broker
        self._leaving = False
        self.members = Members(bus, settings.cluster)
        self.members.about_me = self._beat
        self.objects = Objects(bus, objects_of(settings.cluster), settings.replicas, settings.wait_seconds)
        self.face = NatsFace(broker, bus, self.members, self.objects)
        self.elsewhere: Elsewhere | None = None
        self.remote: Remote | None = None
        if settings.remote:
            self.elsewhere = Elsewhere(bus, self.members, self.objects, settings.cluster, self._learned, broker.log)
            self.remote = Remote(broker.settings, broker.core, bus, self.elsewhere, self.objects)
        # From its last change, a key may wait for its turn, run, and then be remembered.
        kept = limits.queue_seconds + limits.max_timeout_seconds + ttl + MARGIN_SECONDS
        keys = Bucket(bus, f"{name}_keys", kept, settings.replicas)
        leases = Bucket(bus, f"{name}_leases", KEEP_SECONDS, settings.replicas)
        self.keys = Keys(keys, self.members, ttl, settings.wait_seconds, broker.log)
        bus.on_connect(self.keys.connected)
        self.leases = SharedLeases(leases, settings.wait_seconds)
        self.gate = Gate(broker, self.keys, self.leases)
        self.queue = Queue(broker, bus, self.members)

    def status(self) -> dict[str, Any]:
        return {
            "connected": self._bus.connected,
            "server": self._bus.place,
            "broker": self.members.me,
            "others": self.members.others(),
            "face": self.face.status(),
            **({"remote": self.elsewhere.status()} if self.elsewhere is not None else {}),
            "waiting_calls": self.gate.room.calls,
            "untold_bytes": self.keys.untold,
            "queue": self.queue.brief(),
        }

    # --- what the others are told, and tell ---------------------------------------------------------------------------

    def _beat(self) -> bytes:
        broker = self._broker
        calls = sum(host.line.inflight for pool in broker.equipment.pools() for host in pool.ready)
        calls += sum(pool.queue.lines for pool in broker.equipment.everything())
        calls += sum(one.running for one in broker.equipment.commands)
        load = calls / (os.cpu_count() or 1)
        troubled = (tool.name for tool in broker.registry if tool.paused or tool.breaker.state is not State.CLOSED)
        leaving = self._leaving or broker.dispatcher.draining
        return beat_of(Beat(load, leaving, tuple(troubled), broker.registry.changes, self._bus.connections))

    def _learned(self, offers: list[Offer]) -> None:
        """Our own tools come first."""
        registry, remote = self._broker.registry, self.remote
        assert remote is not None
        free = [one for one in offers if (own := registry.get(one.info.aid)) is None or own.info.elsewhere]
        timeouts = {one.info.aid: one.timeout for one in free}
        now = {tool.name: tool.info for tool in registry.of(remote)}
        if now != {one.info.aid: one.info for one in free}:
            gone = registry.replace(remote, [one.info for one in free])
            self._broker.equipment.settle_pauses()
            self._broker.dispatcher.changed(registry.of(remote), gone)
        for tool in registry.of(remote):
            tool.timeout = tool.stats.timeout = timeouts[tool.name]

    def expire(self, now: float) -> None:
        self.face.expire(now)
        self.keys.expire(now)
        if self.remote is not None:
            self.remote.expire(now)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def stop_accepting(self) -> None:
        """What comes from now on is the others'."""
        self._leaving = True
        self.members.say()
        if self.elsewhere is not None:
            self.elsewhere.stop()
        await asyncio.gather(self.face.stop_accepting(), self.queue.stop_accepting())

    async def stop(self) -> None:
        """The others are told what came of our calls, then that we are gone."""
        await self.face.close()
        await self.queue.stop(LAST_WORDS_SECONDS)
        await self.keys.stop(LAST_WORDS_SECONDS)
        await self.leases.stop(LAST_WORDS_SECONDS)
        await self.members.stop()
