"""What the policy costs plain calls: one broker with all of it on, one with as much as possible off, interleaved.

.venv/bin/python -m benchmarks.policy [ROUNDS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.controls import Controls
from broker import where

TOOLS = f'[[toolhost]]\nname = "demo"\nplugins = ["{where.demo_plugin()}"]\n'
RIGHTS = (
    f'[[principal]]\nname = "uid:{os.getuid()}"\ntools = ["AID.DEMO.*", "AID.FILE.*", "AID.FIXED.*"]\ntiers = [0, 1]\n'
)
CALLERS = '[[principal]]\nname = "http:*"\ntools = ["AID.DEMO.*", "echo_json"]\ntiers = [0, 1]\n'
LEASES = "[lease]\nenforce = true\n"
ON = LEASES + RIGHTS + TOOLS
WEB = CALLERS + ON  # for callers over HTTP, too
OFF = "[lease]\nenforce = false\n[breaker]\nin_a_row = 1000000000\nleast_calls = 1000000000\n" + TOOLS
SHAPES = {"depth 64, 1 connection": (300_000, 64, 1), "depth 64, 8 connections": (300_000, 64, 8)}


def serve(folder: Path, name: str, config: str) -> tuple[str, subprocess.Popen[bytes]]:
    file, socket = folder / f"{name}.toml", str(folder / f"{name}.sock")
    file.write_text(config)
    command = [sys.executable, "-m", "broker", "serve", "--config", str(file), "--socket", socket, "--log", "error"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "HOME": str(folder)})
    assert process.stdout is not None
    print(process.stdout.readline().decode().strip())
    return socket, process


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="broker-policy-") as name:
        folder = Path(name)
        controls = Controls(folder)
        brokers = {label: serve(folder, label, config) for label, config in (("on", ON), ("off", OFF))}
        try:
            for title, shape in SHAPES.items():
                rates: dict[str, list[float]] = {label: [] for label in brokers}
                for number in range(rounds + 1):
                    for label, (socket, _) in brokers.items():
                        done = controls.load(socket, *shape)
                        if number:  # the first round warms up
                            rates[label].append(done.per_second)
                ratios = sorted(on / off for on, off in zip(rates["on"], rates["off"], strict=True))
                median, best = statistics.median(ratios), max(rates["on"]) / max(rates["off"])
                print(
                    f"{title}: on {statistics.median(rates['on']):.0f}/s, off {statistics.median(rates['off']):.0f}/s, "
                    f"ratio median {median:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), best {best:.2f}"
                )
        finally:
            for _, process in brokers.values():
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
