"""One auditor for every load: each call resolved once, to its own caller; runs counted; nothing leaks or stays."""

from __future__ import annotations

import collections
import json
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import psutil

# A refusal of these types says that the call has not run.
NOT_RUN = {"bad_request", "not_found", "too_large", "forbidden", "lease_required", "lease_rejected", "overloaded"}
NOT_RUN |= {"breaker_open", "draining", "unavailable"}
MAY_HAVE_RUN = {"timeout", "crash", "bad_reply", "reply_too_large"}


class Promise(NamedTuple):
    """What one call may be answered with."""

    output: str | None = None  # its own, if it succeeds
    effect: str = ""  # what the ledger shows if it ran; calls with one effect have one key
    types: frozenset[str] = frozenset()  # refusals that it asks for; those of a bad day are always allowed


BAD_DAY = frozenset({"crash", "overloaded", "unavailable", "breaker_open", "draining"})


class Auditor:
    """Callers tell it what they send and what they get. It keeps the first complaints, in words."""

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger
        self.complaints: list[str] = []
        self.answers: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._open: dict[tuple[str, Any], Promise] = {}
        self._ran: set[str] = set()  # effects of calls that succeeded
        self._not_run: set[str] = set()  # of calls that were refused without having run, and had no key
        self._gone = 0

    def complain(self, text: str) -> None:
        with self._lock:
            if len(self.complaints) < 20:
                self.complaints.append(text[:600])

    def sent(self, caller: str, number: Any, promise: Promise) -> None:
        with self._lock:
            self._open[caller, number] = promise

    def got(self, caller: str, number: Any, reply: dict[str, Any], *, keyed: bool = False) -> None:
        with self._lock:
            promise = self._open.pop((caller, number), None)
        kind = "ok" if reply.get("status") == "OK" else reply.get("type") or reply.get("status", "?")
        with self._lock:
            self.answers[kind] += 1
            if reply.get("idempotent_hit"):
                self.answers["hits"] += 1
        if promise is None:
            self.complain(f"{caller}: a reply to nothing that it asked, or a second one: {reply}")
        elif kind == "ok":
            if promise.output is not None and reply["output_json"] != promise.output:
                self.complain(f"{caller}: expected {promise.output!r}, got {reply['output_json']!r}")
            self._ran.add(promise.effect)
        elif kind not in promise.types | BAD_DAY:
            self.complain(f"{caller}: not an answer to this: {reply}")
        elif kind in NOT_RUN and promise.effect and not keyed:
            self._not_run.add(promise.effect)

    def lost(self, caller: str) -> None:
        """The caller's connection is gone: what it had open may have run, and nobody will be told."""
        with self._lock:
            gone = [key for key in self._open if key[0] == caller]
            for key in gone:
                del self._open[key]
            self._gone += len(gone)

    def close(self) -> dict[str, Any]:
        """When all callers are done: the books."""
        for (caller, number), _ in list(self._open.items())[:5]:
            self.complain(f"{caller}: call {number} was never answered")
        runs = collections.Counter(self.ledger.read_text().split()) if self.ledger.exists() else collections.Counter()
        for effect, count in runs.items():
            if count > 1:
                self.complain(f"{effect} ran {count} times")
            if effect in self._not_run:
                self.complain(f"{effect} ran, and its caller was told that it had not")
        for effect in self._ran - {""} - runs.keys():
            self.complain(f"{effect} was answered, and never ran")
        return {"answers": dict(self.answers), "runs": sum(runs.values()), "unanswered after a cut": self._gone}


class Footprint(NamedTuple):
    """What a process holds."""

    descriptors: int
    rss_mb: float
    children: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        process = psutil.Process(pid)
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return cls(descriptors, process.memory_info().rss / 1e6, len(process.children(recursive=True)))

    def complaints(
        self, before: Footprint, *, descriptors: int = 20, growth: float = 1.1, slack_mb: float = 15
    ) -> list[str]:
        """What has grown since, beyond what a few more pooled processes explain."""
        found = []
        if self.descriptors > before.descriptors + descriptors:
            found.append(f"descriptors grew from {before.descriptors} to {self.descriptors}")
        if self.rss_mb > before.rss_mb * growth + slack_mb:
            found.append(f"RSS grew from {before.rss_mb:.1f} to {self.rss_mb:.1f} MB")
        return found


def output(effect: str) -> str:
    """What the ledger tool answers."""
    return json.dumps(effect)
