"""What NATS' own tools ask of a service: who is there, what it can do, how it fares (ADR-32)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from broker import __version__
from broker.bus import Bus

if TYPE_CHECKING:
    from nats.aio.msg import Msg

SERVICE = "toolhost-broker"
DESCRIPTION = "tools, called with the request object of the line protocol"
QUEUE = "q"  # ADR-32's own: the members of a cluster share what comes

_encode = msgspec.json.Encoder().encode


class Endpoint:
    """One tool, as NATS sees it."""

    def __init__(self, name: str, subject: str, metadata: dict[str, str]) -> None:
        self.name = name
        self.subject = subject
        self.metadata = metadata
        self.requests = 0
        self.errors = 0
        self.nanoseconds = 0
        self.last_error = ""

    def info(self) -> dict[str, Any]:
        return {"name": self.name, "subject": self.subject, "queue_group": QUEUE, "metadata": self.metadata}

    def stats(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": QUEUE,
            "num_requests": self.requests,
            "num_errors": self.errors,
            "last_error": self.last_error,
            "processing_time": self.nanoseconds,
            "average_processing_time": self.nanoseconds // self.requests if self.requests else 0,
            "data": {"tool": self.metadata["tool"]},
        }


class Service:
    def __init__(self, bus: Bus, instance: str, metadata: dict[str, str], endpoints: Callable[[], list[Endpoint]]):
        self._bus = bus
        self._endpoints = endpoints
        self._started = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._identity = {"name": SERVICE, "id": instance, "version": __version__, "metadata": metadata}

    async def start(self) -> None:
        answers = {"PING": self._ping, "INFO": self._info, "STATS": self._stats}
        for verb, answer in answers.items():
            for whom in ("", f".{SERVICE}", f".{SERVICE}.{self._identity['id']}"):
                await self._bus.client.subscribe(f"$SRV.{verb}{whom}", cb=self._telling(answer))

    def _telling(self, answer: Callable[[], dict[str, Any]]) -> Callable[[Msg], Any]:
        async def tell(message: Msg) -> None:
            if message.reply:
                await message.respond(self._fitting(answer()))

        return tell

    def _fitting(self, document: dict[str, Any]) -> bytes:
        """Many tools with long descriptions are more than one message can have: then only their names are told."""
        whole = _encode(document)
        if len(whole) > self._bus.client.max_payload:
            for endpoint in document["endpoints"]:
                endpoint["metadata"] = {"tool": endpoint.get("metadata", {}).get("tool", "")}
            whole = _encode(document)
        return whole

    def _ping(self) -> dict[str, Any]:
        return {"type": "io.nats.micro.v1.ping_response", **self._identity}

    def _info(self) -> dict[str, Any]:
        endpoints = [endpoint.info() for endpoint in self._endpoints()]
        kind = "io.nats.micro.v1.info_response"
        return {"type": kind, **self._identity, "description": DESCRIPTION, "endpoints": endpoints}

    def _stats(self) -> dict[str, Any]:
        endpoints = [endpoint.stats() for endpoint in self._endpoints()]
        return {
            "type": "io.nats.micro.v1.stats_response",
            **self._identity,
            "started": self._started,
            "endpoints": endpoints,
        }
