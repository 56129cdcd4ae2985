"""The process in which one peer is called: it measures when it is told to, and says what came of it.

python -m benchmarks.peers.worker MODULE      lines {"in_flight": N, "seconds": S} in, one JSON object a line out
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
import time
from typing import Any

import msgspec
import uvloop
from msgspec import Struct

from benchmarks.peers.peer import Call, Peer, check, find, inputs
from broker.bench.histogram import Histogram
from broker.bench.timer import undisturbed

clock = time.perf_counter_ns
_numbers = itertools.count()


class Ask(Struct):
    in_flight: int
    seconds: float


class Answer(Struct):
    calls: int
    per_second: float
    p50_us: float = 0.0  # of one call at a time


def main(module: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # whom the peer has started ends, too
    peer = find(module)
    if peer.coroutines is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_coroutines(peer))
    else:
        _serve_threads(peer)


def _asks() -> Any:
    """Until our input ends. A loop that waits here has nothing else to do."""
    print("ready", flush=True)
    for line in sys.stdin:
        yield msgspec.json.decode(line, type=Ask)


def _say(answer: Answer) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


# --- calls that block -------------------------------------------------------------------------------------------------


def _serve_threads(peer: Peer) -> None:
    assert peer.threads is not None
    with peer.threads() as call:
        for ask in _asks():
            with undisturbed():
                if ask.in_flight == 1:
                    _say(_one(call, ask.seconds))
                else:
                    many = peer.many(call) if peer.many is not None else _crowd(call)
                    begin = clock()
                    calls = many(ask.in_flight, ask.seconds)
                    _say(Answer(calls, calls * 1e9 / (clock() - begin)))


def _one(call: Call, seconds: float) -> Answer:
    latency = Histogram()
    begin = clock()
    until = begin + int(seconds * 1e9)
    while (since := clock()) < until or not latency.count:
        number = next(_numbers)
        asked = inputs(number)
        since = clock()
        answer = call(asked)
        latency.record(clock() - since)
        check(number, answer)
    return _of(latency, begin)


def _of(latency: Histogram, begin: int) -> Answer:
    return Answer(latency.count, latency.count * 1e9 / (clock() - begin), latency.percentile(50) / 1000)


def _crowd(call: Call) -> Any:
    """A thread for each call under way."""

    def many(in_flight: int, seconds: float) -> int:
        counts = [0] * in_flight
        problems: list[BaseException] = []
        until = clock() + int(seconds * 1e9)

        def work(place: int) -> None:
            try:
                while clock() < until and not problems:
                    number = next(_numbers)
                    check(number, call(inputs(number)))
                    counts[place] += 1
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(place,)) for place in range(in_flight)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        return sum(counts)

    return many


# --- calls that are awaited -------------------------------------------------------------------------------------------


async def _serve_coroutines(peer: Peer) -> None:
    assert peer.coroutines is not None
    async with peer.coroutines() as call:
        for ask in _asks():
            with undisturbed():
                _say(await (_awaited if ask.in_flight == 1 else _together)(call, ask))


async def _awaited(call: Call, ask: Ask) -> Answer:
    latency = Histogram()
    begin = clock()
    until = begin + int(ask.seconds * 1e9)
    while clock() < until or not latency.count:
        number = next(_numbers)
        asked = inputs(number)
        since = clock()
        answer = await call(asked)
        latency.record(clock() - since)
        check(number, answer)
    return _of(latency, begin)


async def _together(call: Call, ask: Ask) -> Answer:
    begin = clock()
    until = begin + int(ask.seconds * 1e9)

    async def work() -> int:
        calls = 0
        while clock() < until:
            number = next(_numbers)
            check(number, await call(inputs(number)))
            calls += 1
        return calls

    calls = sum(await asyncio.gather(*(work() for _ in range(ask.in_flight))))
    return Answer(calls, calls * 1e9 / (clock() - begin))


if __name__ == "__main__":
    main(sys.argv[1])
