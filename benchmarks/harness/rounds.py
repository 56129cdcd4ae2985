"""The arithmetic: sides measured in turn, their medians and spreads, and the ratio of two sides, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.harness import stop

Measure = Callable[[], float]


def interleaved(rounds: int, *sides: Measure, warm: bool = True) -> list[list[float]]:
    """Figures of each side: A B A B …, so that whatever else the machine does meets both. The first turn warms up."""
    figures: list[list[float]] = [[] for _ in sides]
    for number in range(-1 if warm else 0, rounds):
        for side, measure in enumerate(sides):
            stop.look()
            figure = measure()
            if number >= 0:
                figures[side].append(figure)
    return figures


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Of each round, since both of its sides had the same weather."""
    return [a / b for a, b in zip(over, under, strict=True)]


class Spread:
    """The median of some figures, and how far they are apart."""

    def __init__(self, figures: Sequence[float]) -> None:
        if not figures:
            raise ValueError("there are no figures")
        self.median = statistics.median(figures)
        self.low = min(figures)
        self.high = max(figures)
