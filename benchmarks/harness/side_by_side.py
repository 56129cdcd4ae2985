"""Peers side by side: each in a process of its own, all measured in turn; one that fails leaves the others alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.harness.bench import Bench
from benchmarks.harness.called import Called
from benchmarks.harness.results import Peer
from benchmarks.peers.peer import find

IN_FLIGHT = 64
INSTALL = "make bench-peers"


def side_by_side(bench: Bench, modules: Sequence[str]) -> None:
    """Adds to the results as it goes, so that what there is survives whatever ends it."""
    with bench.crew() as crew:
        called: list[tuple[Peer, Called]] = []
        for module in modules:
            peer = find(module)
            result = Peer(name=peer.name, how=peer.how, ours=peer.ours, versions=peer.versions())
            bench.results.peers.append(result)
            if missing := peer.missing():
                result.problem = f"not measured: {', '.join(missing)} is not installed (`{INSTALL}`)"
                bench.tell(f"{peer.name}: {result.problem}")
                continue
            bench.tell(f"{peer.name} starts")
            worker = bench.attempt(peer.name, partial(Called, crew, module))
            if isinstance(worker, str):
                result.problem = worker
            else:
                called.append((result, worker))
        for number in range(-1, bench.pace.peer_rounds):
            bench.tell(f"peers, round {number + 1} of {bench.pace.peer_rounds}")
            for result, worker in called:
                if not result.problem:
                    _round(bench, result, worker, keep=number >= 0)
            bench.keep()


def _round(bench: Bench, result: Peer, worker: Called, *, keep: bool) -> None:
    seconds = bench.pace.peer_seconds
    figures = bench.attempt(result.name, lambda: (worker.p50(seconds), worker.rate(IN_FLIGHT, seconds)))
    if isinstance(figures, str):
        result.problem = figures
    elif keep:
        result.p50.append(figures[0])
        result.rate.append(figures[1])
