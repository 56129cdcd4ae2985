"""`broker bench`: what a call costs, of ours and of your own tools."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from broker.cli.common import Trouble, Unreachable, add_socket, fail, socket_path, subcommand

if TYPE_CHECKING:
    from broker.bench.model import Plan
    from broker.bench.private import Private
    from broker.bench.report import Report
    from broker.bench.subject import Subject

EPILOG = """\
examples:
  broker bench                                        a self-portrait, 25 seconds: faces, depths, connections, sizes
  broker bench --tool AID.DEMO.WORD_COUNT.v1 --input '{"text":"to be or not to be"}' --depth 1,8,64
                                                      your tool, so many calls at once: how fast can it be?
  broker bench --tool AID.X.v1 --input '{}' --rate 500 --duration 30
                                                      500 calls each second, come what may: how long do users wait?
  broker bench --tool AID.X.v1 --embedded             the same without a daemon, in this process
  broker bench --tool AID.X.v1 --http http://127.0.0.1:8080
                                                      the same over HTTP
  broker bench --json before.json                     keep the figures …
  broker bench --compare before.json after.json       … and see what a change has changed
  broker bench --html report.html                     one page with plots, to send to somebody

With --depth (a closed loop), a call begins when another one has ended: a tool that stalls is asked less often, and the
stall is counted once. With --rate (an open loop), calls are due at fixed times, and latency counts from then: a stall
is felt by every call that it delays, as by real users. Choose --rate for latency, --depth for throughput.

Failed calls are counted by type and end nothing. Ctrl-C ends the run and shows what there is.

Exit codes: 0 measured; 1 not, or not all: the reason is on stderr; 2 wrong usage; 130 Ctrl-C.
"""

DURATION, WARMUP, ROUNDS = 5.0, 0.5, 5
TOOL_ONLY = ("input", "rate", "depth", "connections", "duration", "warmup", "embedded", "http")


class Usage(Exception):
    """The flags cannot be meant like that; the message says what to do."""


def add(commands: Any) -> None:
    parser = subcommand(
        commands,
        "bench",
        "measure what calls cost",
        "Measures what calls cost: without --tool, of the demo tools on every face; with it, of a tool of yours.",
        EPILOG,
    )
    parser.add_argument("--tool", metavar="AID", help="measure this tool (it is really called, again and again)")
    parser.add_argument("--input", metavar="JSON", help="its input; - reads stdin (default: {})")
    parser.add_argument(
        "--depth", metavar="N[,N…]", help="closed loop: calls under way on each connection (default: 1)"
    )
    parser.add_argument("--rate", metavar="R", type=float, help="open loop: calls that are due each second")
    parser.add_argument("--connections", metavar="N", type=int, help="to the broker's socket (default: 1)")
    parser.add_argument("--duration", metavar="SECONDS", type=float, help=f"of each case (default: {DURATION:g})")
    parser.add_argument("--warmup", metavar="SECONDS", type=float, help=f"before, not counted (default: {WARMUP:g})")
    parser.add_argument(
        "--embedded", action="store_true", default=None, help="in this process, one thread for each call under way"
    )
    parser.add_argument(
        "--http", metavar="URL", help="POST /v1/tools/execute there, one connection for each call under way"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures for machines; - is stdout")
    parser.add_argument("--html", metavar="FILE", help="write a page with plots")
    parser.add_argument(
        "--compare", metavar=("A.json", "B.json"), nargs=2, help="show what has changed, and run nothing"
    )
    add_socket(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from broker.bench.report import Unreadable
    from broker.client.failures import CallFailed

    try:
        if arguments.compare:
            return _compare(arguments)
        plans = _plans(arguments)
        _check_writable(arguments)
        return _measure(arguments, plans)
    except Usage as error:
        return fail(error, 2)
    except (*Trouble, Unreadable, CallFailed) as error:
        return fail(error)


# --- what is asked for ------------------------------------------------------------------------------------------------


def _plans(arguments: argparse.Namespace) -> list[Plan]:
    """The user's cases; none where the self-portrait is asked for."""
    from broker.bench.model import Plan

    if arguments.tool is None:
        extra = [name for name in TOOL_ONLY if getattr(arguments, name) is not None]
        if extra:
            raise Usage(f"--{extra[0]} goes with --tool AID; without one, `broker bench` measures cases of its own")
        return []
    if arguments.rate is not None and arguments.depth is not None:
        raise Usage("--rate is an open loop and --depth a closed one; give one of them")
    if arguments.embedded and (arguments.connections is not None or arguments.socket is not None):
        raise Usage("--embedded has no connections and no socket; leave out --connections and --socket, or --embedded")
    if arguments.http is not None:
        _check_http(arguments)
    connections = _whole(arguments.connections, 1, 1, 1000, "--connections")
    seconds = _number(arguments.duration, DURATION, 0.05, 86400, "--duration")
    plan = Plan(
        face="embedded" if arguments.embedded else "http" if arguments.http is not None else "socket",
        tool=arguments.tool,
        input=_input(arguments.input),
        connections=connections,
        rate=_number(arguments.rate, 0.0, 0.01, 1e7, "--rate"),
        warmup=_number(arguments.warmup, WARMUP, 0.0, 3600, "--warmup"),
        seconds=seconds,
        rounds=ROUNDS,
    )
    most = 1000 if arguments.embedded or arguments.http is not None else 65536
    depths = _depths(arguments.depth or "1", most)
    if arguments.http is not None:
        from broker.bench.http import open_connections

        depths = [open_connections(plan.rate)] if plan.rate else depths
        return [msgspec.structs.replace(plan, connections=depth) for depth in depths]
    return [msgspec.structs.replace(plan, depth=depth) for depth in (depths if not plan.rate else [1])]


def _check_http(arguments: argparse.Namespace) -> None:
    from broker.bench.http import address

    if arguments.embedded or arguments.socket is not None:
        raise Usage("--http, --socket and --embedded are three ways to call; give one of them")
    if arguments.connections is not None:
        raise Usage("--http has a connection for each call under way; leave out --connections, and give --depth")
    try:
        address(arguments.http)
    except ValueError as error:
        raise Usage(f"--http: {error}; for example http://127.0.0.1:8080") from None


def _depths(text: str, most: int) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts) or len(set(parts)) < len(parts):
        raise Usage(f"--depth {text}: give a whole number from 1 to {most}, or several different ones: 1,8,64")
    return [int(part) for part in parts]


def _input(text: str | None) -> str:
    try:
        text = "{}" if text is None else sys.stdin.read() if text == "-" else text
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Usage(f"--input is not JSON: {error} (quote it for the shell: '{{\"key\":1}}')") from None
    return text


def _number(given: float | None, usual: float, least: float, most: float, flag: str) -> float:
    if given is None:
        return usual
    if not least <= given <= most:
        raise Usage(f"{flag} {given:g}: give a number from {least:g} to {most:g}")
    return given


def _whole(given: int | None, usual: int, least: int, most: int, flag: str) -> int:
    return int(_number(given, usual, least, most, flag))


def _check_writable(arguments: argparse.Namespace) -> None:
    """Before the run: its figures are not to be lost at the end."""
    if arguments.json is not None and arguments.json == arguments.html:
        raise Usage("--json and --html name the same file; give each its own")
    for flag, path in (("--json", arguments.json), ("--html", arguments.html)):
        if path is None or (flag, path) == ("--json", "-"):
            continue
        fresh = not os.path.lexists(path)
        try:
            with open(path, "ab"):
                pass
            if fresh:
                os.unlink(path)
        except OSError as error:
            raise Usage(f"{flag} {path} cannot be written: {error.strerror}; name another file") from None


# --- the run ----------------------------------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace, plans: list[Plan]) -> int:
    from broker.bench import machine, report
    from broker.bench.private import Private
    from broker.bench.progress import Progress
    from broker.bench.run import run as run_cases
    from broker.bench.text import Paint, render

    described = machine.describe()
    with _sigterm_interrupts() as signals, Private() as private:
        subject = _subject(arguments, plans, private)
        tallies, ending = run_cases(subject, Progress(sys.stderr))
    command = ["broker", *sys.argv[1:]]
    whole = report.report(
        subject.plans, tallies, command=command, subject=subject.words, machine=described, partial=ending.words
    )
    screen = sys.stderr if arguments.json == "-" else sys.stdout
    try:
        _write(arguments, whole)
    finally:
        print(render(whole, Paint(_colours(screen))), file=screen, flush=True)
    if ending.interrupted:
        return 128 + (signals[0] if signals else signal.SIGINT)
    if ending.words:
        return fail(Unreachable(f"{ending.words}; the figures until then are above"))
    if not any(one.succeeded for one in whole.cases):
        return fail(Unreachable("no call has succeeded; see above, or give it more time with --duration"))
    return 0


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[list[int]]:
    """SIGTERM is taken like Ctrl-C; which of them it was stands in the list."""
    seen: list[int] = []

    def interrupt(number: int, frame: Any) -> None:  # noqa: ARG001
        seen.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGTERM, before)


def _subject(arguments: argparse.Namespace, plans: list[Plan], private: Private) -> Subject:
    from broker.bench import subject

    if arguments.embedded:
        return subject.tool_embedded(plans, arguments.config)
    if arguments.http is not None:
        return subject.tool_over_http(plans, arguments.http, private)
    path = socket_path(arguments)
    if arguments.tool is not None:
        return subject.tool_behind_socket(plans, path, private)
    return subject.portrait(
        path, private, named=arguments.socket is not None, say=lambda words: print(words, file=sys.stderr)
    )


# --- what comes of it -------------------------------------------------------------------------------------------------


def _write(arguments: argparse.Namespace, whole: Report) -> None:
    from broker.bench import page, report

    if arguments.json == "-":
        sys.stdout.write(report.encode(whole).decode())
    elif arguments.json is not None:
        _save(arguments.json, report.encode(whole))
    if arguments.html is not None:
        _save(arguments.html, page.render(whole).encode())


def _save(path: str, content: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(content)
    except OSError as error:
        raise Unreachable(f"{path} could not be written: {error.strerror}") from None


def _colours(screen: TextIO) -> bool:
    return screen.isatty() and not os.environ.get("NO_COLOR")


def _compare(arguments: argparse.Namespace) -> int:
    from broker.bench.compare import compare
    from broker.bench.report import read
    from broker.bench.text import Paint

    others = ("tool", "json", "html", "socket", *TOOL_ONLY)
    extra = [name for name in others if getattr(arguments, name) is not None]
    if extra:
        raise Usage(f"--compare runs nothing and takes two files only; leave out --{extra[0]}")
    a, b = (read(path) for path in arguments.compare)
    print(compare(a, b, Paint(_colours(sys.stdout))))
    return 0
