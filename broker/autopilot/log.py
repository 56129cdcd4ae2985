"""A run as JSON lines, one a step; and the same run again: repeatable tools run, the others are taken from the log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from broker.autopilot.selection import RunHeader, Selection
from broker.client.failures import CallFailed

if TYPE_CHECKING:
    from broker.autopilot.menu import Menu
    from broker.autopilot.runner import Tools


class Step(msgspec.Struct, kw_only=True, tag_field="event", tag="step"):
    """One selection and what came of it."""

    number: int
    selection: Selection
    aid: str | None = None
    inputs: dict[str, Any] | None = None
    output_json: str | None = None
    ds_state: Any = None  # the reply's delta
    error: str | None = None
    code: str | None = None  # the failure's, as the table of errors has it
    repeatable: bool = False  # deterministic, and without side effects
    invalid: bool = True  # it counts as an invalid pick
    milliseconds: float = 0.0


class _Begin(msgspec.Struct, kw_only=True, tag_field="event", tag="run"):
    time: float
    header: RunHeader
    menu: list[dict[str, Any]]
    inputs: dict[str, Any]
    slots: dict[str, Any]


class _End(msgspec.Struct, kw_only=True, tag_field="event", tag="end"):
    time: float
    reason: str
    detail: str
    slots: dict[str, Any]


_Line = _Begin | Step | _End
_lines = msgspec.json.Decoder(_Line)


class RunLog:
    """Appends a run to a file; each line is there before the next step begins."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def begin(self, header: RunHeader, menu: Menu, inputs: dict[str, Any], slots: dict[str, Any]) -> None:
        self._write(_Begin(time=time.time(), header=header, menu=menu.rows(), inputs=inputs, slots=slots))

    def step(self, step: Step) -> None:
        self._write(step)

    def end(self, reason: str, detail: str, slots: dict[str, Any]) -> None:
        self._write(_End(time=time.time(), reason=reason, detail=detail, slots=slots))

    def _write(self, line: _Line) -> None:
        with open(self.path, "ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


class Difference(msgspec.Struct):
    """Where a step, run again, had another outcome."""

    number: int
    aid: str
    then: str
    now: str


class Replayed(msgspec.Struct):
    """A run, gone through again."""

    header: RunHeader
    run: int = 0  # steps that were run again
    taken: int = 0  # steps that were taken from the log
    differences: list[Difference] = []
    slots: dict[str, Any] = {}
    complete: bool = False  # the log has its end, and the state is the one that it names

    @property
    def same(self) -> bool:
        return self.complete and not self.differences


def replay(path: str | Path, tools: Tools) -> Replayed:
    """Goes through the last run of a log. What is repeatable is run again, with the inputs and the state of then."""
    lines = list(_last_run(Path(path)))
    if not lines or not isinstance(lines[0], _Begin):
        raise ValueError(f"{path} has no run in it")
    replayed = Replayed(lines[0].header, slots=dict(lines[0].slots))
    for line in lines[1:]:
        if isinstance(line, Step):
            if line.aid is None:
                continue
            delta = _again(replayed, line, tools) if line.repeatable else line.ds_state
            replayed.taken += not line.repeatable
            replayed.slots = apply_state(replayed.slots, delta)
        elif isinstance(line, _End):
            replayed.complete = line.slots == replayed.slots
    return replayed


def _again(replayed: Replayed, step: Step, tools: Tools) -> Any:
    assert step.aid is not None
    replayed.run += 1
    delta = None
    try:
        reply = tools.call(step.aid, step.inputs, ds_state={"slots": replayed.slots})
        now, delta = reply.output_json, reply.ds_state
    except CallFailed as failed:
        now = f"{failed.code}: {failed.text}"
    then = step.output_json if step.output_json is not None else f"{step.code}: {step.error}"
    if now != then:
        replayed.differences.append(Difference(step.number, step.aid, then, now))
    return delta


def _last_run(path: Path) -> Iterator[_Line]:
    """A line that was cut, because the program died while it wrote it, ends the run."""
    run: list[_Line] = []
    for raw in path.read_bytes().splitlines():
        try:
            line = _lines.decode(raw)
        except msgspec.DecodeError:
            break
        if isinstance(line, _Begin):
            run = []
        run.append(line)
    yield from run


def apply_state(slots: dict[str, Any], delta: Any) -> dict[str, Any]:
    """The DSState after what a reply reports; a hit, or a failure, reports nothing."""
    if not isinstance(delta, dict):
        return slots
    changed = {**slots, **delta.get("slots", {})} if delta.get("delta") else dict(delta.get("slots", slots))
    for slot in delta.get("removed_slots", ()):
        changed.pop(str(slot), None)
    return changed
