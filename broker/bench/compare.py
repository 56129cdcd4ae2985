"""Two reports, case by case: the ratios, and which of them are beyond what the figures vary by themselves."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from broker.bench.cases import CLIENTS
from broker.bench.report import Case, Part, Report
from broker.bench.text import GREEN, RED, Paint, duration, number, table

HEAD = ("CASE", "CALLS/S A", "B", "B÷A", "P50 A", "B", "B÷A", "P99 A", "B", "B÷A")
FIGURES: tuple[tuple[str, Callable[[Part], float], bool], ...] = (
    ("rate", lambda part: part.rate, True),
    ("p50", lambda part: part.p50, False),
    ("p99", lambda part: part.p99, False),
)


class Change(Struct):
    """One figure of one case. Beyond the spread: no round of one report reaches into the rounds of the other."""

    before: float
    after: float
    verdict: str  # better, worse, or nothing where it may be chance

    @property
    def ratio(self) -> float:
        return self.after / self.before if self.before else 0.0


def changes(before: Case, after: Case) -> list[Change]:
    ends = (
        (before.rate, after.rate),
        *((getattr(before.latency, n), getattr(after.latency, n)) for n in ("p50", "p99")),
    )
    found = []
    for (old, new), (_, figure, more_is_better) in zip(ends, FIGURES, strict=True):
        found.append(Change(old, new, _verdict(before.rounds, after.rounds, figure, more_is_better)))
    return found


def _verdict(before: list[Part], after: list[Part], figure: Callable[[Part], float], more_is_better: bool) -> str:
    old, new = [figure(part) for part in before], [figure(part) for part in after]
    if min(len(old), len(new)) < 2:
        return ""  # one round has no spread
    if min(new) > max(old):
        return "better" if more_is_better else "worse"
    if max(new) < min(old):
        return "worse" if more_is_better else "better"
    return ""


def compare(a: Report, b: Report, paint: Paint) -> str:
    """The table, and what it cannot say. The client alone is the control: nothing of the broker is in its rows."""
    mine, theirs = ({one.name: one for one in (*whole.cases, *whole.client)} for whole in (a, b))
    rows, styles = [], []
    machine_changed = False
    for name in mine:
        if name in theirs:
            found = changes(mine[name], theirs[name])
            rows.append(_row(name, found))
            verdicts = {change.verdict for change in found}
            styles.append(RED if "worse" in verdicts else GREEN if "better" in verdicts else "")
            machine_changed |= mine[name].face in CLIENTS and verdicts != {""}
    lines = [table(HEAD, rows, paint, styles)] if rows else ["the two reports have no case in common"]
    lines.append("")
    for label, ours, others in (("A", mine, theirs), ("B", theirs, mine)):
        alone = [name for name in ours if name not in others]
        if alone:
            lines.append(f"only in {label}: {'; '.join(alone)}")
    lines += [f"{label} is partial: {one.partial}" for label, one in (("A", a), ("B", b)) if one.partial]
    machines = [(one.machine.cpu, one.machine.cores, one.machine.kernel, one.machine.python) for one in (a, b)]
    if machines[0] != machines[1]:
        lines.append(f"two machines: A {a.machine.words()}; B {b.machine.words()}")
    if machine_changed:
        lines.append("the client alone has changed, too: so has the machine, or what else it was doing; measure again")
    lines.append("better, worse: beyond the spread (no round of A is within those of B); the rest may be chance.")
    lines.append("Runs differ, too, on a machine with other work: measure A and B in turn, more than once.")
    return "\n".join(lines)


def _row(name: str, found: list[Change]) -> tuple[str, ...]:
    cells = [name]
    for change, words in zip(found, (number, duration, duration), strict=True):
        cells += [words(change.before), words(change.after), f"{change.verdict} {change.ratio:.2f}".strip()]
    return tuple(cells)
