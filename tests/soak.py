"""`make soak`: mixed load with random faults for a while, then keyed calls through three brokers on one NATS server,
all of which die and come back; a verdict with figures.

python -m tests.soak [--seconds 600] [--callers 12] [--keys 10000] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker import where
from tests.support.cluster import Crowd, Trial, go_through
from tests.support.load import Load
from tests.support.nats import NatsServer

MOST_TOLD = 50


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--callers", type=int, default=12)
    parser.add_argument("--keys", type=int, default=10_000, help="of the cluster; 0: no cluster")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="to repeat a run")
    arguments = parser.parse_args()
    print(f"soak: {arguments.seconds:g} s, {arguments.callers} callers, seed {arguments.seed}", flush=True)
    wrong = _mixed_load(arguments) if arguments.seconds else []
    wrong += _cluster(arguments) if arguments.keys else []
    for complaint in wrong[:MOST_TOLD]:
        print("WRONG:", complaint)
    print("verdict:", f"{len(wrong)} broken promises, see above" if wrong else "every promise held")
    return bool(wrong)


def _mixed_load(arguments: argparse.Namespace) -> list[str]:
    places = {
        "include": where.include(),
        "demo_plugin": where.demo_plugin(),
        "fault_plugin": where.fault_plugin(),
        "fault_toolhost": where.fault_toolhost(),
    }
    with tempfile.TemporaryDirectory(prefix="broker-soak-") as folder:
        load = Load(Path(folder), places, arguments.seed)
        _figures(load.run(arguments.seconds, arguments.callers, _teller()))
    return load.auditor.complaints


def _cluster(arguments: argparse.Namespace) -> list[str]:
    print(f"three brokers, one NATS server, {arguments.keys} keys", flush=True)
    with tempfile.TemporaryDirectory(prefix="broker-soak-") as name:
        folder = Path(name)
        with NatsServer(folder / "nats") as nats:
            crowd = Crowd(folder / "brokers", where.include(), nats)
            try:
                trial = Trial(crowd, nats, arguments.seed)
                go_through(trial, arguments.keys, 1.0, _teller())
                _figures(trial.figures())
                return trial.complaints()
            finally:
                crowd.end()


def _teller() -> Callable[[str], None]:
    last = 0.0

    def tell(text: str) -> None:
        nonlocal last
        if sys.stdout.isatty():
            print(f"\r\033[K{text}", end="", flush=True)
        elif time.monotonic() - last > 10:
            last = time.monotonic()
            print(text, flush=True)

    return tell


def _figures(figures: dict[str, Any]) -> None:
    print(("\n" if sys.stdout.isatty() else "") + json.dumps(figures, indent=2), flush=True)


if __name__ == "__main__":
    sys.exit(main())
