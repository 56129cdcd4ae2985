"""How long calls took: what has been counted by tool and face, and what can be said of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from broker._native import lib

if TYPE_CHECKING:
    from broker.model import Tool

BOUNDS: tuple[float, ...] = tuple(lib.tb_bounds)  # seconds: the most that counts in each bucket; the last has no bound


def counted(tool: Tool) -> dict[str, tuple[list[int], float]]:
    """By face: the buckets, and the seconds of all calls together. Faces without a call are left out."""
    found = {face: (list(one.buckets), one.seconds) for face, one in tool.latencies.items()}
    return {face: (buckets, seconds) for face, (buckets, seconds) in found.items() if any(buckets)}


def quantile(buckets: Sequence[int], share: float) -> float:
    """Seconds within which this share of calls was answered: as if calls were spread evenly over their bucket."""
    left = share * sum(buckets)
    below = 0.0
    for count, bound in zip(buckets, BOUNDS, strict=False):
        if count and left <= count:
            return below + (bound - below) * left / count
        left -= count
        below = bound
    return below  # longer than all bounds: nobody knows how much


def summary(tool: Tool) -> dict[str, dict[str, Any]]:
    return {
        face: {
            "count": sum(buckets),
            "seconds": round(seconds, 6),
            "p50_ms": round(quantile(buckets, 0.5) * 1000, 3),
            "p99_ms": round(quantile(buckets, 0.99) * 1000, 3),
            "buckets": buckets,
        }
        for face, (buckets, seconds) in counted(tool).items()
    }
