"""Ours, over the socket, from threads: `Client`, all policy on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness.controls import ECHO
from benchmarks.peers.peer import Call, Many, Peer, check, inputs
from benchmarks.peers.private import broker
from broker import CallFailed, Client


@contextmanager
def opened() -> Iterator[Call]:
    with broker() as path, Client(path) as client:

        def call(asked: dict[str, Any]) -> str:
            return client.call(ECHO, asked).output_json

        call.client = client  # type: ignore[attr-defined]
        yield call


def many(call: Call) -> Many:
    client: Client = call.client  # type: ignore[attr-defined]

    def run(in_flight: int, seconds: float) -> int:
        done = 0
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for number, reply in enumerate(client.call_many([(ECHO, inputs(n)) for n in range(in_flight)])):
                if isinstance(reply, CallFailed):
                    raise reply
                check(number, reply.output_json)
            done += in_flight
        return done

    return run


PEER = Peer(
    name="broker, `Client`",
    how="over the Unix socket, all policy on; many under way: `call_many` with as many calls, again and again",
    ours=True,
    threads=opened,
    many=many,
)
