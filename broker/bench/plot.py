"""Line plots as SVG, drawn by hand: logarithmic axes, colours from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from msgspec import Struct

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 36, 26, 44
COLOURS = 8
DASHES = ("", "7 3", "2 3", "9 3 2 3")

Point = tuple[float, float]


class Series(Struct):
    label: str
    points: list[Point]  # rising x, both above 0
    dots: bool = False


class Axis(Struct):
    """From `low` to `high`, both above 0, with a word at some places."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    label: str
    warp: Callable[[float], float] = math.log10

    def place(self, value: float) -> float:
        """0 to 1."""
        low, high = self.warp(self.low), self.warp(self.high)
        return min(1.0, max(0.0, (self.warp(value) - low) / ((high - low) or 1.0)))


def decades(values: Iterable[float], label: str, words: Callable[[float], str]) -> Axis:
    """An axis around the values, with ticks at 1, 2 and 5, or 1 alone where there are many decades."""
    all_values = [value for value in values if value > 0] or [1.0]
    steps = (1, 2, 5) if math.log10(max(all_values) / min(all_values)) < 2 else (1,)
    first, last = math.floor(math.log10(min(all_values))), math.ceil(math.log10(max(all_values)))
    grid = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    low = max((value for value in grid if value <= min(all_values)), default=grid[0])
    high = min((value for value in grid if value >= max(all_values) and value > low), default=grid[-1])
    return Axis(low, high, [(value, words(value)) for value in grid if low <= value <= high], label)


def plot(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """One <svg>; the title is for those who do not see it."""
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(point: Point) -> tuple[float, float]:
        return LEFT + width * x.place(point[0]), TOP + height * (1 - y.place(point[1]))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">'
    ]
    for value, words in x.ticks:
        left = at((value, y.low))[0]
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{TOP}" y2="{TOP + height}"/>')
        parts.append(_text(left, TOP + height + 17, words, "middle"))
    for value, words in y.ticks:
        top = at((x.low, value))[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + width}" y1="{top:.1f}" y2="{top:.1f}"/>')
        parts.append(_text(LEFT - 7, top + 4, words, "end"))
    parts.append(_text(LEFT + width / 2, HEIGHT - 7, x.label, "middle"))
    parts.append(_text(LEFT, TOP - 11, y.label, "start"))
    for number, one in enumerate(series):
        places = _thin([at(point) for point in one.points])
        coordinates = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        colour = f"s{number % COLOURS}"
        parts.append(
            f'<polyline class="line {colour}"{dash(number)} points="{coordinates}"><title>{escape(one.label)}</title>'
            "</polyline>"
        )
        if one.dots:
            parts += [f'<circle class="dot {colour}" cx="{left:.1f}" cy="{top:.1f}" r="3.5"/>' for left, top in places]
    return "".join([*parts, "</svg>"])


def dash(number: int) -> str:
    """Colours come back after eight; lines differ without them, too."""
    pattern = DASHES[number % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def _text(left: float, top: float, words: str, anchor: str) -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _thin(places: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without points that nobody would see."""
    kept = places[:1]
    for left, top in places[1:-1]:
        if abs(left - kept[-1][0]) + abs(top - kept[-1][1]) >= 0.7:
            kept.append((left, top))
    return kept + places[1:][-1:]
