"""What a call costs in the caller's own process, beside the raw round trip and a process for each call.

    python -m benchmarks.embedded [ROUNDS] [CALLS]

Rounds are interleaved; each row is the median of the rounds' medians, with their range. The raw control is a C program
that writes a line into the same toolhost's pipe and reads one back (benchmarks/controls/roundtrip.c).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.harness.controls import ECHO, Controls
from broker import where
from broker.machina_dispatch import run_machina_toolhost

INPUTS = {"text": "hello"}
LINE = json.dumps({"aid": ECHO, "input_json": json.dumps(INPUTS), "ds_state": {"slots": {}}})


def main(rounds: int, calls: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        controls = Controls(Path(folder))
        rows: dict[str, list[float]] = {"raw": [], "embedded": [], "process": []}
        for _ in range(rounds):
            rows["raw"].append(raw(controls, calls))
            rows["embedded"].append(embedded(calls))
            rows["process"].append(process(max(20, calls // 500)))
        many = {threads: statistics.median(throughput(threads, calls) for _ in range(3)) for threads in (1, 2, 4, 8)}
    for name, figures in rows.items():
        print(f"{name:10} p50 {statistics.median(figures):9.2f} µs   ({min(figures):.2f} to {max(figures):.2f})")
    ratios = [mine / control for mine, control in zip(rows["embedded"], rows["raw"], strict=True)]
    faster = [slow / mine for slow, mine in zip(rows["process"], rows["embedded"], strict=True)]
    tell("embedded ÷ raw", ratios, "goal ≤ 2.0")
    tell("process ÷ embedded", faster, "goal ≥ 300")
    print("calls/s by threads  " + "   ".join(f"{threads}: {rate:,.0f}" for threads, rate in many.items()))


def tell(what: str, ratios: list[float], goal: str) -> None:
    print(f"{what:19} {statistics.median(ratios):8.2f}   ({min(ratios):.2f} to {max(ratios):.2f})   {goal}")


def raw(controls: Controls, calls: int) -> float:
    return controls.roundtrip(calls, LINE, where.toolhost(), "--serve", where.demo_plugin())


def embedded(calls: int) -> float:
    took = []
    clock = time.perf_counter_ns
    for n in range(-calls // 10, calls):
        begin = clock()
        run_machina_toolhost(ECHO, INPUTS)
        if n >= 0:
            took.append(clock() - begin)
    return statistics.median(took) / 1000


def process(calls: int) -> float:
    """As a dispatcher does that starts a process for every call."""
    took = []
    command = [where.toolhost(), "--run", where.demo_plugin(), ECHO]
    line = json.dumps({"input_json": json.dumps(INPUTS), "ds_state": {"slots": {}}}) + "\n"
    for _ in range(calls):
        begin = time.perf_counter_ns()
        done = subprocess.run(command, input=line, capture_output=True, text=True, timeout=30, check=True)
        json.loads(done.stdout)
        took.append(time.perf_counter_ns() - begin)
    return statistics.median(took) / 1000


def throughput(threads: int, calls: int) -> float:
    each = calls // threads

    def run() -> None:
        for _ in range(each):
            run_machina_toolhost(ECHO, INPUTS)

    crew = [threading.Thread(target=run) for _ in range(threads)]
    begin = time.perf_counter()
    for one in crew:
        one.start()
    for one in crew:
        one.join()
    return threads * each / (time.perf_counter() - begin)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, int(sys.argv[2]) if len(sys.argv) > 2 else 20000)
