"""concurrent.futures.ProcessPoolExecutor: the tool is a Python function, arguments and results are pickled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.peer import Call, Many, Peer, in_order, inputs


def echo(asked: dict[str, Any]) -> dict[str, Any]:
    return asked


@contextmanager
def opened() -> Iterator[Call]:
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for warm in [pool.submit(echo, {}) for _ in range(64)]:
            warm.result()

        def call(asked: dict[str, Any]) -> dict[str, Any]:
            return pool.submit(echo, asked).result()

        call.submit = pool.submit  # type: ignore[attr-defined]
        yield call


def many(call: Call) -> Many:
    submit = call.submit  # type: ignore[attr-defined]
    return in_order(lambda number: submit(echo, inputs(number)))


PEER = Peer(
    name="ProcessPoolExecutor",
    how="a worker for each core, forked and warm; the tool is a Python function that returns its argument; one thread "
    "submits and waits",
    threads=opened,
    many=many,
)
