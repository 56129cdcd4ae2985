"""The self-portrait: which cases show what a call costs, on each face."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from broker.bench.model import Plan

ECHO = "AID.DEMO.ECHO.v1"
DEPTHS = (1, 8, 64, 256)
SIZES = (64, 1024, 16 * 1024, 256 * 1024)
CLIENT, HTTP_CLIENT = "client", "http client"  # faces with nothing behind: what the load generator itself costs
CLIENTS = {CLIENT: "socket", HTTP_CLIENT: "http"}  # of which faces

PASSES = 3  # over all cases, so that each is measured at three different times
WARMUP = 0.04
SECONDS = 0.2


class Shape(NamedTuple):
    depth: int = 1
    connections: int = 1
    size: int = SIZES[0]  # of the input


EACH = [*(Shape(depth) for depth in DEPTHS), *(Shape(size=size) for size in SIZES[1:])]

FACES: dict[str, list[Shape]] = {
    CLIENT: [Shape(1), Shape(64), Shape(256)],
    "embedded": EACH,
    "socket": [*EACH, Shape(8, 8), Shape(64, 8), Shape(1, 64)],
}
HTTP_FACES: dict[str, list[Shape]] = {
    HTTP_CLIENT: [Shape(connections=1), Shape(connections=32)],
    "http": [Shape(connections=many, size=size) for size in (SIZES[0], 16 * 1024) for many in (1, 8, 32)],
}


def portrait(*, http: bool) -> list[Plan]:
    return list(_plans(FACES | HTTP_FACES if http else FACES))


def _plans(faces: dict[str, list[Shape]]) -> Iterator[Plan]:
    for face, shapes in faces.items():
        for shape in shapes:
            yield Plan(
                face=face,
                tool=ECHO,
                input=echo_input(shape.size),
                depth=shape.depth,
                connections=shape.connections,
                warmup=WARMUP,
                seconds=SECONDS,
                title=f"{shape.size // 1024} KB" if shape.size >= 1024 else f"{shape.size} B",
            )


def echo_input(size: int) -> str:
    """JSON of exactly so many bytes."""
    frame = '{"text":""}'
    return frame[:-2] + "x" * (size - len(frame)) + frame[-2:]
