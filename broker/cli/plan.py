"""`broker plan`: several calls, some after others, with live progress."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from pathlib import Path
from typing import Any

import msgspec

from broker.cli.common import Trouble, add_socket, fail, socket_path, subcommand
from broker.cli.events import Paper, told
from broker.client.aio import AsyncClient
from broker.client.failures import CallFailed
from broker.client.plan import Outcome, PlanError, Step, read_plan, run_plan
from broker.client.streaming import Event

EPILOG = """\
a plan:
  {"tools": [
    {"id": "scene",  "tool": "make_scene",  "input": {"room": 1}},
    {"id": "sound",  "tool": "make_sound",  "input": {}},
    {"id": "ending", "tool": "make_ending", "input": {}, "after": ["scene"]}
  ]}
  `scene` and `sound` run at the same time, `ending` when `scene` has succeeded. A step that fails does not stop the
  others, only those after it ("required": false lets these run, too). "parallel": false runs one at a time.
  Narratoria's toolId, toolPath and dependencies are understood.

All steps share one session, so each builds on the state that those before it have made.

Exit codes: 0 all steps succeeded; 1 a step failed or was skipped, or no broker answers; 2 the plan cannot be run.
"""


def add(commands: Any) -> None:
    parser = subcommand(
        commands, "plan", "run several tools, some after others", "Runs a plan and shows how it gets on.", EPILOG
    )
    parser.add_argument("file", metavar="FILE", help="the plan, JSON; - reads stdin")
    parser.add_argument("--session", metavar="NAME", default="", help="the session to build on (default: a new one)")
    parser.add_argument("--json", action="store_true", help="print only the outcomes, for machines")
    add_socket(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
        plan = read_plan(text)
    except OSError as error:
        return fail(ValueError(f"{arguments.file}: cannot be read: {error.strerror}"), 2)
    except (PlanError, UnicodeError) as error:
        return fail(ValueError(f"{arguments.file}: {error}"), 2)
    paper = Paper()
    width = max((len(step.id) for step in plan.tools), default=0)

    def tell(step: Step, what: Event | Outcome) -> None:
        if arguments.json:
            return
        kind, words = told(what) if isinstance(what, Event) else _ended(what)
        if not (isinstance(what, Event) and kind == "done"):
            paper.line(f"{step.id:{width}}", kind, words)

    async def all_of_it() -> list[Outcome]:
        async with AsyncClient(socket_path(arguments)) as client:
            return await run_plan(client, plan, arguments.session or f"plan-{secrets.token_hex(6)}", tell)

    try:
        outcomes = asyncio.run(all_of_it())
    except PlanError as error:
        return fail(ValueError(f"{arguments.file}: {error}"), 2)
    except (CallFailed, *Trouble) as error:
        return fail(error)
    if arguments.json:
        print(msgspec.json.encode(outcomes).decode())
    else:
        counts = [f"{sum(one.ended == kind for one in outcomes)} {kind}" for kind in ("success", "failed", "skipped")]
        print(f"{len(outcomes)} step{'s' * (len(outcomes) != 1)}: {', '.join(counts)}")
    return 0 if all(one.ended == "success" for one in outcomes) else 1


def _ended(outcome: Outcome) -> tuple[str, str]:
    if outcome.ended == "skipped":
        return "skipped", outcome.reason
    said = outcome.reason or _summary(outcome.output)
    return outcome.ended, f"{outcome.seconds:.2f} s" + (f": {said}" if said else "")


class _Told(msgspec.Struct):
    """What an event tool puts out, as far as it is for people."""

    verdict: str
    summary: str = ""


def _summary(output: Any) -> str:
    try:
        return msgspec.json.decode(output, type=_Told).summary if isinstance(output, msgspec.Raw) else ""
    except msgspec.DecodeError:
        return ""
