"""Calls of other brokers, by their names for them: one whose connection broke asks what has become of its call."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

KEEP_SECONDS = 60.0
MOST_BYTES = 32 * 1024 * 1024


class Told(NamedTuple):
    line: bytes
    headers: dict[str, str] | None
    when: float


class Recall:
    """Who listens to calls under way, and what was told of those that have ended; the oldest go first."""

    def __init__(self) -> None:
        self._under_way: dict[str, str] = {}  # where the reply goes
        self._told: OrderedDict[str, Told] = OrderedDict()
        self._size = 0

    def knows(self, call: str) -> bool:
        return call in self._under_way or call in self._told

    def begin(self, call: str, subject: str) -> None:
        self._under_way[call] = subject

    def listener(self, call: str) -> str:
        """Where its reply goes now."""
        return self._under_way.get(call, "")

    def told(self, call: str) -> Told | None:
        return self._told.get(call)

    def end(self, call: str, line: bytes, headers: dict[str, str] | None) -> None:
        self._under_way.pop(call, None)
        self._told[call] = Told(line, headers, time.monotonic())
        self._size += len(line)
        while self._size > MOST_BYTES and len(self._told) > 1:
            self._drop()

    def expire(self, now: float) -> None:
        while self._told and next(iter(self._told.values())).when < now - KEEP_SECONDS:
            self._drop()

    def _drop(self) -> None:
        _, told = self._told.popitem(last=False)
        self._size -= len(told.line)
