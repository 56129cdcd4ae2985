"""The report for people at a terminal: a table, and beneath it what a figure alone would hide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from broker.bench.cases import CLIENTS
from broker.bench.report import Case, Report

HEAD = ("CASE", "CALLS/S", "SPREAD", "P50", "P90", "P99", "P99.9", "MAX", "FAILED")
SHORT = ((1e6, " M"), (1e3, " k"), (0.0, ""))
UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"))
CLOSE = 0.5  # a rate above this share of what the client reaches on its own is in part the client's
HTTP = (
    "http: the client is Python and shares the machine with the broker; "
    "one that costs less, or runs elsewhere, leaves the broker more of it"
)


class Paint:
    """Colours, or none."""

    def __init__(self, on: bool) -> None:
        self._on = on

    def __call__(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._on else text


BOLD, DIM, RED, YELLOW, GREEN = "1", "2", "31", "33", "32"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], paint: Paint, styles: Sequence[str] = ()) -> str:
    """The first column to the left, the others to the right; a style for each row."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for number, row in enumerate((head, *rows)):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        style = BOLD if number == 0 else styles[number - 1] if styles else ""
        line = "  ".join(cells).rstrip()
        lines.append(paint(line, style) if style else line)
    return "\n".join(lines)


def render(whole: Report, paint: Paint) -> str:
    lines = [whole.subject, whole.machine.words(), ""]
    if whole.cases:
        styles = [RED if one.failed else YELLOW if one.unanswered or one.late else "" for one in whole.cases]
        lines.append(table(HEAD, [row(one) for one in whole.cases], paint, styles))
    else:
        lines.append("nothing was measured")
    notes = [*_notes(whole)]
    if notes:
        lines += ["", *notes]
    if whole.partial:
        lines += ["", paint(f"partial: {whole.partial}", YELLOW)]
    return "\n".join(lines)


def row(one: Case) -> tuple[str, ...]:
    latency = one.latency
    figures = (latency.p50, latency.p90, latency.p99, latency.p99_9, latency.max)
    failed = sum(failures.count for failures in one.failed.values())
    return (
        one.name,
        number(one.rate),
        "-" if (spread := one.spread()) is None else f"{spread:.0%}",
        *(duration(figure) if one.succeeded else "-" for figure in figures),
        f"{failed:,}",
    )


def _notes(whole: Report) -> Iterator[str]:
    for one in whole.cases:
        yield from remarks(one)
    yield from client(whole)


def remarks(one: Case) -> Iterator[str]:
    """What happened to a case's calls beside success."""
    if one.loop == "open":
        late = f"{_calls(one.late)} could not be started in time" if one.late else "all calls were started in time"
        yield f"{one.name}: {number(one.rate)} calls/s of the {number(one.rate_asked)} that were due; {late}"
    if one.unanswered:
        yield (
            f"{one.name}: {_calls(one.unanswered)} had no answer at the end; "
            "what had been waited by then is counted as latency"
        )
    for code, failures in sorted(one.failed.items(), key=lambda item: -item[1].count):
        yield f"{one.name}: {failures.count:,} {code}, for example: {failures.example[:300]}"


def client(whole: Report) -> Iterator[str]:
    """What the client costs on its own, and where that is a good part of what was measured."""
    for one in whole.client:
        cost = f", {duration(one.client_cpu_ns)} of processor time a call" if one.client_cpu_ns else ""
        yield f"the {one.face} alone, {_short(one)}: {number(one.rate)} calls/s, p50 {duration(one.latency.p50)}{cost}"
    if any(one.face == "http" for one in whole.cases):
        yield HTTP
    limits = {(CLIENTS[one.face], one.depth, one.connections): one.rate for one in whole.client}
    for one in whole.cases:
        limit = limits.get((one.face, one.depth, one.connections))
        if limit and one.loop == "closed" and one.rate > CLOSE * limit:
            yield f"{one.name}: with nobody behind it {number(limit)} calls/s; much of this is socket and client"


def _calls(count: int) -> str:
    return "1 call" if count == 1 else f"{count:,} calls"


def _short(one: Case) -> str:
    return one.name.removeprefix(f"{one.face}, ")


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(octets: int) -> str:
    return f"{octets / 1024:.3g} KB" if octets >= 1024 else f"{octets} B"


def short_number(value: float) -> str:
    """For the ticks of an axis."""
    step, unit = next(pair for pair in SHORT if value >= pair[0])
    return f"{value / (step or 1):g}{unit}"


def short_duration(nanoseconds: float) -> str:
    step, unit = next((pair for pair in UNITS if nanoseconds >= pair[0]), (1, "ns"))
    return f"{nanoseconds / step:g} {unit}"


def duration(nanoseconds: float) -> str:
    """Three digits and a unit."""
    for size, unit in UNITS:
        if nanoseconds >= size * 0.9995:
            value = nanoseconds / size
            digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:,.{digits}f} {unit}"
    return f"{nanoseconds:.0f} ns"
