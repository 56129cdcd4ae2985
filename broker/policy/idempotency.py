"""At most one execution a key: results kept for a while, duplicates of a call under way wait for it. No I/O.

The promise ends with the entry: after the TTL, on eviction, and with the process. The table is in C (native/cache.h),
so that the board can look keys up by itself; here is who waits for what.
"""

from __future__ import annotations

import hashlib
from typing import Any

from broker._native import ffi, lib

LONG_KEY = 128  # bytes; longer ones are kept as their digest


def key_of(principal: str, tool: str, key: str) -> bytes:
    """What a call's key is looked up by."""
    who, name, word = principal.encode(), tool.encode(), key.encode()
    long = len(word) > LONG_KEY
    if long:
        word = hashlib.sha256(word).digest()
    whole = bytearray(lib.tb_key_size(len(who), len(name), len(word)))
    lib.tb_key(ffi.from_buffer(whole), who, len(who), name, len(name), word, len(word), long)
    return bytes(whole)


class Entry:
    """One key: under way (with those who wait), or answered."""

    __slots__ = ("kept", "waiting")

    def __init__(self, kept: Any) -> None:
        self.kept = ffi.gc(kept, lib.tb_entry_release)  # held: the cache may forget it meanwhile
        self.waiting: list[Any] = []  # whoever is to be answered as well; the owner knows how

    @property
    def until(self) -> float:
        """0: it is under way."""
        return float(self.kept.until)

    @property
    def size(self) -> int:
        return int(self.kept.size)

    def hit(self, ids: bytes | None) -> bytes:
        """The reply line for a duplicate, under its own id."""
        answer: bytes = ffi.buffer(self.kept.hit, self.kept.hit_len)[:]
        return b'{"id":' + ids[:-1] + b"," + answer if ids else b"{" + answer


def new_entry(key: bytes) -> Entry:
    """Not in a cache yet: whoever is interrupted before it is has nothing to give back."""
    kept = lib.tb_entry_new(key, len(key))
    if kept == ffi.NULL:
        raise MemoryError
    return Entry(kept)


class Cache:
    """Bounded by entries and bytes: the expired go first, then the least recently used; never one under way."""

    def __init__(self, ttl: float, most: int, most_bytes: int) -> None:
        self.table = ffi.gc(lib.tb_cache_new(ttl, most, most_bytes), lib.tb_cache_free)
        if self.table == ffi.NULL:
            raise MemoryError
        self._watched: dict[int, Entry] = {}  # under way, and not the board's alone
        self.hits = 0

    def __len__(self) -> int:
        return lib.tb_cache_entries(self.table)

    @property
    def size(self) -> int:
        return lib.tb_cache_bytes(self.table)

    def find(self, key: bytes, now: float) -> Entry | None:
        """The entry under this key, alive: one to wait for (`until` is 0) or one that has its answer."""
        kept = lib.tb_cache_find(self.table, key, len(key), now)
        if kept == ffi.NULL:
            return None
        return Entry(kept) if kept.until else self._watch(kept)

    def begin(self, entry: Entry) -> None:
        """Nobody has used its key: whoever asks now is the first."""
        lib.tb_cache_begin(self.table, entry.kept)
        entry.kept.watched = True
        self._watched[entry.kept.name] = entry

    def _watch(self, kept: Any) -> Entry:
        """Everybody who waits for one key waits at one place."""
        entry = self._watched.get(kept.name)
        if entry is not None:
            lib.tb_entry_release(kept)
            return entry
        kept.watched = True
        entry = self._watched[kept.name] = Entry(kept)
        return entry

    def adopt(self, kept: Any) -> Entry:
        """What was the board's to settle is ours now, and so is its hold on it."""
        return self._watch(kept)

    # Whoever is interrupted in the middle of these (Embedded: by a signal's handler) may do them again.

    def finish(self, entry: Entry, line: bytes, now: float) -> None:
        """The first call has its answer."""
        if lib.tb_cache_finish(self.table, entry.kept, line, len(line), now):
            raise MemoryError
        self._watched.pop(entry.kept.name, None)

    def free(self, entry: Entry) -> None:
        """The first call never reached a toolhost: the key is as if it had not been used."""
        lib.tb_cache_drop(self.table, entry.kept)
        self._watched.pop(entry.kept.name, None)

    def waits(self, kept: Any, caller: Any) -> bool:
        """Somebody else than this caller waits for it."""
        entry = self._watched.get(kept.name)
        return entry is not None and any(one.caller is not caller for one in entry.waiting)

    def kept(self, name: int) -> Entry | None:
        """The board has brought the answer to this entry."""
        return self._watched.pop(name, None)

    def expire(self, now: float) -> None:
        lib.tb_cache_expire(self.table, now)
