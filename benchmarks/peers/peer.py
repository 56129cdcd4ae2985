"""What a peer is: a name, a configuration in words, and a way to make one call."""

from __future__ import annotations

import importlib
import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from msgspec import Struct

Call = Callable[[dict[str, Any]], Any]  # the answer, as a dict or as JSON text
Many = Callable[[int, float], int]  # keeps so many calls under way for so many seconds; how many were answered

# In the order of the report. Ours come last.
MODULES = (
    "process_per_call",
    "asyncio_pool",
    "process_pool",
    "mcp_stdio",
    "grpc_unix",
    "nats_request",
    "broker_async",
    "broker_client",
    "broker_embedded",
)


class Peer(Struct, kw_only=True, frozen=True):
    name: str
    how: str
    needs: tuple[str, ...] = ()  # distributions beyond our own
    ours: bool = False
    threads: Callable[[], AbstractContextManager[Call]] | None = None  # a call that blocks,
    coroutines: Callable[[], AbstractAsyncContextManager[Call]] | None = None  # or one that is awaited
    many: Callable[[Call], Many] | None = None  # threads only: another way than a thread for each call under way

    def missing(self) -> list[str]:
        return [name for name in self.needs if not _version(name)]

    def versions(self) -> dict[str, str]:
        return {name: _version(name) for name in self.needs}


def find(module: str) -> Peer:
    """By the full name of its module, which imports nothing that may be missing before it is opened."""
    found: Peer = importlib.import_module(module).PEER
    return found


def inputs(number: int) -> dict[str, Any]:
    return {"n": number, "text": "hello"}


def check(number: int, answer: Any) -> None:
    """Not counted as the peer's time."""
    said = answer if isinstance(answer, dict) else json.loads(answer)
    if said != inputs(number):
        raise RuntimeError(f"call {number} was answered {str(said)[:100]!r}")


def in_order(begin: Callable[[int], Any]) -> Many:
    """Keeps futures under way, and waits for them in the order of their calls: a thread for each would only cost."""

    def many(in_flight: int, seconds: float) -> int:
        under_way: deque[tuple[int, Any]] = deque()
        number = done = 0
        until = time.perf_counter() + seconds
        while under_way or time.perf_counter() < until:
            while len(under_way) < in_flight and time.perf_counter() < until:
                under_way.append((number, begin(number)))
                number += 1
            if under_way:
                asked, future = under_way.popleft()
                check(asked, future.result())
                done += 1
        return done

    return many


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
