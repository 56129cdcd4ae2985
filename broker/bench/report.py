"""What was measured, as JSON: a stable schema (docs/bench.md), written and read with one set of types."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from broker.bench.cases import CLIENTS
from broker.bench.histogram import Histogram, Wire
from broker.bench.machine import Machine
from broker.bench.model import Failures, Plan, Tally


class Unreadable(Exception):
    """The file is no report; the message says why, and what to do."""


class Latency(Struct, kw_only=True):
    """In nanoseconds, of calls that succeeded."""

    p50: int
    p90: int
    p99: int
    p99_9: int
    max: int
    mean: float


class Part(Struct, kw_only=True):
    """A round: an equal share of the case's time."""

    seconds: float
    answered: int
    p50: int
    p99: int

    @property
    def rate(self) -> float:
        return self.answered / self.seconds if self.seconds else 0.0


class Case(Struct, kw_only=True):
    name: str
    face: str
    tool: str
    input_bytes: int
    loop: Literal["closed", "open"]
    depth: int  # closed: calls under way on each connection, or threads; open: 0
    connections: int
    rate_asked: float  # open: calls due each second; closed: 0
    seconds: float  # measured, without the warm-up
    succeeded: int
    rate: float  # calls answered each second
    latency: Latency
    failed: dict[str, Failures]
    late: int
    unanswered: int
    client_cpu_ns: int | None  # of the client's processor, for each call; none where it cannot be told apart
    rounds: list[Part]
    histogram: Wire

    def spread(self) -> float | None:
        """How far the rounds' rates are apart, as a share of their median; one round has none."""
        rates = [one.rate for one in self.rounds]
        middle = statistics.median(rates) if len(rates) > 1 else 0.0
        return (max(rates) - min(rates)) / middle if middle else None


class Report(Struct, kw_only=True):
    """`version` does not change for a new member; it does for one that goes, or means something else."""

    schema: Literal["toolhost-broker-bench"] = "toolhost-broker-bench"
    version: Literal[1] = 1
    made: str  # when, UTC
    command: list[str]
    subject: str  # who was measured, in words
    machine: Machine
    partial: str  # why not all was measured; empty: all was
    client: list[Case]  # the same client against a peer that answers at once
    cases: list[Case]


def case(plan: Plan, tally: Tally) -> Case:
    histogram = tally.latency()
    seconds = sum(one.seconds for one in tally.rounds)
    answered = sum(one.answered for one in tally.rounds)
    p50, p90, p99, p99_9 = (histogram.percentile(percent) for percent in (50, 90, 99, 99.9))
    return Case(
        name=plan.name,
        face=plan.face,
        tool=plan.tool,
        input_bytes=len(plan.input.encode()),
        loop="open" if plan.rate else "closed",
        depth=0 if plan.rate else plan.depth,
        connections=plan.connections,
        rate_asked=plan.rate,
        seconds=round(seconds, 6),
        succeeded=histogram.count,
        rate=round(answered / seconds, 3) if seconds else 0.0,
        latency=Latency(p50=p50, p90=p90, p99=p99, p99_9=p99_9, max=histogram.max, mean=round(histogram.mean, 1)),
        failed=tally.failed,
        late=tally.late,
        unanswered=tally.unanswered,
        client_cpu_ns=round(tally.cpu_seconds * 1e9 / tally.cpu_calls) if tally.cpu_calls else None,
        rounds=[_part(one.seconds, one.answered, one.latency) for one in tally.rounds],
        histogram=histogram.wire(),
    )


def _part(seconds: float, answered: int, latency: Histogram) -> Part:
    p50, p99 = latency.percentile(50), latency.percentile(99)
    return Part(seconds=round(seconds, 6), answered=answered, p50=p50, p99=p99)


def report(
    plans: Iterable[Plan],
    tallies: Iterable[Tally],
    *,
    command: Sequence[str],
    subject: str,
    machine: Machine,
    partial: str,
) -> Report:
    """Cases that were not begun are left out."""
    measured = [case(plan, tally) for plan, tally in zip(plans, tallies, strict=True) if tally.rounds or tally.failed]
    return Report(
        made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=list(command),
        subject=subject,
        machine=machine,
        partial=partial,
        client=[one for one in measured if one.face in CLIENTS],
        cases=[one for one in measured if one.face not in CLIENTS],
    )


def encode(whole: Report) -> bytes:
    return msgspec.json.encode(whole) + b"\n"


def read(path: str) -> Report:
    """Raises Unreadable, in words for whoever named the file."""
    again = "; make one with `broker bench --json FILE`"
    try:
        with open(path, "rb") as file:
            whole = msgspec.json.decode(file.read(), type=Report)
        for one in (*whole.client, *whole.cases):
            Histogram.read(one.histogram)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}{again}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise Unreadable(f"{path} is not a report of this version of `broker bench`: {error}{again}") from None
    return whole
