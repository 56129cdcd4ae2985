"""select → patch the inputs → dispatch → apply the state; within a budget, and written down."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from broker.autopilot.log import RunLog, Step, apply_state
from broker.autopilot.menu import Menu
from broker.autopilot.selection import Kind, RunHeader, Selection, parse
from broker.client.failures import BadRequest, CallFailed, NotFound
from broker.client.reply import Reply

STEPS = 64
INVALID_PICKS = 8


class Tools(Protocol):
    """`Client` or `Embedded`."""

    def call(self, aid: str, inputs: Any = None, *, ds_state: Any = None) -> Reply: ...

    def tools(self) -> list[dict[str, Any]]: ...


class Situation(msgspec.Struct, frozen=True):
    """What a selector is told."""

    header: RunHeader
    step: int  # the one that it chooses for, from 1
    menu: list[dict[str, Any]]
    inputs: dict[str, Any]
    slots: dict[str, Any]  # the DSState
    last: Step | None  # what came of the step before


class SelectorFailed(Exception):
    """The selector gave no choice at all."""

    def __init__(self, reason: str, retry_in: float | None = None) -> None:
        super().__init__(reason)
        self.retry_in = retry_in  # seconds, where it is not even asked for a while


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended."""

    reason: str  # noop, ask_sup, out_of_steps, invalid_picks, selector_failed
    steps: list[Step]
    inputs: dict[str, Any]
    slots: dict[str, Any]
    detail: str = ""


Selector = Callable[[Situation], "str | Selection"]


class Runner:
    """Lets a selector pick tools until it has no more to do, or the budget is spent.

    >>> from broker import Embedded
    >>> from broker.autopilot import Runner
    >>> def selector(situation):
    ...     return "<PICK><SID0003><END>" if situation.step == 1 else "<NOOP><END>"
    >>> with Embedded() as tools:
    ...     outcome = Runner(tools, selector).run({"hello": "world"})
    >>> outcome.reason, outcome.steps[0].aid, outcome.steps[0].output_json
    ('noop', 'AID.DEMO.ECHO.v1', '{"hello":"world"}')
    """

    def __init__(
        self,
        tools: Tools,
        selector: Selector,
        *,
        menu: Menu | None = None,
        steps: int = STEPS,
        invalid_picks: int = INVALID_PICKS,
        log: RunLog | None = None,
    ) -> None:
        self._tools = tools
        self._selector = selector
        self.menu = menu or Menu(tools.tools())
        self._steps = steps
        self._invalid_picks = invalid_picks
        self._log = log

    def run(
        self, inputs: dict[str, Any], *, slots: dict[str, Any] | None = None, header: RunHeader | None = None
    ) -> Outcome:
        """From these inputs and this DSState on."""
        header = header or RunHeader()
        inputs, slots = dict(inputs), dict(slots or {})
        done: list[Step] = []
        invalid = 0
        if self._log is not None:
            self._log.begin(header, self.menu, inputs, slots)
        for number in range(1, self._steps + 1):
            situation = Situation(header, number, self.menu.rows(), inputs, slots, done[-1] if done else None)
            try:
                selection = self._select(situation)
            except SelectorFailed as failed:
                selection = Selection(Kind.INVALID, raw=f"the selector failed: {failed}")
                if failed.retry_in is not None:
                    return self._end("selector_failed", done, inputs, slots, str(failed))
            if selection.kind in (Kind.NOOP, Kind.ASK_SUP):
                return self._end(selection.kind.value.lower(), done, inputs, slots)
            if selection.kind is Kind.PICK:
                inputs = {**inputs, **selection.patch()}
                step = self._dispatch(number, selection, inputs, slots)
                slots = apply_state(slots, step.ds_state)
            else:
                step = Step(number=number, selection=selection, error=f"no such selection: {selection.raw[:200]!r}")
            invalid += step.invalid
            done.append(step)
            if self._log is not None:
                self._log.step(step)
            if invalid >= self._invalid_picks:
                return self._end("invalid_picks", done, inputs, slots, f"{invalid} picks were invalid")
        return self._end("out_of_steps", done, inputs, slots, f"the budget is {self._steps} steps")

    def _select(self, situation: Situation) -> Selection:
        chosen = self._selector(situation)
        selection = parse(chosen) if isinstance(chosen, str) else chosen
        if selection.kind is Kind.PICK and selection.sid not in self.menu:
            return Selection(Kind.INVALID, raw=selection.raw or str(selection.sid))
        return selection

    def _dispatch(self, number: int, selection: Selection, inputs: dict[str, Any], slots: dict[str, Any]) -> Step:
        assert selection.sid is not None
        tool = self.menu[selection.sid]
        begin = time.monotonic()
        step = Step(
            number=number,
            selection=selection,
            aid=tool["aid"],
            inputs=inputs,
            repeatable=bool(tool.get("deterministic")) and list(tool.get("side_effects", ())) in ([], ["none"]),
            invalid=False,
        )
        try:
            reply = self._tools.call(tool["aid"], inputs, ds_state={"slots": slots})
        except CallFailed as failed:
            step.error, step.code = failed.text, failed.code
            step.invalid = isinstance(failed, BadRequest | NotFound)
        else:
            step.output_json, step.ds_state = reply.output_json, reply.ds_state
        step.milliseconds = round((time.monotonic() - begin) * 1000, 3)
        return step

    def _end(
        self, reason: str, steps: list[Step], inputs: dict[str, Any], slots: dict[str, Any], detail: str = ""
    ) -> Outcome:
        if self._log is not None:
            self._log.end(reason, detail, slots)
        return Outcome(reason, steps, inputs, slots, detail)
