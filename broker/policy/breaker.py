"""When a tool's toolhosts fail too often, its calls are answered at once for a while. Pure; the clock is an argument.

TRANSITIONS is the only place that decides which state follows.
"""

from __future__ import annotations

import random
from collections import deque
from enum import Enum
from typing import NamedTuple


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "half-open"  # one call is on its way to find out


class Event(Enum):
    TRIPPED = "tripped"  # too many failures
    TIME_IS_UP = "time is up"
    PROBE_PASSED = "probe passed"
    PROBE_FAILED = "probe failed"
    PROBE_LOST = "probe never ran"
    RESET = "reset"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.CLOSED, Event.TRIPPED): State.OPEN,
    (State.OPEN, Event.TIME_IS_UP): State.PROBING,
    (State.PROBING, Event.PROBE_PASSED): State.CLOSED,
    (State.PROBING, Event.PROBE_FAILED): State.OPEN,
    (State.PROBING, Event.PROBE_LOST): State.OPEN,
    (State.OPEN, Event.RESET): State.CLOSED,
    (State.PROBING, Event.RESET): State.CLOSED,
    (State.CLOSED, Event.RESET): State.CLOSED,
}


class Settings(NamedTuple):
    in_a_row: int = 5
    least_calls: int = 10
    share: float = 0.5
    window_seconds: float = 60.0
    open_seconds: float = 30.0
    most_seconds: float = 300.0
    jitter: float = 0.1


BUCKETS = 6


class Breaker:
    """One tool's. Counts what its toolhosts did wrong, never what the broker refused."""

    __slots__ = (
        "_buckets",
        "_period",
        "_probe",
        "_row",
        "_settings",
        "_trips",
        "_until",
        "last_reason",
        "state",
        "trips",
    )

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._period = settings.window_seconds / BUCKETS
        self.state = State.CLOSED
        self.last_reason = ""
        self.trips = 0
        self._trips = 0  # in a row, for the back-off
        self._row = 0
        self._until = 0.0
        self._probe = 0  # the number of the newest one: an older one has nothing to say any more
        self._buckets: deque[list[float]] = deque(maxlen=BUCKETS + 1)  # [from, calls, failures]

    # --- what happened ----------------------------------------------------------------------------------------------

    def succeeded(self, count: int, now: float) -> None:
        """Calls that their toolhost answered as it should. Of one under probation, see `probe_passed`."""
        self._row = 0
        self._bucket(now)[1] += count

    def failed(self, reason: str, now: float) -> bool:
        """A crash, a timeout, a broken or oversize reply. True if that trips it."""
        self._row += 1
        self.last_reason = reason
        bucket = self._bucket(now)
        bucket[1] += 1
        bucket[2] += 1
        if self.state is not State.CLOSED or not self._too_many(now):
            return False
        self._open(Event.TRIPPED, now)
        return True

    def _too_many(self, now: float) -> bool:
        if self._row >= self._settings.in_a_row:
            return True
        recent = [bucket for bucket in self._buckets if bucket[0] > now - self._settings.window_seconds]
        calls = sum(bucket[1] for bucket in recent)
        failures = sum(bucket[2] for bucket in recent)
        return calls >= self._settings.least_calls and failures >= calls * self._settings.share

    def _bucket(self, now: float) -> list[float]:
        if not self._buckets or now - self._buckets[-1][0] >= self._period:
            self._buckets.append([now, 0.0, 0.0])
        return self._buckets[-1]

    # --- may a call pass? -------------------------------------------------------------------------------------------

    def may_probe(self, now: float) -> int:
        """Asked while it is not closed: a number makes the caller's call the one probe; it owes us its outcome."""
        if self.state is State.OPEN and now >= self._until:
            self._move(Event.TIME_IS_UP)
            self._probe += 1
            return self._probe
        return 0

    def wait(self, now: float) -> float:
        """Seconds until the next probe."""
        return max(0.0, self._until - now)

    def probe_passed(self, probe: int) -> None:
        if self._awaits(probe):
            self._move(Event.PROBE_PASSED)
            self._forget()

    def probe_failed(self, probe: int, reason: str, now: float) -> None:
        self.last_reason = reason
        if self._awaits(probe):
            self._open(Event.PROBE_FAILED, now)

    def probe_lost(self, probe: int) -> None:
        """The probe was refused on the way: the next call may try."""
        if self._awaits(probe):
            self._move(Event.PROBE_LOST)

    def _awaits(self, probe: int) -> bool:
        """Not after a reset, and not when a newer probe is on its way."""
        return self.state is State.PROBING and probe == self._probe

    def reset(self) -> None:
        self._move(Event.RESET)
        self._forget()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _open(self, event: Event, now: float) -> None:
        self._move(event)
        self.trips += 1
        seconds = min(self._settings.most_seconds, self._settings.open_seconds * 2**self._trips)
        self._trips += 1
        self._until = now + min(self._settings.most_seconds, seconds * random.uniform(1.0, 1.0 + self._settings.jitter))

    def _move(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    def _forget(self) -> None:
        self._row = self._trips = 0
        self._buckets.clear()
