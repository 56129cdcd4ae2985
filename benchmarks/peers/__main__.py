"""Peers and limits: what a call costs beside what the machine can do, beside others, and as things grow.

python -m benchmarks.peers [--quick] [--only ratios,peers,growth] [--write]
"""

from __future__ import annotations

import argparse
import datetime
import resource
import sys
import tempfile
from pathlib import Path

from benchmarks import report
from benchmarks.harness import growth, ratios, stop
from benchmarks.harness.bench import FULL, QUICK, Bench
from benchmarks.harness.controls import Controls
from benchmarks.harness.results import Results
from benchmarks.harness.rounds import Spread
from benchmarks.harness.side_by_side import side_by_side
from benchmarks.peers.peer import MODULES
from broker.bench import machine

PARTS = ("ratios", "peers", "growth")
DESCRIPTORS = 8192


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    results = Results(
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=" ".join(["python -m benchmarks.peers", *argv]),
        quick=arguments.quick,
        machine=machine.describe(),
    )
    _more_descriptors()
    stop.listen()
    code = 0
    with tempfile.TemporaryDirectory(prefix="broker-benchmarks-") as folder:
        bench = Bench(results, QUICK if arguments.quick else FULL, arguments.results, Controls(Path(folder)))
        try:
            _measure(bench, arguments.only)
        except KeyboardInterrupt:
            results.partial = "interrupted"
            code = 130
        finally:
            bench.keep()
    print(report.text(results))
    if arguments.write:
        report.write(results, report.DOCS)
    elsewhere = "" if arguments.write else "; `python -m benchmarks.report` makes docs/benchmarks.md of it"
    print(f"the figures of each round are in {arguments.results}{elsewhere}", file=sys.stderr)
    return code


def _measure(bench: Bench, parts: list[str]) -> None:
    if "ratios" in parts:
        for ratio in ratios.RATIOS:
            stop.look()
            row = ratio.run(bench)
            bench.results.rows.append(row)
            bench.keep()
            if figures := row.figures():
                bench.tell(f"{row.name}: {Spread(figures).median:.3g}, {report.verdict(row).replace('*', '')}")
    if "peers" in parts:
        side_by_side(bench, [f"benchmarks.peers.{name}" for name in MODULES])
    if "growth" in parts:
        for sweep in growth.SWEEPS:
            bench.tell(f"how cost grows: {sweep.name}")
            bench.results.growth.append(sweep.run(bench))
            bench.keep()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about a minute instead of ten, and noisier")
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PARTS", help=",".join(PARTS))
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, metavar="FILE", help=f"default: {report.RESULTS}"
    )
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md and its plots, too")
    return parser


def _parts(words: str) -> list[str]:
    chosen = words.split(",")
    for one in chosen:
        if one not in PARTS:
            raise argparse.ArgumentTypeError(f"{one!r} is none of {', '.join(PARTS)}")
    return chosen


def _more_descriptors() -> None:
    """For a thousand connections; the processes that we start inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
