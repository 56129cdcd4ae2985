"""The ratios that PERFORMANCE.md's goals are about, each with both of its sides, all policy on."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import psutil

from benchmarks.harness.bench import Bench
from benchmarks.harness.called import Called
from benchmarks.harness.controls import ECHO, Failed, Load
from benchmarks.harness.results import Goal, Row, Side, Unit
from benchmarks.harness.rounds import Measure, Spread, interleaved, ratios
from benchmarks.policy import LEASES, ON, RIGHTS, WEB
from broker import where

LINE = json.dumps({"aid": ECHO, "input_json": '{"n":1,"text":"hello"}', "ds_state": {"slots": {}}})
IDLE = 1000
SETTLE_SECONDS = 0.2
HTTP_CONNECTIONS = 32
DIRECT_DEPTH = 2048  # so many that neither side waits for the other
LONG, PARTS = 10_000_000, 10
HEAVY = ("asyncio", "uvloop", "http", "urllib.request", "ssl", "nats", "uvicorn", "starlette", "broker.server")
IMPORT = """
import sys, time
begin = time.perf_counter()
import broker
took = time.perf_counter() - begin
print(took * 1000, *(name for name in sys.argv[1:] if name in sys.modules))
"""


class Found(NamedTuple):
    over: Side
    under: Side | None = None
    note: str = ""
    fault: str = ""
    floor: bool = False


class Ratio(NamedTuple):
    name: str
    goal: Goal | None
    measure: Callable[[Bench], Found]

    def run(self, bench: Bench) -> Row:
        found = bench.attempt(self.name, lambda: self.measure(bench))
        if isinstance(found, str):
            return Row(name=self.name, goal=self.goal, problem=found)
        return Row(name=self.name, goal=self.goal, **found._asdict())


def toolhost() -> tuple[str, str, str]:
    return where.toolhost(), "--serve", where.demo_plugin()


def fixed(bench: Bench, tools: int = 1) -> str:
    """A configuration with the toolhost that does nothing, all policy on."""
    child = f'[[toolhost]]\nname = "fixed"\nbinary = "{bench.controls["fixed"]}"\nenv = {{ FIXED_TOOLS = "{tools}" }}\n'
    return LEASES + RIGHTS + child


def _pair(bench: Bench, unit: Unit, over: tuple[str, Measure], under: tuple[str, Measure], note: str = "") -> Found:
    first, second = interleaved(bench.pace.rounds, over[1], under[1])
    return Found(
        Side(name=over[0], unit=unit, figures=first), Side(name=under[0], unit=unit, figures=second), note=note
    )


# --- in the caller's process ------------------------------------------------------------------------------------------


def process_by_embedded(bench: Bench, *prefix: str) -> Found:
    seconds = bench.pace.seconds
    with bench.crew() as crew:
        slow = Called(crew, "benchmarks.peers.process_per_call", *prefix)
        fast = Called(crew, "benchmarks.peers.broker_embedded", *prefix)
        return _pair(
            bench,
            "µs",
            ("process per call", lambda: slow.p50(seconds)),
            ("embedded", lambda: fast.p50(seconds)),
            "p50; `run_machina_toolhost`, warm",
        )


def embedded_by_raw(bench: Bench, *prefix: str) -> Found:
    seconds = bench.pace.seconds
    calls = int(seconds * 20_000)
    with bench.crew() as crew:
        ours = Called(crew, "benchmarks.peers.broker_embedded", *prefix)
        return _pair(
            bench,
            "µs",
            ("embedded", lambda: ours.p50(seconds)),
            ("raw C round trip", lambda: bench.controls.roundtrip(calls, LINE, *toolhost(), prefix=prefix)),
            "p50, the same toolhost",
        )._replace(floor=True)


def on_one_processor(measure: Callable[..., Found]) -> Callable[[Bench], Found]:
    """Not how a user runs it, and so no goal: it shows what is ours without what waking a processor costs."""
    return lambda bench: measure(bench, "taskset", "-c", "0")


# --- over the socket --------------------------------------------------------------------------------------------------


def latency_by_relay(bench: Bench) -> Found:
    timed = f"{bench.pace.seconds}s"
    with bench.crew() as crew:
        broker, relay = crew.broker(ON)[0], crew.relay(*toolhost())
        load = bench.controls.load
        return _pair(
            bench,
            "µs",
            ("broker", lambda: load(broker, timed, 1).p50_us),
            ("C relay", lambda: load(relay, timed, 1).p50_us),
            "p50",
        )


def alike(bench: Bench) -> Found:
    """What noise alone does: a ratio that is 1, if one could measure it."""
    timed = f"{bench.pace.seconds}s"
    with bench.crew() as crew:
        first, second = crew.broker(ON, "first")[0], crew.broker(ON, "second")[0]
        load = bench.controls.load
        return _pair(
            bench,
            "calls/s",
            ("one broker", lambda: load(first, timed, 64).per_second),
            ("another", lambda: load(second, timed, 64).per_second),
            "depth 64, 1 connection; both are the same, so what differs from 1.00 here is noise, and no throughput "
            "ratio of this run is known better than that",
        )


def rate_by_relay(connections: int) -> Callable[[Bench], Found]:
    def measure(bench: Bench) -> Found:
        timed = f"{bench.pace.seconds}s"
        with bench.crew() as crew:
            broker, relay = crew.broker(ON)[0], crew.relay(*toolhost())
            load = bench.controls.load
            return _pair(
                bench,
                "calls/s",
                ("broker", lambda: load(broker, timed, 64, connections).per_second),
                ("C relay", lambda: load(relay, timed, 64, connections).per_second),
            )

    return measure


def fixed_by_relay(bench: Bench) -> Found:
    timed = f"{bench.pace.seconds}s"
    aid = "AID.FIXED.T0.v1"
    with bench.crew() as crew:
        broker, relay = crew.broker(fixed(bench))[0], crew.relay(bench.controls["fixed"], "--serve")
        load = bench.controls.load
        return _pair(
            bench,
            "calls/s",
            ("broker", lambda: load(broker, timed, 256, how="same", aid=aid).per_second),
            ("C relay", lambda: load(relay, timed, 256, how="same", aid=aid).per_second),
        )


def direct_by_lines(bench: Bench) -> Found:
    timed = f"{bench.pace.seconds}s"

    def lines(*command: str) -> float:
        return bench.controls.load("-", timed, DIRECT_DEPTH, how="same", command=command).per_second

    return _pair(
        bench,
        "lines/s",
        ("our toolhost", lambda: lines(*toolhost())),
        ("yyjson line server", lambda: lines(bench.controls["lines"])),
        f"no broker; depth {DIRECT_DEPTH}",
    )


def idle_by_none(bench: Bench) -> Found:
    timed = f"{bench.pace.seconds}s"
    with bench.crew() as crew:
        broker, _ = crew.broker(ON)

        def rate(idle: int) -> float:
            with ExitStack() as stack:
                for _ in range(idle):
                    one = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    one.connect(broker)
                time.sleep(SETTLE_SECONDS)  # for both: neither pays for connections that come or go
                return bench.controls.load(broker, timed, 64).per_second

        return _pair(
            bench,
            "calls/s",
            (f"{IDLE:,} idle", lambda: rate(IDLE)),
            ("none", lambda: rate(0)),
            "depth 64, the same broker",
        )


def keyed_by_plain(bench: Bench) -> Found:
    timed = f"{bench.pace.seconds}s"
    with bench.crew() as crew:
        broker, _ = crew.broker(ON)
        load = bench.controls.load
        return _pair(
            bench,
            "calls/s",
            ("`id` and key", lambda: load(broker, timed, 64, how="keys").per_second),
            ("plain", lambda: load(broker, timed, 64).per_second),
            "depth 64; every key is new",
        )


def tail(bench: Bench) -> Found:
    timed = f"{bench.pace.seconds}s"
    with bench.crew() as crew:
        paths = crew.broker(ON)[0], crew.relay(*toolhost())
        loads: list[list[Load]] = [
            [bench.controls.load(path, timed, 64) for path in paths] for _ in range(bench.pace.rounds + 1)
        ]
    ours, control = zip(*loads[1:], strict=True)  # the first round warms up
    relay = Spread([one.p99_us / one.p50_us for one in control])
    return Found(
        Side(name="p99", unit="µs", figures=[one.p99_us for one in ours]),
        Side(name="p50", unit="µs", figures=[one.p50_us for one in ours]),
        f"1 connection; the C relay's, in turn with it: {relay.median:.2f} ({relay.low:.2f} to {relay.high:.2f})",
    )


def long_by_parts(bench: Bench) -> Found:
    whole, part = _long_line(LONG), _long_line(LONG // PARTS)
    with bench.crew() as crew, ExitStack() as stack:
        ours, control = (stack.enter_context(LongLines(path)) for path in (crew.broker(ON)[0], crew.relay(*toolhost())))
        sides = interleaved(
            max(5, bench.pace.rounds),
            lambda: ours.took(whole, 1),
            lambda: ours.took(part, PARTS),
            lambda: control.took(whole, 1),
            lambda: control.took(part, PARTS),
        )
    return Found(
        Side(name="one of 10 MB", unit="ms", figures=sides[0]),
        Side(name="ten of 1 MB", unit="ms", figures=sides[1]),
        "one after the other; the tool counts the words in three words and many dots; through the C relay, with the "
        f"same toolhost, the ratio is {Spread(ratios(sides[2], sides[3])).median:.2f}",
    )


class LongLines:
    """A connection for lines that one write does not hold."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(30)
        self._socket.connect(path)
        self._replies = self._socket.makefile("rb")

    def __enter__(self) -> LongLines:
        return self

    def __exit__(self, *exc: object) -> None:
        self._replies.close()
        self._socket.close()

    def took(self, line: bytes, times: int) -> float:
        """Milliseconds, one after the other."""
        begin = time.perf_counter()
        for _ in range(times):
            self._socket.sendall(line)
            reply = self._replies.readline()
            if b'\\"total_tokens\\":3,' not in reply:
                raise Failed(f"a long line was answered {reply[:100]!r}")
        return (time.perf_counter() - begin) * 1000


def _long_line(size: int) -> bytes:
    """Exactly so many bytes, without the line end."""
    frame = '{"aid":"AID.DEMO.WORD_COUNT.v1","input_json":"{\\"text\\":\\"one two three %s\\"}"}'
    return (frame % ("." * (size - len(frame) + 2)) + "\n").encode()


# --- over HTTP --------------------------------------------------------------------------------------------------------


def http_by_uvicorn(tool: str) -> Callable[[Bench], Found]:
    def measure(bench: Bench) -> Found:
        timed = f"{bench.pace.seconds}s"
        with bench.crew() as crew:
            (_, port), control = crew.web(WEB), crew.uvicorn()
            load = bench.controls.http
            return _pair(
                bench,
                "calls/s",
                ("broker", lambda: load(port, timed, HTTP_CONNECTIONS, tool).per_second),
                ("bare uvicorn", lambda: load(control, timed, HTTP_CONNECTIONS, tool).per_second),
                f"`POST /v1/tools/execute` of {tool}, {HTTP_CONNECTIONS} connections kept alive, one call under way on "
                "each; the same requests to an ASGI app that answers with their bodies (`echo.py`: uvloop, httptools, "
                "no access log, no date), in a process of its own",
            )

    return measure


def socket_beside_http(bench: Bench) -> Found:
    timed = f"{bench.pace.seconds}s"
    with bench.crew() as crew:
        (on, _), (off, _) = crew.web(WEB), crew.broker(WEB)
        load = bench.controls.load
        return _pair(
            bench,
            "calls/s",
            ("HTTP on", lambda: load(on, timed, 64).per_second),
            ("off", lambda: load(off, timed, 64).per_second),
            "1 connection; nobody calls over HTTP meanwhile",
        )


# --- what does not depend on calls a second ---------------------------------------------------------------------------


def imported(bench: Bench) -> Found:
    took, heavy = [], set()
    with bench.crew() as crew:
        for _ in range(bench.pace.rounds + 3):
            command = [sys.executable, "-c", IMPORT, *HEAVY]
            done = subprocess.run(
                command, cwd=crew.folder, env=crew.environ(), capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise Failed((done.stderr.strip().splitlines() or ["import broker failed"])[-1])
            figure, *loaded = done.stdout.split()
            took.append(float(figure))
            heavy.update(loaded)
    fault = f"it loads {', '.join(sorted(heavy))}" if heavy else ""
    return Found(
        Side(name="`import broker`", unit="ms", figures=took[1:]),
        note="" if heavy else f"loads none of {', '.join(HEAVY)}",
        fault=fault,
    )


def memory(bench: Bench) -> Found:
    with bench.crew() as crew:
        broker, pid = crew.broker(ON)
        process = psutil.Process(pid)

        def after(calls: int) -> float:
            bench.controls.load(broker, calls, 64)
            return float(process.memory_info().rss) / 2**20

        early = after(10_000)
        late = after(990_000)
    return Found(
        Side(name="after 1 M calls", unit="MB", figures=[late]),
        Side(name="after 10 k", unit="MB", figures=[early]),
        "RSS of the broker's own process; one round",
    )


def _at_most(value: float) -> Goal:
    return Goal("≤", value)


def _at_least(value: float) -> Goal:
    return Goal("≥", value)


RATIOS: Sequence[Ratio] = (
    Ratio("process per call ÷ embedded", _at_least(300), process_by_embedded),
    Ratio("embedded ÷ raw C round trip", _at_most(2.0), embedded_by_raw),
    Ratio("process per call ÷ embedded, on one processor", None, on_one_processor(process_by_embedded)),
    Ratio("embedded ÷ raw C round trip, on one processor", None, on_one_processor(embedded_by_raw)),
    Ratio("broker ÷ C relay, latency at depth 1", _at_most(1.5), latency_by_relay),
    Ratio("two brokers alike, calls/s: the noise of this run", None, alike),
    Ratio("broker ÷ C relay, calls/s at depth 64, 1 connection", _at_least(0.85), rate_by_relay(1)),
    Ratio("broker ÷ C relay, calls/s at depth 64, 8 connections", _at_least(0.85), rate_by_relay(8)),
    Ratio("broker ÷ C relay, calls/s at depth 256, fixed-answer child", _at_least(0.35), fixed_by_relay),
    Ratio("our toolhost ÷ yyjson line server, pipelined directly", _at_least(0.8), direct_by_lines),
    Ratio("1,000 idle connections ÷ none, calls/s", _at_least(0.9), idle_by_none),
    Ratio("`id` and `idempotency_key` on every call ÷ plain, calls/s", _at_least(0.4), keyed_by_plain),
    Ratio("p99 ÷ p50 at depth 64", _at_most(3), tail),
    Ratio("one line of 10 MB ÷ ten of 1 MB, time", _at_most(1.3), long_by_parts),
    Ratio("HTTP ÷ a bare uvicorn echo app, calls/s, a toolhost's tool", _at_least(0.7), http_by_uvicorn(ECHO)),
    Ratio("HTTP ÷ a bare uvicorn echo app, calls/s, `echo_json`", _at_least(0.7), http_by_uvicorn("echo_json")),
    Ratio("the socket with HTTP on ÷ off, calls/s at depth 64", _at_least(0.9), socket_beside_http),
    Ratio("`import broker`", Goal("<", 60), imported),
    Ratio("RSS after 1 M calls ÷ after 10 k", _at_most(1.1), memory),
)
