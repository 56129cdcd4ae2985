"""How cost grows: one thing is changed at a time, from least to most, and everything else stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.harness.bench import Bench
from benchmarks.harness.ratios import fixed, toolhost
from benchmarks.harness.results import Curve, Growth, Unit
from benchmarks.harness.rounds import interleaved
from benchmarks.policy import LEASES, OFF, ON, RIGHTS, TOOLS
from broker.bench.load import Unix
from broker.bench.model import Plan, Tally

PAYLOADS = {
    "64 B": 64,
    "256 B": 256,
    "1 KB": 1000,
    "4 KB": 4000,
    "16 KB": 16_000,
    "64 KB": 64_000,
    "256 KB": 256_000,
    "1 MB": 1_000_000,
}
CONNECTIONS = (1, 2, 4, 8, 16, 64, 256, 1000)
POOLS = (1, 2, 4, 8)
TOOL_COUNTS = (1, 10, 100, 1000)
HOT_KEYS = (0, 1, 16, 64, 256, 1024)
UNDER_WAY = 64

Measure = Callable[[int], float]  # of the point with this number


class Sweep(NamedTuple):
    name: str
    title: str
    axis: str
    points: Sequence[str]
    unit: Unit
    measure: Callable[[Bench], dict[str, list[list[float]]]]  # of each curve, of each point, a figure a round
    note: str

    def run(self, bench: Bench) -> Growth:
        found = bench.attempt(self.name, lambda: self.measure(bench))
        if isinstance(found, str):
            return Growth(name=self.name, title=self.title, problem=found)
        return Growth(
            name=self.name,
            title=self.title,
            points=list(self.points),
            axis=self.axis,
            unit=self.unit,
            curves=[Curve(name=name, figures=figures) for name, figures in found.items()],
            note=self.note,
        )


def _measured(bench: Bench, points: int, **curves: Measure) -> dict[str, list[list[float]]]:
    """Each round goes through all points of all curves, so that a bad moment meets them all."""
    sides = [(curve, point) for point in range(points) for curve in curves]
    figures = interleaved(
        bench.pace.growth_rounds, *(lambda curve=curve, point=point: curves[curve](point) for curve, point in sides)
    )
    found: dict[str, list[list[float]]] = {curve: [] for curve in curves}
    for (curve, _), of_point in zip(sides, figures, strict=True):
        found[curve].append(of_point)
    return found


def _timed(bench: Bench) -> str:
    return f"{bench.pace.growth_seconds}s"


def payload(bench: Bench) -> dict[str, list[list[float]]]:
    sizes = list(PAYLOADS.values())
    with bench.crew() as crew:
        paths = {"broker": crew.broker(ON)[0], "C relay": crew.relay(*toolhost())}

        def p50(who: str) -> Measure:
            return lambda point: bench.controls.load(paths[who], _timed(bench), 1, payload=sizes[point]).p50_us

        return _measured(bench, len(sizes), **{who: p50(who) for who in paths})


def connections(bench: Bench) -> dict[str, list[list[float]]]:
    with bench.crew() as crew:
        paths = {"broker": crew.broker(ON)[0], "C relay": crew.relay(*toolhost())}

        def rate(who: str) -> Measure:
            def measure(point: int) -> float:
                many = CONNECTIONS[point]
                return bench.controls.load(paths[who], _timed(bench), max(1, UNDER_WAY // many), many).per_second

            return measure

        return _measured(bench, len(CONNECTIONS), **{who: rate(who) for who in paths})


def pool(bench: Bench) -> dict[str, list[list[float]]]:
    with bench.crew() as crew:
        paths = [crew.broker(f"{ON}min = {size}\nmax = {size}\n", f"pool{size}")[0] for size in POOLS]

        def echo(point: int) -> float:
            return bench.controls.load(paths[point], _timed(bench), UNDER_WAY // 8, 8).per_second

        def sleep(point: int) -> float:
            plan = Plan(
                face="socket",
                tool="AID.DEMO.SLEEP.v1",
                input='{"ms":1}',
                depth=UNDER_WAY // 8,
                connections=8,
                warmup=0.02,
                seconds=bench.pace.growth_seconds,
            )
            tally = Tally()
            Unix(paths[point]).measure(plan, tally, lambda _: None)
            if tally.failed:
                raise RuntimeError(f"calls failed: {next(iter(tally.failed.values())).example}")
            return sum(one.answered for one in tally.rounds) / sum(one.seconds for one in tally.rounds)

        return _measured(bench, len(POOLS), **{"echo": echo, "a tool that sleeps 1 ms": sleep})


def tools(bench: Bench) -> dict[str, list[list[float]]]:
    with bench.crew() as crew:
        paths = [crew.broker(fixed(bench, count), f"tools{count}")[0] for count in TOOL_COUNTS]
        for path, count in zip(paths, TOOL_COUNTS, strict=True):  # newcomers run alone: until all are known
            bench.controls.load(path, 5 * count, 8, how=f"same,tools={count}", aid="AID.FIXED.T#.v1")

        def one(point: int) -> float:
            return bench.controls.load(
                paths[point], _timed(bench), UNDER_WAY, how="same", aid="AID.FIXED.T0.v1"
            ).per_second

        def each(point: int) -> float:
            how = f"same,tools={TOOL_COUNTS[point]}"
            return bench.controls.load(
                paths[point], _timed(bench), UNDER_WAY, how=how, aid="AID.FIXED.T#.v1"
            ).per_second

        return _measured(bench, len(TOOL_COUNTS), **{"one of them": one, "all in turn": each})


def keys(bench: Bench) -> dict[str, list[list[float]]]:
    with bench.crew() as crew:
        path, _ = crew.broker(ON)

        def rate(point: int) -> float:
            how = f"hot={HOT_KEYS[point]}" if HOT_KEYS[point] else "plain"
            return bench.controls.load(path, _timed(bench), UNDER_WAY, how=how).per_second

        return _measured(bench, len(HOT_KEYS), broker=rate)


COUNTED = '[breaker]\ncount_tool_errors = ["AID.*"]\n'
BARE = OFF.removesuffix(TOOLS)
# What is on: the broker's configuration, and what every call carries.
FEATURES: dict[str, tuple[str, str]] = {
    "none": (OFF, "plain"),
    "rights": (BARE + RIGHTS + TOOLS, "plain"),
    "leases": (OFF.replace("[lease]\nenforce = false\n", LEASES), "plain"),
    "breaker": ("[lease]\nenforce = false\n" + COUNTED + TOOLS, "plain"),
    "ids": (OFF, "ids"),
    "keys": (OFF, "keys"),
    "sessions": (OFF, "session"),
    "all": (LEASES + COUNTED + RIGHTS + TOOLS, "keys,session"),
}


def features(bench: Bench) -> dict[str, list[list[float]]]:
    with bench.crew() as crew:
        configs = dict.fromkeys(config for config, _ in FEATURES.values())
        brokers = {config: crew.broker(config, f"policy{n}")[0] for n, config in enumerate(configs)}
        points = [(brokers[config], how) for config, how in FEATURES.values()]

        def rate(many: int) -> Measure:
            def measure(point: int) -> float:
                path, how = points[point]
                return bench.controls.load(path, _timed(bench), UNDER_WAY, many, how).per_second

            return measure

        return _measured(bench, len(points), **{"1 connection": rate(1), "8 connections": rate(8)})


SWEEPS: Sequence[Sweep] = (
    Sweep(
        "payload",
        "The size of the input",
        "bytes of input, echoed",
        list(PAYLOADS),
        "µs",
        payload,
        "p50 of one call at a time. Both sides have the same toolhost behind them.",
    ),
    Sweep(
        "connections",
        "Connections",
        "connections",
        [f"{many:,}" for many in CONNECTIONS],
        "calls/s",
        connections,
        f"{UNDER_WAY} calls under way in all, or one on each connection.",
    ),
    Sweep(
        "pool",
        "Toolhosts in the pool",
        "toolhosts (min = max)",
        [str(size) for size in POOLS],
        "calls/s",
        pool,
        f"{UNDER_WAY} calls under way on 8 connections. Echo costs a toolhost less than a microsecond, so more of them "
        "only help a tool that waits.",
    ),
    Sweep(
        "tools",
        "Tools",
        "tools",
        [f"{count:,}" for count in TOOL_COUNTS],
        "calls/s",
        tools,
        f"The fixed-answer child, {UNDER_WAY} calls under way: all of one tool, or each of the next one. Calls of one "
        "tool that come together move together, which calls in turn do not.",
    ),
    Sweep(
        "keys",
        "Hot idempotency keys",
        "keys in use (0: calls without keys)",
        [f"{count:,}" for count in HOT_KEYS],
        "calls/s",
        keys,
        f"{UNDER_WAY} calls under way; nearly all of those with keys are hits.",
    ),
    Sweep(
        "policy",
        "What each part of the policy costs",
        "what is on",
        list(FEATURES),
        "calls/s",
        features,
        f"{UNDER_WAY} calls under way on each connection. Rights, leases and the breaker's counting (of a tool's own "
        "errors, too) are the broker's settings; ids, keys (each of them new, with an id) and sessions come with every "
        "call. A session's calls run one after the other, whatever is under way.",
    ),
)
