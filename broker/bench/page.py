"""The report as one page for a browser: plots, tables, the machine, the command. It loads nothing from anywhere."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from broker.bench import plot, text
from broker.bench.histogram import Histogram
from broker.bench.plot import Axis, Series
from broker.bench.report import Case, Report
from broker.bench.style import CSS

NINES = ((50.0, "50 %"), (90.0, "90 %"), (99.0, "99 %"), (99.9, "99.9 %"), (99.99, "99.99 %"), (99.999, "99.999 %"))
READING = (
    "The percentile axis is stretched towards its end: each step to the right is a tenth as many calls. "
    "A line that stays flat is a tool whose slowest calls are like its usual ones."
)


def render(whole: Report) -> str:
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            "<title>broker bench</title>",
            f"<style>{CSS}</style></head><body>",
            *_top(whole),
            *_plots(whole.cases),
            *_section("Cases", _table(whole.cases)),
            *_section("What else happened", _remarks(whole)),
            *_section("The client on its own", _client(whole)),
            "</body></html>\n",
        ]
    )


def _top(whole: Report) -> Iterator[str]:
    yield f"<header><h1>What a call costs</h1><p>{escape(whole.subject)}</p>"
    if whole.partial:
        yield f'<p class="partial"><strong>Partial:</strong> {escape(whole.partial)}</p>'
    versions = ", ".join(f"{name} {number}" for name, number in whole.machine.versions.items())
    facts = (
        ("Machine", whole.machine.words()),
        ("Load before", f"{whole.machine.load:g}"),
        ("Versions", versions),
        ("Made", whole.made),
    )
    yield "<dl>"
    for name, words in facts:
        yield f"<div><dt>{name}</dt><dd>{escape(words)}</dd></div>"
    yield f"<div><dt>Command</dt><dd><code>{escape(shlex.join(whole.command))}</code></dd></div></dl></header>"


def _section(title: str, content: Iterable[str]) -> Iterator[str]:
    """Nothing where there is nothing to say."""
    inside = list(content)
    if inside:
        yield f"<section><h2>{title}</h2>"
        yield from inside
        yield "</section>"


# --- plots ------------------------------------------------------------------------------------------------------------


def groups(cases: Sequence[Case]) -> Iterator[tuple[str, list[tuple[str, Case]]]]:
    """Cases that differ in one thing: (what a plot shows, its cases with what tells them apart)."""
    for face in dict.fromkeys(one.face for one in cases):
        mine = [one for one in cases if one.face == face and one.succeeded]
        least = min((one.input_bytes for one in mine), default=0)
        single = [one for one in mine if one.connections == 1]
        deep = [(_pace(one), one) for one in single if one.input_bytes == least]
        sizes = [(text.size(one.input_bytes), one) for one in single if one.depth == 1]
        many = [(f"{one.connections} connections, {_pace(one)}", one) for one in mine if one.connections > 1]
        if deep and _one_each(mine):
            deep, many = (
                [(f"{one.depth * one.connections} under way", one) for one in mine if one.input_bytes == least],
                [],
            )
        if deep:
            yield f"{face}: by depth" if len(deep) > 1 else face, deep
        if len(sizes) > 1:
            yield f"{face}: by size of the input", sizes
        if many:
            yield f"{face}: several connections", many


def _one_each(cases: Sequence[Case]) -> bool:
    """Calls under way have a connection each, so that depth is told by these."""
    return len({one.connections for one in cases}) > 1 and {(one.loop, one.depth) for one in cases} == {("closed", 1)}


def _pace(one: Case) -> str:
    return f"{one.rate_asked:g}/s" if one.loop == "open" else f"depth {one.depth}"


def _plots(cases: Sequence[Case]) -> Iterator[str]:
    figures = [_distribution(title, members) for title, members in groups(cases)]
    if figures:
        yield f"<section><h2>Latency</h2><p>{READING}</p><div class='plots'>"
        yield from figures
        yield "</div></section>"
    throughput = _throughput(cases)
    if throughput:
        yield f"<section><h2>Throughput</h2><div class='plots'>{throughput}</div></section>"


def _distribution(title: str, members: list[tuple[str, Case]]) -> str:
    most = max(one.succeeded for _, one in members)
    last = max(nine for nine, _ in NINES[1:] if nine == 90 or most >= 100 / (100 - nine))
    series = []
    for label, one in members:
        histogram = Histogram.read(one.histogram)
        steps = [(0.0, histogram.min), *(step for step in histogram.steps() if step[0] < last)]
        steps.append((min(last, 100 - 100 / one.succeeded), histogram.percentile(last)))
        series.append(Series(label, [(share, max(1.0, float(value))) for share, value in steps]))
    x = Axis(0.0, last, [tick for tick in NINES if tick[0] <= last], "percentile", _stretch)
    y = plot.decades((value for one in series for _, value in one.points), "latency", text.short_duration)
    return _figure(title, plot.plot(f"Latency by percentile, {title}", x, y, series), [label for label, _ in members])


def _stretch(percent: float) -> float:
    return -math.log10(max(1e-9, 1 - percent / 100))


def _throughput(cases: Sequence[Case]) -> str:
    """Calls a second by calls under way: of all faces, the smallest input."""
    series = []
    for face in dict.fromkeys(one.face for one in cases):
        mine = [one for one in cases if one.face == face and one.loop == "closed" and one.rate > 0]
        least = min((one.input_bytes for one in mine), default=0)
        chosen = sorted((one for one in mine if one.input_bytes == least), key=lambda one: one.depth)
        if _one_each(chosen):
            points = [(float(one.connections), one.rate) for one in sorted(chosen, key=lambda one: one.connections)]
            series.append(Series(f"{face}, a connection for each call", points, dots=True))
            continue
        for many in sorted({one.connections for one in chosen}):
            points = [(float(one.depth * many), one.rate) for one in chosen if one.connections == many]
            if len(points) > 1:
                label = face if many == 1 else f"{face}, {many} connections"
                series.append(Series(label, points, dots=True))
    if not series:
        return ""
    under_way = sorted({x for one in series for x, _ in one.points})
    ticks = [(value, f"{value:g}") for value in under_way]
    x = Axis(under_way[0], under_way[-1], ticks, "calls under way")
    y = plot.decades((rate for one in series for _, rate in one.points), "calls/s", text.short_number)
    svg = plot.plot("Throughput by depth", x, y, series)
    return _figure("by calls under way", svg, [one.label for one in series])


def _figure(title: str, svg: str, labels: list[str]) -> str:
    swatch = '<svg viewBox="0 0 28 8" aria-hidden="true"><line class="line s{}"{} x1="0" x2="28" y1="4" y2="4"/></svg>'
    keys = "".join(
        f"<li>{swatch.format(number % plot.COLOURS, plot.dash(number))}{escape(label)}</li>"
        for number, label in enumerate(labels)
    )
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}<ul class='keys'>{keys}</ul></figure>"


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(cases: Sequence[Case]) -> Iterator[str]:
    if not cases:
        return
    yield '<div class="wide"><table><thead><tr>'
    yield "".join(f"<th>{name.capitalize()}</th>" for name in text.HEAD)
    yield "</tr></thead><tbody>"
    for one in cases:
        cells = text.row(one)
        bad = ' class="bad"' if one.failed else ""
        yield f"<tr{bad}><th>{escape(cells[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells[1:])}</tr>"
    yield "</tbody></table></div>"
    yield "<p>Spread: how far the rates of a case's rounds are apart. Latency is of calls that succeeded.</p>"


def _remarks(whole: Report) -> list[str]:
    lines = [words for one in whole.cases for words in text.remarks(one)]
    return [f"<ul>{''.join(f'<li>{escape(words)}</li>' for words in lines)}</ul>"] if lines else []


def _client(whole: Report) -> Iterator[str]:
    lines = list(text.client(whole))
    if lines:
        yield "<p>The same load generator against a peer that answers everything at once with the same words.</p>"
        yield f"<ul>{''.join(f'<li>{escape(words)}</li>' for words in lines)}</ul>"
