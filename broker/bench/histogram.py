"""A histogram of whole numbers with log-linear buckets: every power of two in 128 steps, so 0.4 % off at most."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

BITS = 7  # 2**BITS steps a power of two; below 2**(BITS + 1) every number has a bucket of its own


class Wire(Struct, kw_only=True, forbid_unknown_fields=True):
    """The histogram as JSON has it: [the least number of a bucket, how many are in it], rising; empty ones left out."""

    unit: str = "ns"
    bits: int = BITS
    count: int = 0
    min: int = 0
    max: int = 0
    sum: int = 0
    buckets: list[tuple[int, int]] = []


class Histogram:
    """Counts numbers ≥ 0; a percentile is at most half a bucket away from the number that has that rank.

    >>> histogram = Histogram()
    >>> histogram.record(1_000)
    >>> histogram.record(50_000, 3)
    >>> histogram.count, histogram.percentile(25), histogram.max
    (4, 1002, 50000)
    """

    __slots__ = ("_counts", "max", "min", "sum")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.min = 0
        self.max = 0
        self.sum = 0

    def record(self, value: int, times: int = 1) -> None:
        """Also a number that is a little below 0, as clocks have them, counts as 0."""
        if value < 0:
            value = 0
        shift = value.bit_length() - BITS - 1
        index = value if shift <= 0 else (shift << BITS) + (value >> shift)
        counts = self._counts
        if value > self.max:
            self.max = value
        if value < self.min or not counts:
            self.min = value
        self.sum += value * times
        counts[index] = counts.get(index, 0) + times

    def merge(self, other: Histogram) -> None:
        if not other._counts:
            return
        self.min = min(self.min, other.min) if self._counts else other.min
        self.max = max(self.max, other.max)
        self.sum += other.sum
        for index, times in other._counts.items():
            self._counts[index] = self._counts.get(index, 0) + times

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    @property
    def mean(self) -> float:
        return self.sum / count if (count := self.count) else 0.0

    def percentile(self, percent: float) -> int:
        """The least number that at least this share of all numbers do not exceed; 0 if there are none."""
        wanted = max(1, math.ceil(self.count * percent / 100 - 1e-9))
        seen = 0
        for low, width, times in self._buckets():
            seen += times
            if seen >= wanted:
                return min(max(low + width // 2, self.min), self.max)
        return 0

    def steps(self) -> Iterator[tuple[float, int]]:
        """(the share of all numbers up to and with a bucket, in percent; the bucket's number), rising: for a plot."""
        count = self.count
        seen = 0
        for low, width, times in self._buckets():
            seen += times
            yield 100 * seen / count, min(max(low + width // 2, self.min), self.max)

    def _buckets(self) -> Iterator[tuple[int, int, int]]:
        for index in sorted(self._counts):
            shift = max(0, (index >> BITS) - 1)
            yield (index - (shift << BITS)) << shift, 1 << shift, self._counts[index]

    def wire(self) -> Wire:
        buckets = [(low, times) for low, _, times in self._buckets()]
        return Wire(count=self.count, min=self.min, max=self.max, sum=self.sum, buckets=buckets)

    @classmethod
    def read(cls, wire: Wire) -> Histogram:
        """Raises ValueError where the numbers contradict each other."""
        histogram = cls()
        for low, times in wire.buckets:
            if low < 0 or times < 1:
                raise ValueError(f"a bucket is [a number ≥ 0, a count ≥ 1], not [{low}, {times}]")
            histogram.record(low, times)
        if wire.bits != BITS or histogram.count != wire.count:
            raise ValueError(f"its buckets hold {histogram.count} numbers, its count is {wire.count}")
        histogram.min, histogram.max, histogram.sum = wire.min, wire.max, wire.sum
        return histogram
