"""What this broker shares with the others of its cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from broker.bus import Bus
from broker.cluster.gate import Gate
from broker.cluster.keys import Keys
from broker.cluster.kv import Bucket
from broker.cluster.leases import KEEP_SECONDS, SharedLeases
from broker.cluster.members import Members

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
        self.members = Members(bus, settings.cluster)
        # From its last change, a key may wait for its turn, run, and then be remembered.
        kept = limits.queue_seconds + limits.max_timeout_seconds + ttl + MARGIN_SECONDS
        keys = Bucket(bus, f"{name}_keys", kept, settings.replicas)
        leases = Bucket(bus, f"{name}_leases", KEEP_SECONDS, settings.replicas)
        self.keys = Keys(keys, self.members, ttl, settings.wait_seconds, broker.log)
        self.leases = SharedLeases(leases, settings.wait_seconds)
        self.gate = Gate(broker, self.keys, self.leases)

    def status(self) -> dict[str, Any]:
        return {
            "connected": self._bus.connected,
            "server": self._bus.place,
            "broker": self.members.me,
            "others": self.members.others(),
            "waiting_calls": self.gate.room.calls,
            "untold_bytes": self.keys.untold,
        }

    async def stop(self) -> None:
        """The others are told what came of our calls, then that we are gone."""
        await self.keys.stop(LAST_WORDS_SECONDS)
        await self.leases.stop(LAST_WORDS_SECONDS)
        await self.members.stop()
