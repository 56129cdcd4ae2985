"""The doorbell: tells an agent's worker that there is something in the agent's inbox."""

from __future__ import annotations

import msgspec

from broker.bus import Bus
from broker.cluster.kv import Away
from broker.faces.utp.streams import ASK_SECONDS, make_streams
from broker.observe.log import Log
from broker.utp import subjects
from broker.utp.subjects import Place

_encode = msgspec.json.Encoder().encode


class Doorbell:
    def __init__(self, bus: Bus, replicas: int, log: Log) -> None:
        self._bus = bus
        self._replicas = replicas
        self._log = log

    async def ring(self, place: Place, worker_target: str, agent_id: str, headers: dict[str, str]) -> None:
        """Done when the stream has it. Away: not yet."""
        from nats.errors import Error
        from nats.js.errors import NoStreamResponseError

        subject = subjects.wakeup(place, worker_target)
        if subject is None:
            self._log.warning("utp: nobody is woken", agent=agent_id, reason=f"worker_target is {worker_target!r}")
            return
        if not self._bus.connected:
            raise Away(f"NATS ({self._bus.place}) is away")
        try:
            js = self._bus.client.jetstream(timeout=ASK_SECONDS)
            try:
                await js.publish(subject, _encode({"agent_id": agent_id}), headers=headers)
            except NoStreamResponseError:
                await make_streams(self._bus, self._replicas)
                await js.publish(subject, _encode({"agent_id": agent_id}), headers=headers)
        except (Error, OSError, TimeoutError) as error:
            raise Away(f"NATS ({self._bus.place}): {str(error) or type(error).__name__}") from None
