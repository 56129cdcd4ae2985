"""Whose state is whose: a session's DSState, one call at a time. Pure; the clock is an argument.

A toolhost keeps its state from one caller to the next, so what goes to it always replaces that state whole, in our own
words: a `delta` of the caller's is applied here, never there.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Any, Protocol

import msgspec
from msgspec import Raw, Struct

from broker.policy.story import EMPTY, Story

LONGEST_NAME = 256
LOOKS = 8  # at sessions that are in use, while room is made
SLOT = re.compile(r"(0|[1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|25[0-5])")


class BadState(Exception):
    """The caller's ds_state cannot be understood."""


class State(Struct):
    """A ds_state on the wire, a caller's or a toolhost's."""

    delta: bool = False
    slots: dict[str, Raw] = {}
    removed_slots: list[int] = []


class _Reply(Struct):
    ds_state: State | None = None


_state = msgspec.json.Decoder(State)
_reply = msgspec.json.Decoder(_Reply)
_encode = msgspec.json.Encoder().encode

Slots = dict[str, Raw]


def read(raw: bytes) -> State:
    """A caller's ds_state, checked."""
    try:
        state = _state.decode(raw)
    except msgspec.ValidationError as error:
        raise BadState(f"ds_state: {str(error)[0].lower()}{str(error)[1:]}") from None
    for key, value in state.slots.items():
        if not SLOT.fullmatch(key):
            raise BadState(f"ds_state: slot {key!r} is not a number from 0 to 255")
        if bytes(value).lstrip()[:1] != b"{":
            raise BadState(f"ds_state: slot {key} is not an object")
    return state


def applied(slots: Slots, state: State) -> Slots:
    """The slots after a full state (which replaces them) or a delta (which builds on them)."""
    if not state.delta:
        return state.slots
    changed = {**slots, **state.slots}
    for slot in state.removed_slots:
        changed.pop(str(slot), None)
    return changed


def after_reply(slots: Slots, line: bytes) -> Slots:
    """The slots after what a toolhost reports; a reply that reports nothing we understand changes nothing."""
    try:
        state = _reply.decode(line).ds_state
    except msgspec.DecodeError:
        return slots
    if state is None or not state.delta:
        return slots
    return applied(slots, state)


def written(slots: Slots) -> bytes:
    """As it goes to a toolhost: whole."""
    return b'"ds_state":' + _encode({"slots": slots})


class Waiter(Protocol):
    """A call that waits for its session."""

    since: float
    weight: int

    @property
    def caller(self) -> Hashable: ...


class Session:
    """One caller's state, and the calls that wait for their turn on it."""

    __slots__ = ("dropped", "holder", "size", "slots", "story", "used", "users", "waiting")

    def __init__(self) -> None:
        self.slots: Slots = {}
        self.story: Story | None = None  # its second document, where event tools have made one
        self.users = 0  # calls under way that may change it
        self.size = 0
        self.used = 0.0
        self.holder: Any = None  # the call that has it
        self.dropped = False  # nobody will find it again
        self.waiting: deque[Any] = deque()  # Waiters; the owner knows how they go on

    @property
    def needed(self) -> bool:
        """Somebody would miss it."""
        return self.busy or self.users > 0 or bool(self.waiting)

    @property
    def text(self) -> bytes:
        """The second document."""
        return self.story.text if self.story is not None else EMPTY

    @property
    def busy(self) -> bool:
        return self.holder is not None


class Sessions:
    """All sessions, the least recently used first. Bounded in number, bytes and idle time; a busy one stays."""

    def __init__(self, most: int, most_bytes: int, idle_seconds: float) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._idle = idle_seconds
        self._sessions: OrderedDict[Hashable, Session] = OrderedDict()
        self.size = 0
        self.told = 0  # times that a second document has changed, or gone

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def get(self, key: Hashable, now: float) -> Session:
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session()
        self._sessions.move_to_end(key)
        session.used = now
        self._shrink()
        return session

    def keep(self, session: Session, slots: Slots, now: float) -> None:
        """The session's new state."""
        if session.dropped:
            return
        size = sum(len(key) + len(bytes(value)) for key, value in slots.items())
        size += len(session.story.text) if session.story is not None else 0
        self.size += size - session.size
        session.size = size
        session.slots = {slot: value.copy() for slot, value in slots.items()}  # not the whole line that they came in
        session.used = now
        self._shrink()

    def find(self, key: Hashable) -> Session | None:
        """Nobody's use of it."""
        return self._sessions.get(key)

    def patch(self, session: Session, patch: bytes, most: int, now: float) -> str:
        """Merges it into the second document; or why not."""
        story = session.story or Story()
        before = session.text if session.story is not None else b""
        problem = story.patch(patch, most)
        if not problem:
            session.story = story
            session.used = now
            self._weigh(session, len(story.text) - len(before))
        return problem

    def forget_story(self, key: Hashable) -> bool:
        """Was there one?"""
        session = self._sessions.get(key)
        if session is None or session.story is None:
            return False
        size, session.story = len(session.story.text), None
        self._weigh(session, -size)
        return True

    def _weigh(self, session: Session, more: int) -> None:
        """Its second document has changed."""
        if not session.dropped:
            self.told += 1
            session.size += more
            self.size += more
            self._shrink()

    def stories(self) -> list[tuple[Hashable, bytes]]:
        """All second documents, the least recently used first."""
        return [(key, session.story.text) for key, session in self._sessions.items() if session.story is not None]

    def restore(self, key: Hashable, text: bytes, now: float) -> None:
        """One that was written down before."""
        session = self.get(key, now)
        session.story = Story(text)
        self._weigh(session, len(text))

    def drop(self, key: Hashable) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self.size -= session.size
            session.dropped = True
            self.told += session.story is not None

    def expire(self, now: float) -> None:
        for key, session in list(self._sessions.items()):
            if now - session.used < self._idle:
                break
            if not session.needed:
                self.drop(key)

    def _shrink(self) -> None:
        """Those in use are not dropped, and count as just used; of many, a few are looked at each time."""
        newest, looks = next(reversed(self._sessions), None), LOOKS
        while looks and (len(self._sessions) > self._most or self.size > self._most_bytes):
            key, session = next(iter(self._sessions.items()))
            if key == newest:
                return
            if session.needed:
                self._sessions.move_to_end(key)
                looks -= 1
            else:
                self.drop(key)


class WaitingRoom:
    """All calls that wait for their session, or for the cluster, by caller: how many, how heavy, who has waited for too
    long."""

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds = seconds  # that anybody waits here at the most,
        self.what = what  # and what for
        self._by_caller: dict[Hashable, dict[Any, Session]] = {}  # Waiter → what it waits for, in order of arrival
        self.calls = 0
        self.size = 0

    def enter(self, waiter: Waiter, session: Session) -> None:
        """At the end of its session's row."""
        session.waiting.append(waiter)
        self.step_in(waiter, session)

    def step_in(self, waiter: Waiter, session: Session) -> None:
        self._by_caller.setdefault(waiter.caller, {})[waiter] = session
        self.calls += 1
        self.size += waiter.weight

    def step_out(self, waiter: Waiter) -> Session:
        """It keeps its place in the row: to come back under another caller, or because it is its turn."""
        waiters = self._by_caller[waiter.caller]
        session = waiters.pop(waiter)
        if not waiters:
            del self._by_caller[waiter.caller]
        self.calls -= 1
        self.size -= waiter.weight
        return session

    def next_of(self, session: Session) -> Any:
        """The next one of a session, whose turn it is now."""
        waiter = session.waiting.popleft()
        self.step_out(waiter)
        return waiter

    def of(self, caller: Hashable) -> list[Any]:
        return list(self._by_caller.get(caller, ()))

    def overdue(self, before: float) -> list[Any]:
        late = []
        for waiters in self._by_caller.values():
            for waiter in waiters:
                if waiter.since >= before:
                    break
                late.append(waiter)
        return late

    def everybody(self) -> list[Any]:
        return [waiter for waiters in self._by_caller.values() for waiter in waiters]

    def leave(self, waiters: list[Any]) -> None:
        """They do not wait any longer."""
        for session in {self.step_out(waiter) for waiter in waiters}:
            staying = (waiter for waiter in session.waiting if waiter in self._by_caller.get(waiter.caller, ()))
            session.waiting = deque(staying)
