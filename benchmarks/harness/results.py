"""What a run has found, as it is stored: after every section, so that nothing is lost when it ends early."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from benchmarks.harness.rounds import Spread, ratios
from broker.bench.machine import Machine

Unit = Literal["µs", "ms", "calls/s", "lines/s", "MB"]


class Side(Struct, kw_only=True):
    """One of the two that a ratio compares: a figure a round."""

    name: str
    unit: Unit
    figures: list[float]


class Goal(Struct, frozen=True):
    sign: Literal["≤", "≥", "<"]
    value: float

    def met(self, figure: float) -> bool:
        if self.sign == "≥":
            return figure >= self.value
        return figure < self.value if self.sign == "<" else figure <= self.value


class Row(Struct, kw_only=True):
    """A ratio of PERFORMANCE.md's table, or a figure that has no other side."""

    name: str
    goal: Goal | None = None
    over: Side | None = None
    under: Side | None = None
    floor: bool = False  # what is below is a part of what is above: a ratio under 1 is the control's bad day, not ours
    fault: str = ""  # what makes it unmet, whatever the figures say
    note: str = ""
    problem: str = ""  # why there are no figures

    def figures(self) -> list[float]:
        if self.over is None:
            return []
        return self.over.figures if self.under is None else ratios(self.over.figures, self.under.figures)

    def disturbed(self) -> bool:
        """The control was slower than what contains it, so the ratio says nothing."""
        return self.floor and bool(self.figures()) and Spread(self.figures()).median < 1

    def met(self) -> bool | None:
        """None: it has no goal, or no figures, or none that say anything."""
        if self.goal is None or not self.figures() or self.disturbed():
            return None
        return not self.fault and self.goal.met(Spread(self.figures()).median)

    def settled(self) -> bool:
        """All rounds are on the same side of the goal."""
        return self.goal is None or bool(self.fault) or len({self.goal.met(one) for one in self.figures()}) < 2


class Peer(Struct, kw_only=True):
    """Somebody else who runs tools, or one of our own ways to be called."""

    name: str
    how: str  # its configuration
    ours: bool = False
    versions: dict[str, str] = {}
    p50: list[float] = []  # µs, one call at a time; a figure a round
    rate: list[float] = []  # calls/s, many under way
    problem: str = ""


class Curve(Struct, kw_only=True):
    name: str
    figures: list[list[float]]  # of each point, a figure a round


class Growth(Struct, kw_only=True):
    """How a figure changes with one thing."""

    name: str  # of its file, too
    title: str
    points: list[str] = []
    axis: str = ""  # what the points are
    unit: Unit = "calls/s"
    curves: list[Curve] = []
    note: str = ""
    problem: str = ""


class Results(Struct, kw_only=True):
    schema: str = "toolhost-broker-benchmarks"
    version: int = 1
    made: str
    command: str
    quick: bool
    machine: Machine
    seconds: float = 0.0
    partial: str = ""  # why not all was measured
    rows: list[Row] = []
    peers: list[Peer] = []
    growth: list[Growth] = []

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        os.replace(draft, path)


def load(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)
