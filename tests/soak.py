"""`make soak`: mixed load with random faults for a while, then a verdict with figures.

python -m tests.soak [--seconds 600] [--callers 12] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from broker import where
from tests.support.load import Load


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--callers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="to repeat a run")
    arguments = parser.parse_args()
    print(f"soak: {arguments.seconds:g} s, {arguments.callers} callers, seed {arguments.seed}", flush=True)
    last = 0.0

    def tell(text: str) -> None:
        nonlocal last
        if sys.stdout.isatty():
            print(f"\r\033[K{text}", end="", flush=True)
        elif time.monotonic() - last > 10:
            last = time.monotonic()
            print(text, flush=True)

    places = {
        "include": where.include(),
        "demo_plugin": where.demo_plugin(),
        "fault_plugin": where.fault_plugin(),
        "fault_toolhost": where.fault_toolhost(),
    }
    with tempfile.TemporaryDirectory(prefix="broker-soak-") as folder:
        load = Load(Path(folder), places, arguments.seed)
        figures = load.run(arguments.seconds, arguments.callers, tell)
    print(("\n" if sys.stdout.isatty() else "") + json.dumps(figures, indent=2))
    for complaint in load.auditor.complaints:
        print("WRONG:", complaint)
    print("verdict:", "every promise held" if not load.auditor.complaints else "broken promises, see above")
    return bool(load.auditor.complaints)


if __name__ == "__main__":
    sys.exit(main())
