"""The report: docs/benchmarks.md and its plots, made of a run's stored results.

python -m benchmarks.report [RESULTS]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import figure
from benchmarks.harness.results import Growth, Peer, Results, Row, Unit, load
from benchmarks.harness.rounds import Spread
from broker.bench.text import duration, number

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = Path("build/benchmarks.json")

INTRO = """\
Machines are noisy, so what counts here are ratios: both sides are measured in one run, in turn (A B A B …), and the
ratio is that of each round; shown are the median and the range of all rounds. Nothing is pinned to a processor unless a
line says so. Every reply is checked, of the controls, too. The broker has all policy on: leases enforced, rights
narrowed, breakers counting, byte caps, fences between callers."""
READING = """\
The controls are C programs in [benchmarks/controls/](../benchmarks/controls/): `roundtrip.c` (a line into a toolhost's
pipe, a line back), `relay.c` (Unix socket → pipe → toolhost and back, bytes untouched, no policy), `fixed.c` (a
toolhost that answers without reading), `lines.c` (a line server with yyjson and nothing else), `pipeline.c` and
`http.c` (the load); and, in Python, `echo.py` (an ASGI app that answers with what it is sent)."""
VERDICTS = """\
*Within noise*: rounds of this run lie on both sides of the goal, so another run may say otherwise; a row without that
remark may still be luck if its distance from the goal is less than what two brokers alike differ by. *Control
disturbed*: the control was slower than what contains it (the scheduler had spread it over two processors, say), so the
ratio flatters us, and counts for nothing."""
TASK = """\
The same task for all: echo `{"n": …, "text": "hello"}`. One caller, a Python program as that peer's users write it;
each peer is in the best configuration that we know and that a user would choose. Raw figures, so compare within the
table only."""
NOISY = """\
> **Quick and noisy:** made with `--quick`, a few short rounds each. The form is right, the figures are hints.
"""


def write(results: Results, docs: Path) -> None:
    plots = docs / "benchmarks"
    plots.mkdir(parents=True, exist_ok=True)
    for growth in results.growth:
        if growth.curves:
            (plots / f"{growth.name}.svg").write_text(figure.draw(growth), encoding="utf-8")
    (docs / "benchmarks.md").write_text(markdown(results), encoding="utf-8")


# --- for docs/ --------------------------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    return "\n".join([*_top(results), *_ratios(results.rows), *_peers(results.peers), *_growth(results.growth)])


def _top(results: Results) -> Iterator[str]:
    yield "# Benchmarks\n"
    yield f"{INTRO}\n"
    if results.quick:
        yield NOISY
    if results.partial:
        yield f"> **Partial:** {results.partial}; what was measured before that is here.\n"
    machine = results.machine
    versions = dict(machine.versions)
    for peer in results.peers:
        versions |= {name: version for name, version in peer.versions.items() if version}
    yield from _table(
        ("", ""),
        [
            ("made", f"{results.made}, in {results.seconds:.0f} s"),
            ("machine", machine.words()),
            ("load before", f"{machine.load:g}"),
            ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
            ("command", f"`{results.command}`"),
            ("the whole again", "`make bench-peers && make bench BENCH_FLAGS=--write`"),
        ],
    )


def _ratios(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield "## Beside what the machine can do\n"
    judged = [row for row in rows if row.goal is not None]
    unmet = [row.name for row in judged if row.met() is False]
    yield f"{READING}\n"
    counts = f"Of {len(judged)} goals, {sum(row.met() is True for row in judged)} are met by the median"
    noisy = sum(row.met() is True and not row.settled() for row in judged)
    yield counts + (f", {noisy} of these within noise." if noisy else ".") + "\n"
    if unmet:
        yield f"**Not met:** {'; '.join(unmet)}.\n"
    if unknown := [row.name for row in judged if row.met() is None]:
        yield f"**Not judged or not measured:** {'; '.join(unknown)}.\n"
    yield f"{VERDICTS}\n"
    yield from _table(("ratio", "median", "range", "goal", "", "raw figures"), [_ratio(row) for row in rows])
    notes = [
        f"- {row.name}: {row.problem or row.fault or row.note}" for row in rows if row.problem or row.fault or row.note
    ]
    if notes:
        yield "\n".join(notes) + "\n"


def _ratio(row: Row) -> tuple[str, ...]:
    goal = f"{row.goal.sign} {row.goal.value:g}" if row.goal else "-"
    figures = row.figures()
    if row.over is None or not figures:
        return row.name, "-", "-", goal, "not measured", "-"
    spread = Spread(figures)
    unit = f" {row.over.unit}" if row.under is None else ""
    raw = " ÷ ".join(f"{side.name} {spoken(side.figures, side.unit)}" for side in (row.over, row.under) if side)
    return row.name, _short(spread.median) + unit, _range(spread), goal, verdict(row), raw


def verdict(row: Row) -> str:
    if row.disturbed():
        return "**not judged**: control disturbed"
    met = row.met()
    if met is None:
        return "no goal"
    return ("met" if met else "**not met**") + ("" if row.settled() else ", within noise")


def _peers(peers: Sequence[Peer]) -> Iterator[str]:
    if not peers:
        return
    yield "## Beside others\n"
    yield f"{TASK}\n"
    head = ("", "p50, one at a time", "range", "calls/s, 64 under way", "range")
    yield from _table(head, [_peer(peer) for peer in peers])
    yield (
        "\n".join(f"- **{peer.name}**: {peer.how}." + (f" *{peer.problem}.*" if peer.problem else "") for peer in peers)
        + "\n"
    )


def _peer(peer: Peer) -> tuple[str, ...]:
    name = f"**{peer.name}**" if peer.ours else peer.name
    if not peer.p50:
        return name, "not measured", "-", "not measured", "-"
    p50, rate = Spread(peer.p50), Spread(peer.rate)
    return (
        name,
        _unit(p50.median, "µs"),
        f"{_unit(p50.low, 'µs')} to {_unit(p50.high, 'µs')}",
        number(rate.median),
        f"{number(rate.low)} to {number(rate.high)}",
    )


def _growth(sweeps: Sequence[Growth]) -> Iterator[str]:
    if not sweeps:
        return
    yield "## How cost grows\n"
    for growth in sweeps:
        yield f"### {growth.title}\n"
        if growth.problem:
            yield f"Not measured: {growth.problem}.\n"
            continue
        yield f"{growth.note}\n"
        head = (growth.axis, *(f"{curve.name}, {growth.unit}" for curve in growth.curves))
        yield from _table(
            head,
            [
                (point, *(spoken(curve.figures[place], growth.unit) for curve in growth.curves))
                for place, point in enumerate(growth.points)
            ],
        )
        yield f"![{growth.title}](benchmarks/{growth.name}.svg)\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    lines = [head, ["---"] * len(head), *rows]
    yield "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


# --- for a terminal ---------------------------------------------------------------------------------------------------


def text(results: Results) -> str:
    lines = [results.machine.words()]
    for row in results.rows:
        name, median, spread, goal, judged, raw = _ratio(row)
        lines.append(
            f"{name}: {median} ({spread}), goal {goal}: {judged.replace('*', '')}; {row.problem or row.fault or raw}"
        )
    for peer in results.peers:
        name, p50, _, rate, _ = _peer(peer)
        lines.append(f"{name.strip('*')}: p50 {p50}, {rate} calls/s" if peer.p50 else f"{peer.name}: {peer.problem}")
    for growth in results.growth:
        lines.append(f"{growth.title}{f': {growth.problem}' if growth.problem else ''}")
        for place, point in enumerate(growth.points):
            figures = ", ".join(f"{one.name} {spoken(one.figures[place], growth.unit)}" for one in growth.curves)
            lines.append(f"  {point}: {figures}")
    if results.partial:
        lines.append(f"partial: {results.partial}")
    return "\n".join(lines)


def spoken(figures: Sequence[float], unit: Unit) -> str:
    """Median and range."""
    spread = Spread(figures)
    if len(figures) == 1:
        return _unit(spread.median, unit)
    return f"{_unit(spread.median, unit)} ({_unit(spread.low, unit)} to {_unit(spread.high, unit)})"


def _unit(value: float, unit: Unit) -> str:
    if unit in ("calls/s", "lines/s"):
        return number(value) + "/s"
    return f"{value:.1f} MB" if unit == "MB" else duration(value * (1e3 if unit == "µs" else 1e6))


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _range(spread: Spread) -> str:
    return f"{_short(spread.low)} to {_short(spread.high)}"


if __name__ == "__main__":
    write(load(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS), DOCS)
