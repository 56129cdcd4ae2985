"""A run: how long it takes for what, where its results go, and what becomes of a part that fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from benchmarks.harness.controls import Controls, Failed
from benchmarks.harness.crew import Crew
from benchmarks.harness.results import Results

T = TypeVar("T")


class Pace(NamedTuple):
    """Rounds beside the one that warms up, and the seconds of each measurement."""

    rounds: int
    seconds: float
    peer_rounds: int
    peer_seconds: float
    growth_rounds: int
    growth_seconds: float


QUICK = Pace(3, 0.12, 3, 0.12, 2, 0.07)
FULL = Pace(11, 0.6, 9, 0.6, 7, 0.35)


class Bench:
    def __init__(self, results: Results, pace: Pace, path: Path, controls: Controls) -> None:
        self.results = results
        self.pace = pace
        self.controls = controls
        self._path = path
        self._begun = time.monotonic()

    def crew(self) -> Crew:
        return Crew(self.controls)

    def tell(self, words: str) -> None:
        print(f"{time.monotonic() - self._begun:4.0f} s  {words}", file=sys.stderr, flush=True)

    def keep(self) -> None:
        """What there is, is on the disk."""
        self.results.seconds = round(time.monotonic() - self._begun, 1)
        self.results.save(self._path)

    def attempt(self, name: str, measure: Callable[[], T]) -> T | str:
        """What was measured, or in one sentence why it was not."""
        try:
            return measure()
        except (Failed, OSError, RuntimeError, ValueError) as error:
            words = " ".join(str(error).split()) or type(error).__name__
            self.tell(f"{name}: {words}")
            return words
