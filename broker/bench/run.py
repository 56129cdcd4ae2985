"""Runs the cases against their faces, pass by pass, and keeps what there is when that ends early."""

from __future__ import annotations

from msgspec import Struct

from broker.bench.model import Lost, Tally
from broker.bench.progress import Progress
from broker.bench.subject import Subject


class Ending(Struct):
    """Why not all was measured; empty words if all was."""

    interrupted: bool = False
    words: str = ""


def run(subject: Subject, progress: Progress) -> tuple[list[Tally], Ending]:
    """A tally for each plan. What was begun and cut off is in it as far as it got."""
    tallies = [Tally() for _ in subject.plans]
    ending = Ending()
    progress.begin(subject.passes * sum(plan.warmup + plan.seconds for plan in subject.plans))
    try:
        for _ in range(subject.passes):
            for plan, tally in zip(subject.plans, tallies, strict=True):
                progress.case(plan.name)
                subject.faces[plan.face].measure(plan, tally, progress.tick)
    except KeyboardInterrupt:
        ending = Ending(True, "interrupted")
    except Lost as lost:
        ending = Ending(False, str(lost))
    finally:
        progress.end()
        for face in subject.faces.values():
            face.close()
    return tallies, ending
