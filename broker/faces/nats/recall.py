"""Calls of other brokers, by their names for them: one whose connection broke asks what has become of its call.

What is remembered is bounded. A call that may have been forgotten is never said not to have come.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

KEEP_SECONDS = 60.0
MOST_BYTES = 32 * 1024 * 1024
ROOM = 1024  # for what stands around a reply
SLACK_SECONDS = 30.0  # that a question may have been on its way


class Told(NamedTuple):
    line: bytes
    headers: dict[str, str] | None
    began: float
    when: float


class Recall:
    """Calls under way, and what was told of those that have ended; the oldest go first."""

    def __init__(self) -> None:
        self._under_way: dict[str, float] = {}  # since when
        self._held: set[str] = set()  # their callers do not read what they are told
        self._told: OrderedDict[str, Told] = OrderedDict()
        self._size = 0
        self._forgotten = float("-inf")  # when the youngest of those had come

    def knows(self, call: str) -> bool:
        return call in self._under_way or call in self._told

    def begin(self, call: str) -> None:
        self._under_way[call] = time.monotonic()

    def told(self, call: str) -> Told | None:
        return self._told.get(call)

    def certain(self, age: float) -> bool:
        """One that was sent so many seconds ago, and is not known, has never come."""
        return time.monotonic() - age - SLACK_SECONDS > self._forgotten

    def end(self, call: str, line: bytes, headers: dict[str, str] | None) -> None:
        now = time.monotonic()
        self._held.discard(call)
        self._told[call] = Told(line, headers, self._under_way.pop(call, now), now)
        self._size += len(line) + ROOM
        while self._size > MOST_BYTES and len(self._told) > 1:
            self._drop()

    def hold(self, call: str, *, held: bool) -> None:
        if held and call in self._under_way:
            self._held.add(call)
        else:
            self._held.discard(call)

    def held(self, call: str) -> bool:
        return call in self._held

    def expire(self, now: float) -> None:
        while self._told and next(iter(self._told.values())).when < now - KEEP_SECONDS:
            self._drop()

    def _drop(self) -> None:
        _, told = self._told.popitem(last=False)
        self._size -= len(told.line) + ROOM
        self._forgotten = max(self._forgotten, told.began)
