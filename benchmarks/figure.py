"""A plot as a file of its own: broker.bench's, with its style sheet and a legend inside."""

from __future__ import annotations

from html import escape

from benchmarks.harness.results import Growth
from benchmarks.harness.rounds import Spread
from broker.bench import plot, text
from broker.bench.plot import HEIGHT, LEFT, WIDTH, Axis, Series
from broker.bench.style import CSS

LEGEND = 20  # a line of it


def draw(growth: Growth) -> str:
    """Points stand side by side, as far apart as their neighbours, whatever their numbers."""
    places = [float(number) for number in range(len(growth.points))]
    ticks = list(zip(places, growth.points, strict=True))
    x = Axis(places[0], places[-1], ticks, growth.axis, warp=lambda value: value)
    series = [
        Series(
            curve.name,
            [(place, Spread(figures).median) for place, figures in zip(places, curve.figures, strict=True)],
            dots=True,
        )
        for curve in growth.curves
    ]
    words = (lambda value: text.short_duration(value * 1000)) if growth.unit == "µs" else text.short_number
    y = plot.decades((value for one in series for _, value in one.points), growth.unit, words)
    return _framed(plot.plot(growth.title, x, y, series), [one.label for one in series])


def _framed(inner: str, labels: list[str]) -> str:
    height = HEIGHT + LEGEND * len(labels) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f'<style>{CSS}</style><rect width="100%" height="100%" fill="var(--bg)"/>',
        f'<svg width="{WIDTH}" height="{HEIGHT}">{inner}</svg>',
    ]
    for number, label in enumerate(labels):
        top = HEIGHT + LEGEND * number + 6
        colour = f"line s{number % plot.COLOURS}"
        parts.append(f'<line class="{colour}"{plot.dash(number)} x1="{LEFT}" x2="{LEFT + 28}" y1="{top}" y2="{top}"/>')
        parts.append(f'<text x="{LEFT + 36}" y="{top + 4}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>\n"])
