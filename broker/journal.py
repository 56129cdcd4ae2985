"""Numbered records on disk: lines of segment files, appended many at a time, dropped with the oldest segment.

A segment that is full is renamed to say which numbers are in it, so that nothing is kept in memory and a start reads
only the last one. A record may be written again; the newest one counts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading
import time
from pathlib import Path

NUMBERS = re.compile(rb"^\[([0-9]+),", re.MULTILINE)
SEALED = re.compile(r"records-([0-9]+)-([0-9]+)-([0-9]+)\.ndjson")
OPEN = re.compile(r"records-([0-9]+)\.ndjson")


class Segment:
    __slots__ = ("begun", "highest", "load", "lowest", "path", "place", "size")

    def __init__(self, path: Path, place: int, lowest: int, highest: int) -> None:
        self.path = path
        self.place = place  # in the order of writing
        self.lowest = lowest
        self.highest = highest
        self.begun = time.monotonic()
        self.load = 0  # bytes elsewhere that its records stand for
        self.size = path.stat().st_size if path.exists() else 0

    def has(self, number: int) -> bool:
        return self.lowest <= number <= self.highest


def _newest(path: Path, beginning: bytes) -> bytes:
    """The last line that begins like this, if it is whole."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        at = content.rfind(b"\n" + beginning) + 1
        if not at and content[: len(beginning)] != beginning:
            return b""
        end = content.find(b"\n", at)
        return content[at:end] if end > 0 else b""


class Journal:
    """Written by one thread, read by any. Each record is a JSON array whose first element is its number."""

    def __init__(self, directory: Path, segment_bytes: int, segment_seconds: float, segment_load: int) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._segment_seconds = segment_seconds
        self._segment_load = segment_load
        self._segments: list[Segment] = []
        self._lock = threading.Lock()
        self._fd = -1
        self._torn = False  # the last line may not have ended

    def open(self) -> int:
        """The highest number that there is."""
        for name in os.listdir(self._directory):
            if found := SEALED.fullmatch(name):
                place, lowest, highest = (int(group) for group in found.groups())
                self._segments.append(Segment(self._directory / name, place, lowest, highest))
            elif found := OPEN.fullmatch(name):
                path = self._directory / name
                numbers = [int(number) for number in NUMBERS.findall(path.read_bytes())]
                lowest, highest = (min(numbers), max(numbers)) if numbers else (0, 0)
                self._segments.append(Segment(path, int(found[1]), lowest, highest))
        self._segments.sort(key=lambda segment: segment.place)
        for segment in self._segments:
            self._seal(segment)  # also one that a crash has left in the middle of a line
        return max((segment.highest for segment in self._segments), default=0)

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self._segments)

    def append(self, rows: list[tuple[int, bytes]], load: int = 0) -> None:
        """All of them, in one write."""
        segment = self._writable()
        segment.load += load
        left = memoryview((b"\n" if self._torn else b"") + b"".join(line for _, row in rows for line in (row, b"\n")))
        self._torn = True
        numbers = [number for number, _ in rows]
        segment.lowest = min(segment.lowest or numbers[0], *numbers)
        segment.highest = max(segment.highest, *numbers)
        while left:
            written = os.write(self._fd, left)
            segment.size += written
            left = left[written:]
        self._torn = False

    def _writable(self) -> Segment:
        last = self._segments[-1] if self._segments else None
        if self._fd >= 0 and last is not None and not self._is_full(last):
            return last
        self.seal()
        place = last.place + 1 if last is not None else 1
        path = self._directory / f"records-{place:06d}.ndjson"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        segment = Segment(path, place, 0, 0)
        with self._lock:
            self._segments.append(segment)
        return segment

    def _is_full(self, segment: Segment) -> bool:
        """What is in one segment goes at once: so not too much, and not what is much older than the rest."""
        return (
            segment.size >= self._segment_bytes
            or segment.load >= self._segment_load
            or time.monotonic() - segment.begun >= self._segment_seconds
        )

    def seal(self) -> None:
        """The segment that is being written to is full."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._seal(self._segments[-1])

    def _seal(self, segment: Segment) -> None:
        """From now on its name says what is in it."""
        name = f"records-{segment.place:06d}-{segment.lowest}-{segment.highest}.ndjson"
        if segment.path.name != name:
            with self._lock:
                segment.path = segment.path.rename(self._directory / name)

    def find(self, number: int) -> bytes | None:
        """The newest record of this number."""
        with self._lock:
            candidates = [segment.path for segment in reversed(self._segments) if segment.has(number)]
        for path in candidates:
            with contextlib.suppress(OSError, ValueError):  # it is gone, or empty
                if row := _newest(path, b"[%d," % number):
                    return row
        return None

    def expired(self, before: float) -> bool:
        """The oldest segment was last written to before that."""
        try:
            return bool(self._segments) and self._segments[0].path.stat().st_mtime < before
        except OSError:
            return True

    def drop_oldest(self) -> set[int]:
        """The numbers that are gone with it. The segment that is being written to stays, until it is full."""
        if len(self._segments) == 1 and self._is_full(self._segments[0]):
            self.seal()
        if not self._segments or (len(self._segments) == 1 and self._fd >= 0):
            return set()
        with self._lock:
            oldest = self._segments.pop(0)
        try:
            numbers = {int(number) for number in NUMBERS.findall(oldest.path.read_bytes())}
            oldest.path.unlink()
        except OSError:
            return set()
        return {number for number in numbers if not any(segment.has(number) for segment in self._segments[:1])}

    def close(self) -> None:
        self.seal()
