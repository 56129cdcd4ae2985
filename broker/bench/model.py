"""What is measured, and what came of it: the words that all of `broker bench` share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec import Struct

from broker.bench.histogram import Histogram
from broker.client.failures import BY_CODE
from broker.client.reply import Wire, decode

LATE_NS = 1_000_000  # a call that is begun so long after it was due could not be started in time
TICK_NS = 100_000_000
FOREVER = 1 << 62
clock = time.perf_counter_ns

Tick = Callable[[int], None]  # about every TICK_NS, with the calls answered so far


class Plan(Struct, frozen=True, kw_only=True):
    """One case. With a rate it is an open loop: calls are due at fixed times, whatever became of those before."""

    face: str
    tool: str
    input: str  # JSON, as text
    depth: int = 1  # closed loop: calls under way, on each connection
    connections: int = 1
    rate: float = 0.0
    warmup: float = 0.0
    seconds: float = 1.0
    rounds: int = 1
    title: str = ""  # what the name says instead of the tool's

    @property
    def name(self) -> str:
        """Unique within a report; two reports are compared by it."""
        pace = f"{self.rate:g}/s" if self.rate else f"depth {self.depth}"
        many = f", {self.connections} connections" if self.connections > 1 else ""
        return f"{self.face}, {pace}{many}, {self.title or self.tool}"

    @property
    def grace(self) -> float:
        """How long the calls that are under way at the end are waited for."""
        return min(5.0, max(0.5, self.seconds))


class Round(Struct):
    """A part of a case's time: rounds show how much the figures vary by themselves."""

    seconds: float
    answered: int = 0  # within the time, so not those that were waited for at the end
    latency: Histogram = msgspec.field(default_factory=Histogram)


class Failures(Struct):
    """What calls failed with: how often, and the words of the first."""

    count: int
    example: str


class Tally(Struct):
    """What came of a case, as far as it got."""

    rounds: list[Round] = []
    failed: dict[str, Failures] = {}
    late: int = 0  # open loop: could not be started in time
    unanswered: int = 0  # not within the grace; their latency is counted as the time that they had waited
    cpu_seconds: float = 0.0  # of the client's thread; the socket's faces only
    cpu_calls: int = 0

    def fail(self, code: str, text: str, times: int = 1) -> None:
        known = self.failed.setdefault(code, Failures(0, text))
        known.count += times

    def latency(self) -> Histogram:
        whole = Histogram()
        for one in self.rounds:
            whole.merge(one.latency)
        return whole


class Lost(Exception):
    """Who was measured is gone; what was measured before stands in the tally."""


class Face(Protocol):
    """A way to call tools. A case runs against one, and adds to its tally; a face is closed when all is done."""

    name: str

    def measure(self, plan: Plan, tally: Tally, tick: Tick) -> None: ...

    def close(self) -> None: ...


def failure(line: bytes) -> tuple[str, str] | None:
    """A reply's code and words, if it is not a success."""
    try:
        wire: Wire = decode(line)
    except msgspec.DecodeError as error:
        return "bad_reply", f"the reply cannot be read: {error}"
    if wire.succeeded():
        return None
    code = wire.type if wire.type in BY_CODE else "tool_error"
    return code, wire.error or f"status {wire.status}"
