"""At most one execution a key: results kept for a while, duplicates of a call under way wait for it. Pure.

The promise ends with the entry: after the TTL, on eviction, and with the process.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any

import msgspec
from msgspec import Raw, Struct

LONG_KEY = 128  # bytes; longer ones are kept as their digest
OVERHEAD = 200  # bytes that an entry costs beside its key and its reply


class _Reply(Struct):
    """What a hit repeats of the first reply, as it stood."""

    ok: Raw = Raw(b"false")
    status: Raw = Raw()
    output_json: Raw = Raw()
    error: Raw = Raw()
    type: Raw = Raw()
    aid: Raw = Raw()


_decode = msgspec.json.Decoder(_Reply).decode


def key_of(principal: str, tool: str, key: str) -> Hashable:
    raw = key.encode()
    return principal, tool, hashlib.sha256(raw).digest() if len(raw) > LONG_KEY else raw


class Entry:
    """One key: under way (with those who wait), or answered."""

    __slots__ = ("_hit", "key", "line", "size", "until", "waiting")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.waiting: list[Any] = []  # whoever is to be answered as well; the owner knows how
        self.line = b""  # the first reply, whatever id it had, until somebody asks for it again
        self.until = 0.0
        self.size = 0
        self._hit = b""

    def hit(self, ids: bytes | None) -> bytes:
        """The reply line for a duplicate, under its own id."""
        if not self._hit:
            reply = _decode(self.line)
            parts = [b'"ok":' + bytes(reply.ok)]
            for name in ("status", "output_json", "error", "type", "aid"):
                value = bytes(getattr(reply, name))
                if value:
                    parts.append(b'"' + name.encode() + b'":' + value)
            parts.append(b'"idempotent_hit":true,"ds_state":{}}\n')
            self._hit = b",".join(parts)
            self.line = b""
        if ids:
            return b'{"id":' + ids[:-1] + b"," + self._hit
        return b"{" + self._hit


class Cache:
    """Bounded by entries and bytes: the expired go first, then the least recently used; never one under way."""

    def __init__(self, ttl: float, most: int, most_bytes: int) -> None:
        self._ttl = ttl
        self._most = most
        self._most_bytes = most_bytes
        self._running: dict[Hashable, Entry] = {}
        self._done: OrderedDict[Hashable, Entry] = OrderedDict()  # least recently used first
        self._expiry: deque[Entry] = deque()  # in order of completion
        self.size = 0
        self.hits = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._done)

    def find(self, key: Hashable, now: float) -> Entry | None:
        """The entry under this key, alive: one to wait for (`until` is 0) or one that has its answer."""
        entry = self._running.get(key)
        if entry is not None:
            return entry
        entry = self._done.get(key)
        if entry is None:
            return None
        if entry.until <= now:
            self._drop(entry)
            return None
        self._done.move_to_end(key)
        return entry

    def begin(self, key: Hashable) -> Entry:
        """Nobody has used the key: whoever asks now is the first."""
        entry = self._running[key] = Entry(key)
        return entry

    def finish(self, entry: Entry, line: bytes, now: float) -> list[Any]:
        """The first call has its answer. Who waited for it."""
        self._running.pop(entry.key, None)
        entry.line = line
        entry.until = now + self._ttl
        entry.size = len(line) + _weight(entry.key) + OVERHEAD
        self.size += entry.size
        self._done[entry.key] = entry
        self._expiry.append(entry)
        waiting, entry.waiting = entry.waiting, []
        self._shrink(now)
        return waiting

    def free(self, entry: Entry) -> list[Any]:
        """The first call never reached a toolhost: the key is as if it had not been used. Who waited for it."""
        if self._running.get(entry.key) is entry:
            del self._running[entry.key]
        waiting, entry.waiting = entry.waiting, []
        return waiting

    def expire(self, now: float) -> None:
        while self._expiry and self._expiry[0].until <= now:
            entry = self._expiry.popleft()
            if self._done.get(entry.key) is entry:
                self._drop(entry)

    def _shrink(self, now: float) -> None:
        if len(self._done) <= self._most and self.size <= self._most_bytes:
            return
        self.expire(now)
        while self._done and (len(self._done) > self._most or self.size > self._most_bytes):
            self._drop(next(iter(self._done.values())))
        if len(self._expiry) > 2 * len(self._done) + 64:  # mostly entries that were evicted early
            self._expiry = deque(entry for entry in self._expiry if self._done.get(entry.key) is entry)

    def _drop(self, entry: Entry) -> None:
        del self._done[entry.key]
        self.size -= entry.size


def _weight(key: Hashable) -> int:
    return sum(map(len, key)) if isinstance(key, tuple) else 0
