"""Ours, in the caller's own process: the drop-in for machina_dispatch, all policy on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness.controls import ECHO
from benchmarks.peers.peer import Call, Peer
from broker.machina_dispatch import run_machina_toolhost


@contextmanager
def opened() -> Iterator[Call]:
    def call(inputs: dict[str, Any]) -> Any:
        return run_machina_toolhost(ECHO, inputs)

    yield call


PEER = Peer(
    name="broker, embedded",
    how="`run_machina_toolhost` (an `Embedded` in this process), all policy on; a thread for each call under way",
    ours=True,
    threads=opened,
)
