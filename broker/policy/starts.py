"""A toolhost that dies at start-up again and again is not started in a loop: back-off, then broken. Pure."""

from __future__ import annotations

import random

from broker import errors
from broker.errors import Refusal

BROKEN_AFTER = 5  # starts that failed in a row
BACKOFF_SECONDS = (0.05, 30.0)
JITTER = 0.1


class Starts:
    """What became of one pool's starts."""

    __slots__ = ("broken", "failures", "retry_at")

    def __init__(self) -> None:
        self.failures = 0  # in a row
        self.broken = ""  # why
        self.retry_at = 0.0

    def failed(self, reason: str, now: float) -> float:
        """Seconds until the next try."""
        self.failures += 1
        least, most = BACKOFF_SECONDS
        wait: float = min(most, least * 2 ** (self.failures - 1)) * random.uniform(1, 1 + JITTER)
        self.retry_at = now + wait
        if self.failures >= BROKEN_AFTER:
            self.broken = reason
        return wait

    def succeeded(self) -> None:
        """A toolhost has done real work, or lived for a while: what failed before is forgotten."""
        if self.failures:
            self.failures = 0
            self.broken = ""
            self.retry_at = 0.0

    def refusal(self, pool: str, now: float) -> Refusal | None:
        """Why nothing is run now."""
        if not self.broken or now >= self.retry_at:
            return None
        seconds = max(1, round(self.retry_at - now))
        return Refusal(errors.UNAVAILABLE, f"{pool}: its toolhost does not start: {self.broken}", retry_after=seconds)
