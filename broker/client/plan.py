"""A plan: several calls, some after others, all in one session. What is after a failure is left out; the rest goes on.

The members' names of Narratoria's plans are understood, too: `toolId`, `toolPath`, `dependencies`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from broker.client.aio import AsyncClient
from broker.client.failures import CallFailed
from broker.client.streaming import Event

MOST_STEPS = 1000
OTHER_NAMES = {"toolId": "id", "toolPath": "tool", "dependencies": "after"}

Ended = Literal["success", "failed", "skipped"]
SUCCESS: Ended = "success"
FAILED: Ended = "failed"


class PlanError(Exception):
    """The plan cannot be run; the message says which step is wrong, and how."""


class Step(Struct, kw_only=True):
    """One call."""

    id: str
    tool: str
    input: Raw = Raw(b"{}")
    after: list[str] = []  # steps that have to be over before
    required: bool = True  # if it fails, those after it do not run


class Plan(Struct):
    tools: list[Step]
    parallel: bool = True  # what does not wait for others runs at the same time


class Outcome(Struct):
    """What became of a step."""

    id: str
    tool: str
    ended: Ended
    seconds: float = 0.0
    reason: str = ""
    output: Any = None  # JSON, as it is; or a text, if it is none


class _Document(Struct):
    tools: list[dict[str, Raw]]
    parallel: bool = True


Tell = Callable[[Step, Event | Outcome], object]


def read_plan(text: str | bytes) -> Plan:
    """All that is wrong with a plan is said before anything runs."""
    try:
        document = msgspec.json.decode(text, type=_Document)
    except msgspec.ValidationError as error:
        raise PlanError(f"it is no plan: {str(error)[0].lower()}{str(error)[1:]}") from None
    except msgspec.DecodeError as error:
        raise PlanError(_not_json(text, error)) from None
    except RecursionError:
        raise PlanError("it is nested too deeply") from None
    steps = [_step(number, members) for number, members in enumerate(document.tools, 1)]
    if len(steps) > MOST_STEPS:
        raise PlanError(f"it has {len(steps)} steps; {MOST_STEPS} is the most")
    names = [step.id for step in steps]
    for step in steps:
        if names.count(step.id) > 1:
            raise PlanError(f"two steps are called {step.id!r}")
        for name in step.after:
            if name not in names:
                raise PlanError(f"step {step.id!r} is after {name!r}, and there is no such step")
    _refuse_circles(steps)
    return Plan(steps, document.parallel)


def _not_json(text: str | bytes, error: msgspec.DecodeError) -> str:
    """msgspec counts bytes; whoever looks for it in an editor counts lines."""
    found = re.fullmatch(r"(?:JSON is malformed: )?(.*) \(byte (\d+)\)", str(error))
    if found is None:  # it ends too early
        return f"it is not JSON: {error}"
    before = (text.encode() if isinstance(text, str) else text)[: int(found[2])].decode(errors="replace")
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    return f"it is not JSON: line {line}, column {column}: {found[1]}"


def _step(number: int, members: dict[str, Raw]) -> Step:
    named = {OTHER_NAMES.get(name, name): value for name, value in members.items()}
    try:
        return msgspec.json.decode(msgspec.json.encode(named), type=Step)
    except msgspec.DecodeError as error:
        raise PlanError(f"step no. {number}: {str(error)[0].lower()}{str(error)[1:]}") from None


def _refuse_circles(steps: list[Step]) -> None:
    waiting = {step.id: set(step.after) for step in steps}
    while free := [name for name, after in waiting.items() if not after]:
        for name in free:
            del waiting[name]
        for after in waiting.values():
            after.difference_update(free)
    if waiting:
        raise PlanError(f"these steps wait for each other: {', '.join(waiting)}")


async def run_plan(client: AsyncClient, plan: Plan, session: str, tell: Tell) -> list[Outcome]:
    """The outcomes, in the order of the plan. Tools that are not there are a mistake in the plan."""
    known = {tool["aid"] for tool in await client.tools()}
    for step in plan.tools:
        step.tool = next((name for name in (step.tool, step.tool.rpartition("/")[2]) if name in known), step.tool)
        if step.tool not in known:
            raise PlanError(f"step {step.id!r}: tool not found: {step.tool}; `broker tools` shows what there is")
    return await _Run(client, session, tell).all(plan)


class _Run:
    def __init__(self, client: AsyncClient, session: str, tell: Tell) -> None:
        self._client = client
        self._session = session
        self._tell = tell
        self._over: dict[str, asyncio.Future[Outcome]] = {}
        self._steps: dict[str, Step] = {}

    async def all(self, plan: Plan) -> list[Outcome]:
        self._steps = {step.id: step for step in plan.tools}
        loop = asyncio.get_running_loop()
        self._over = {step.id: loop.create_future() for step in plan.tools}
        one_at_a_time = asyncio.Semaphore(len(plan.tools) or 1 if plan.parallel else 1)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._step(step, one_at_a_time)) for step in plan.tools]
        return [task.result() for task in tasks]

    async def _step(self, step: Step, turn: asyncio.Semaphore) -> Outcome:
        reasons = [_why_not(await asyncio.shield(self._over[name]), self._steps[name]) for name in step.after]
        reason = next(filter(None, reasons), "")
        if reason:
            outcome = Outcome(step.id, step.tool, "skipped", reason=reason)
        else:
            async with turn:
                outcome = await self._call(step)
        self._over[step.id].set_result(outcome)
        self._tell(step, outcome)
        return outcome

    async def _call(self, step: Step) -> Outcome:
        begun = time.monotonic()
        text = bytes(step.input).decode()
        reason, ended, output = "", SUCCESS, ""
        stream = self._client.stream(step.tool, input_json=text, session=self._session)
        try:
            async for event in stream:
                self._tell(step, event)
            assert stream.reply is not None
            output = stream.reply.output_json
        except CallFailed as failure:
            ended, reason = FAILED, failure.text or failure.code
            output = str(failure.more.get("output_json") or "")
        seconds = round(time.monotonic() - begun, 3)
        return Outcome(step.id, step.tool, ended, seconds, reason, _read(output))


def _read(output: str) -> Any:
    """As JSON, or as the text that it is; none where there is nothing."""
    try:
        return msgspec.json.decode(output, type=Raw) if output else None
    except (msgspec.DecodeError, RecursionError):
        return output


def _why_not(before: Outcome, step: Step) -> str:
    """Why the step behind it does not run; empty if it does."""
    if before.ended == "success" or (before.ended == "failed" and not step.required):
        return ""
    return f"{before.id} failed" if before.ended == "failed" else f"{before.id} was skipped"
