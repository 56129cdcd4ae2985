"""`make fuzz`: libFuzzer on the broker's readers in C, then broker, twin and msgspec on what it found; and a verdict.

python -m tests.fuzz [--seconds 120] [--seed N]
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import differential

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "fuzz"
SEEDS = differential.HERE / "corpus"
FOUND = BUILD / "found"
TARGETS = ("requests", "replies", "json", "framer")
PULSE = re.compile(r"#(\d+)\s.*cov: (\d+) .*corp: (\d+)")
SAVED = re.compile(r"Test unit written to (\S+)")
WRONG = re.compile(r"not so: |runtime error: |ERROR: ")


def has_fuzzer() -> bool:
    """A clang that links libFuzzer and the sanitizers."""
    if not shutil.which("clang"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return !d && n; }\n")
        command = ["clang", "-fsanitize=fuzzer,address,undefined", str(source), "-o", str(Path(folder, "probe"))]
        return subprocess.run(command, capture_output=True).returncode == 0


def build() -> None:
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or "cmake"
    configure = [cmake, "-S", str(ROOT), "-B", str(BUILD), "-DBROKER_FUZZ=ON", "-DBUILD_TESTING=OFF"]
    configure += ["-DCMAKE_C_COMPILER=clang", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (configure, [cmake, "--build", str(BUILD), "--target", "fuzz"]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(done.stdout)


def fuzz(target: str, seconds: float, seed: int, tell: Callable[[str], None]) -> str | None:
    """Runs one target for so long. What it complains of."""
    binary, corpus = BUILD / "native" / "fuzz" / f"{target}_fuzz", BUILD / "corpus" / target
    corpus.mkdir(parents=True, exist_ok=True)
    command = [str(binary), f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", "-timeout=10"]
    command += [
        f"-max_len={differential.LONGEST}",
        f"-dict={differential.DICTIONARY}",
        f"-artifact_prefix={FOUND}/{target}-",
    ]
    log: list[str] = []
    tell(f"{target}: its corpus first")
    with subprocess.Popen(
        [*command, str(corpus), str(SEEDS / target)], stderr=subprocess.PIPE, text=True, errors="replace"
    ) as child:
        assert child.stderr is not None
        try:
            for line in child.stderr:
                log.append(line)
                if pulse := PULSE.match(line):
                    runs, edges, texts = map(int, pulse.groups())
                    tell(f"{target}: {runs:,} runs, {edges} edges, {texts} texts")
        finally:
            child.kill()
    (BUILD / f"{target}.log").write_text("".join(log))
    if child.returncode == 0:
        return None
    saved = SAVED.search("".join(log))
    wrong = next((line.strip() for line in log if WRONG.search(line)), "")
    again = f"{binary} {saved[1]}" if saved else f"see {BUILD / target}.log"
    return f"{target}: {wrong or f'exit code {child.returncode}'}\n  again: {again}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="over all targets")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1, 10**6), help="to repeat a run on the same corpus"
    )
    arguments = parser.parse_args()
    if not has_fuzzer():
        sys.exit("make fuzz needs clang with libFuzzer (Debian: apt install clang libclang-rt-dev)")
    print(f"fuzz: {arguments.seconds:g} s, seed {arguments.seed}; building", flush=True)
    build()
    FOUND.mkdir(exist_ok=True)
    last, shown = 0.0, ""

    def tell(text: str) -> None:
        nonlocal last, shown
        shown = text
        if sys.stdout.isatty():
            print(f"\r\033[K{text}", end="", flush=True)
        elif time.monotonic() - last > 10:
            last = time.monotonic()
            print(text, flush=True)

    def finish(well: bool) -> None:
        print(("\r\033[K" if sys.stdout.isatty() else "") + f"{shown}, {'done' if well else 'WRONG'}", flush=True)

    each = arguments.seconds / (len(TARGETS) + 1)
    complaints: list[str] = []
    for target in TARGETS:
        complaint = fuzz(target, each, arguments.seed, tell)
        finish(complaint is None)
        complaints += [complaint] if complaint else []
    folders = {target: [SEEDS / target, BUILD / "corpus" / target] for target in differential.CHECKS}
    disagreements = differential.run(each, arguments.seed, folders, FOUND, tell)
    finish(not disagreements)
    complaints += disagreements
    for complaint in complaints:
        print("WRONG:", complaint)
    print("verdict:", "no reader disagrees with another" if not complaints else f"{len(complaints)} found, see above")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
