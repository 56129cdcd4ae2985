"""[[events]] in the daemon: a process for each call, whose events reach the caller, and the session, as they come."""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import NamedTuple

import msgspec
from msgspec import Raw

from broker import errors
from broker.assets import Assets, Found, examine
from broker.config import EventTool as Settings
from broker.config import Limits
from broker.errors import Refusal
from broker.model import Caller, ToolInfo, Work
from broker.observe.log import Log
from broker.pool import verdicts
from broker.pool.core import Core
from broker.pool.process import Process, SpawnError, Spec
from broker.runtimes.builtin import UNCHANGED
from broker.runtimes.events.invocation import Ended, Hear, Late, invoke
from broker.runtimes.events.protocol import Asset, Event, StatePatch, Stream
from broker.runtimes.events.report import Report
from broker.runtimes.oneshot import count
from broker.runtimes.waiting import Waiting
from broker.wire import is_json

_encode = msgspec.json.Encoder().encode

REPLY_ROOM = 512  # of a reply: what stands around its output

Heard = list[tuple[Event, Found | str | None]]  # with what is known of an asset's file


class _Line(msgspec.Struct):
    input_json: str = "{}"


class Pause(NamedTuple):
    """A tool that is not read from until its caller has read what it was told."""

    caller: Caller
    go_on: Future[str]
    problem: str


class BadInput(Exception):
    """In words for the caller."""


def describe(settings: Settings) -> ToolInfo:
    effects, tags = tuple(settings.side_effects), tuple(settings.tags)
    return ToolInfo(settings.name, settings.name, settings.deterministic, tags, effects, live=True)


def input_line(settings: Settings, work_line: bytes, request: str, depth: int) -> bytes:
    """What the tool reads."""
    given = msgspec.json.decode(work_line, type=_Line).input_json.encode()
    if not is_json(given, depth):
        raise BadInput("input is not JSON")
    name = request or str(uuid.uuid4())
    given = msgspec.json.format(given, indent=-1)  # one line
    if settings.input == "wrapped":
        members = {"requestId": name, "tool": settings.name, "operation": settings.operation, "input": Raw(given)}
        return _encode(members) + b"\n"
    if given[:1] != b"{":
        raise BadInput('input must be an object (its tool is configured with input = "flat")')
    return _encode({**msgspec.json.decode(given, type=dict[str, Raw]), "requestId": name}) + b"\n"


class EventTool(Waiting):
    """One tool: a runtime whose calls cost a start each time, and speak while they run."""

    def __init__(self, settings: Settings, limits: Limits, core: Core, assets: Assets, log: Log) -> None:
        super().__init__(settings.max, limits, core)
        self.settings = settings
        self.source = " ".join(settings.command)
        self.timeout = settings.timeout_seconds
        self.calls = 0
        self._roots = tuple(settings.assets)
        self._assets = assets
        self._log = log
        self._threads = ThreadPoolExecutor(settings.max, thread_name_prefix="broker-events")
        self._children: set[Process] = set()
        self._children_lock = threading.Lock()
        self._paused: list[Pause] = []
        self._ending = False

    # --- one call ---------------------------------------------------------------------------------------------------

    def _start(self, work: Work) -> None:
        assert work.live is not None
        self.running += 1
        self._core.processes += 1
        if work.ticket is not None:
            work.ticket.handed_over()
        work.live.begin()
        report = Report(self._limits.reply_bytes)
        begun = time.monotonic()
        call = self._threads.submit(self._run, work, report)
        ended = self._core.loop.call_soon_threadsafe
        call.add_done_callback(lambda done: ended(self._ended, work, report, done.result(), time.monotonic() - begun))

    def _run(self, work: Work, report: Report) -> Ended | Refusal:
        """In a thread."""
        settings, limits, aid = self.settings, self._limits, work.tool.name
        assert work.live is not None
        try:
            line = input_line(settings, work.lines, work.live.request, limits.depth)
            program = shutil.which(settings.command[0], path=settings.env.get("PATH"))
            if program is None:
                return Refusal(errors.NOT_FOUND, f"{aid}: {settings.command[0]} is not there (is it executable?)")
            environment = {**os.environ, **settings.env}
            spec = Spec((program, *settings.command[1:]), environment, settings.cwd or None, fenced=False)
            stream = Stream(limits.reply_bytes, limits.depth)
            return invoke(spec, line, work.timeout, stream, self._hearing(work, report), self._born, self._gone)
        except BadInput as error:
            return Refusal(errors.BAD_REQUEST, f"{aid}: {error}")
        except SpawnError as error:
            return Refusal(errors.NOT_FOUND, f"{aid}: {error}")
        except Exception as error:
            return Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}", ran=True)

    def _born(self, child: Process) -> None:
        with self._children_lock:
            self._children.add(child)
            if self._ending:
                child.kill()

    def _gone(self, child: Process) -> None:
        with self._children_lock:
            self._children.discard(child)

    # --- events -----------------------------------------------------------------------------------------------------

    def _hearing(self, work: Work, report: Report) -> Hear:
        """For its thread: has the loop hear the events, and waits until it has, and the caller has room for more."""

        def hear(events: list[Event], deadline: float) -> str:
            heard: Heard = [
                (event, examine(event.body.path, self._roots) if isinstance(event.body, Asset) else None)
                for event in events
            ]
            go_on: Future[str] = Future()
            self._core.loop.call_soon_threadsafe(self._heard, work, report, heard, go_on)
            try:
                return go_on.result(max(0.0, deadline - time.monotonic()))
            except NotYet:
                raise Late from None

        return hear

    def _heard(self, work: Work, report: Report, heard: Heard, go_on: Future[str]) -> None:
        problem = ""
        try:
            problem = self._apply(work, report, heard)
        except Exception as error:
            self._log.error("internal error", aid=work.tool.name, reason=repr(error))
            problem = f"the broker made a mistake: {error!r}"
        self._core.flush()
        if work.live is not None and work.live.stream and not self._ending and work.caller.behind():
            self._paused.append(Pause(work.caller, go_on, problem))
        else:
            go_on.set_result(problem)

    def _apply(self, work: Work, report: Report, heard: Heard) -> str:
        """Each event in its turn; the first that cannot be applied is the last."""
        live = work.live
        assert live is not None
        for event, found in heard:
            if isinstance(event.body, StatePatch) and (problem := live.patch(bytes(event.body.patch))):
                return problem
            members = report.add(event, self._registered(work, event, found))
            if live.stream:
                work.sink.tell(work, members)
        return ""

    def _registered(self, work: Work, event: Event, found: Found | str | None) -> object:
        if found is None:
            return None
        if isinstance(found, str):
            self._log.warning("asset not registered", aid=work.tool.name, reason=found)
            body = event.body
            assert isinstance(body, Asset)
            return {"assetId": body.id, "registered": False, "reason": found}
        asset = self._assets.register(found, event.body, work.tool.name, work.caller.principal, self._roots)
        return {**asset.told(), "registered": True}

    def pump(self) -> None:
        super().pump()
        paused, self._paused = self._paused, []
        for pause in paused:
            if self._ending or not pause.caller.behind():
                pause.go_on.set_result(pause.problem)
            else:
                self._paused.append(pause)

    def forget(self, caller: Caller) -> None:
        super().forget(caller)
        self.pump()

    # --- end ----------------------------------------------------------------------------------------------------------

    def _ended(self, work: Work, report: Report, outcome: Ended | Refusal, seconds: float) -> None:
        self.running -= 1
        self.calls += 1
        self._core.processes -= 1
        assert work.live is not None
        answer = outcome if isinstance(outcome, Refusal) else self._answer(work, report, outcome)
        work.live.end()
        count(self._core.policy, work.tool, answer)
        if isinstance(answer, Refusal):
            if answer.ran:
                self._log.warning("event tool failed", aid=work.tool.name, reason=answer.text)
            work.sink.refuse(work, answer)
        else:
            work.tool.took(work.caller.face, seconds)
            work.sink.deliver(work, answer, 1)
        self.pump()
        self._core.flush()

    def _answer(self, work: Work, report: Report, ended: Ended) -> bytes | Refusal:
        """The reply's line, or what the tool did wrong, with all that it had said until then."""
        aid, most, verdict = work.tool.name, self._limits.reply_bytes, ended.verdict
        assert work.live is not None
        if ended.late:
            text = f"{aid} was not done within {work.timeout:g} s; it may have run"
            verdict = verdict._replace(name="protocol_failure", reason=text)
        output = report.output(verdict, ended.summary, work.live.state(), ended.said, most - REPLY_ROOM)
        if len(_encode(output)) > most - REPLY_ROOM:
            return verdicts.oversize(aid, most)
        if verdict.name == "protocol_failure":
            kind = errors.TIMEOUT if ended.late else errors.CRASH if verdict.died else errors.BAD_REPLY
            return Refusal(kind, _with_last_words(verdict.reason, ended.said), output_json=output)
        ids = b"" if work.ids is None else b'"id":' + work.ids[:-1] + b","
        told = _encode(output), _encode(verdict.reason)
        if verdict.name == "success":
            return b'{%b"ok":true,"status":"OK","output_json":%b,"error":%b' % (ids, *told) + UNCHANGED
        return b'{%b"ok":false,"status":"TOOL_ERROR","output_json":%b,"error":%b' % (ids, *told) + UNCHANGED

    def close(self, refusal: Refusal) -> None:
        """Ends every process; their calls are answered `crash`."""
        self._ending = True
        self.drain(refusal)
        with self._children_lock:
            for child in self._children:
                child.kill()
        self.pump()
        self._threads.shutdown(wait=False)


def _with_last_words(reason: str, said: bytes) -> str:
    words = " | ".join(said.decode(errors="replace").strip().splitlines()[-3:])[-400:]
    return f"{reason}{verdicts.SAID}{words}" if words else reason
