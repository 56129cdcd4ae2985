"""A peer's worker, as the harness sees it: ask it to measure, get the answer."""

from __future__ import annotations

import sys

import msgspec

from benchmarks.harness.crew import Crew
from benchmarks.peers.worker import Answer, Ask
from benchmarks.policy import ON

GRACE_SECONDS = 30.0


class Called:
    def __init__(self, crew: Crew, module: str, *prefix: str) -> None:
        config = crew.file("broker.toml", ON)
        command = [*prefix, sys.executable, "-m", "benchmarks.peers.worker", module]
        self._member = crew.start(command, BROKER_CONFIG=config)

    def _ask(self, in_flight: int, seconds: float) -> Answer:
        line = msgspec.json.encode(Ask(in_flight, seconds))
        return msgspec.json.decode(self._member.ask(line, seconds + GRACE_SECONDS), type=Answer)

    def p50(self, seconds: float) -> float:
        """Microseconds, one call at a time."""
        return self._ask(1, seconds).p50_us

    def rate(self, in_flight: int, seconds: float) -> float:
        """Calls a second, so many under way."""
        return self._ask(in_flight, seconds).per_second
