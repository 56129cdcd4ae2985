"""What is the same for an event tool's calls wherever their caller is: how they are run, heard and answered."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable

import msgspec
from msgspec import Raw

from broker import errors
from broker.assets import Assets, Found, examine
from broker.errors import Refusal
from broker.model import ToolInfo, Work
from broker.observe.log import Log
from broker.pool import verdicts
from broker.pool.process import SpawnError, Spec
from broker.runtimes.builtin import UNCHANGED
from broker.runtimes.events.invocation import Ended, Hear, Told, invoke
from broker.runtimes.events.protocol import Asset, Event, StatePatch, Stream
from broker.runtimes.events.report import Report
from broker.settings import EventTool as Settings
from broker.settings import Limits
from broker.wire import is_json

_encode = msgspec.json.Encoder().encode

SLICE_SECONDS = 0.002  # that events are applied for in one go
REPLY_ROOM = 512  # of a reply: what stands around its output

Over = Callable[[Ended | Refusal], object]
Heard = deque[tuple[Event, Found | str | None]]  # with what is known of an asset's file


class _Line(msgspec.Struct):
    input_json: str = "{}"


class _BadInput(Exception):
    """In words for the caller."""


def describe(settings: Settings) -> ToolInfo:
    effects, tags = tuple(settings.side_effects), tuple(settings.tags)
    return ToolInfo(settings.name, settings.name, settings.deterministic, tags, effects, live=True)


class Program:
    """One entry of the configuration."""

    def __init__(self, settings: Settings, limits: Limits, assets: Assets, log: Log) -> None:
        self.settings = settings
        self.source = " ".join(settings.command)
        self.timeout = settings.timeout_seconds
        self._limits = limits
        self._roots = tuple(settings.assets)
        self._assets = assets
        self._log = log

    def report(self) -> Report:
        return Report(self._limits.reply_bytes)

    # --- where blocking is no harm ----------------------------------------------------------------------------------

    def run(self, work: Work, hear: Hear, born: Told, gone: Told, over: Over) -> None:
        """Until its process is gone; `over` is told, once, as soon as its caller may be answered."""
        settings, limits, aid = self.settings, self._limits, work.tool.name
        assert work.live is not None
        told = False

        def tell(outcome: Ended | Refusal) -> None:
            nonlocal told
            if not told:
                told = True
                over(outcome)

        try:
            line = self._input_line(work.lines, work.live.request)
            environment = {**os.environ, **settings.env}
            spec = Spec((self._program(), *settings.command[1:]), environment, settings.cwd or None, fenced=False)
            invoke(spec, line, work.timeout, Stream(limits.reply_bytes, limits.depth), hear, born, gone, tell)
        except _BadInput as error:
            tell(Refusal(errors.BAD_REQUEST, f"{aid}: {error}"))
        except SpawnError as error:
            tell(Refusal(errors.NOT_FOUND, f"{aid}: {error}"))
        except Exception as error:
            self._log.error("internal error", aid=aid, reason=repr(error))
            tell(Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}", ran=True))

    def _program(self) -> str:
        """A name is looked for in the tool's PATH, a path that is not absolute in its working directory."""
        settings = self.settings
        name = settings.command[0]
        if os.sep in name:
            name = os.path.join(os.path.abspath(settings.cwd), name) if settings.cwd else os.path.abspath(name)
        program = shutil.which(name, path=settings.env.get("PATH"))
        if program is None:
            raise SpawnError(f"{name} is not there (is it executable?)")
        return program

    def _input_line(self, work_line: bytes, request: str) -> bytes:
        """What the tool reads."""
        settings = self.settings
        given = msgspec.json.decode(work_line, type=_Line).input_json.encode()
        if not is_json(given, self._limits.depth):
            raise _BadInput("input is not JSON")
        name = request or str(uuid.uuid4())
        given = msgspec.json.format(given, indent=-1)  # one line
        if settings.input == "wrapped":
            members = {
                "requestId": name, "tool": settings.name, "operation": settings.operation, "input": Raw(given)
            }  # fmt: skip
            return _encode(members) + b"\n"
        if given[:1] != b"{":
            raise _BadInput('input must be an object (its tool is configured with input = "flat")')
        return _encode({**msgspec.json.decode(given, type=dict[str, Raw]), "requestId": name}) + b"\n"

    def examined(self, events: list[Event]) -> Heard:
        """Assets' files are looked at."""
        return deque(
            (event, examine(event.body.path, self._roots) if isinstance(event.body, Asset) else None)
            for event in events
        )

    # --- where the policy is ----------------------------------------------------------------------------------------

    def apply(self, work: Work, report: Report, heard: Heard) -> str | None:
        """Each event in its turn; what is wrong with the first that cannot be applied, and it is the last. None: there
        are more, but others have to have their turn, too."""
        live = work.live
        assert live is not None
        until = time.monotonic() + SLICE_SECONDS
        while heard:
            event, found = heard.popleft()
            if isinstance(event.body, StatePatch) and (problem := live.patch(bytes(event.body.patch))):
                return problem
            members = report.add(event, self._registered(work, report, event, found))
            if live.stream:
                work.sink.tell(work, members)
            if heard and time.monotonic() > until:
                return None
        return ""

    def _registered(self, work: Work, report: Report, event: Event, found: Found | str | None) -> object:
        if found is None:
            return None
        if isinstance(found, str):
            report.unregistered += 1
            report.why = report.why or found
            body = event.body
            assert isinstance(body, Asset)
            return {"assetId": body.id, "registered": False, "reason": found}
        asset = self._assets.register(found, event.body, work.tool.name, work.caller.principal, self._roots)
        return {**asset.told(), "registered": True}

    def answer(self, work: Work, report: Report, ended: Ended) -> bytes | Refusal:
        """The reply's line, or what the tool did wrong, with all that it had said until then."""
        aid, most, verdict = work.tool.name, self._limits.reply_bytes, ended.verdict
        assert work.live is not None
        if ended.late:
            text = f"{aid} was not done within {work.timeout:g} s; it may have run"
            verdict = verdict._replace(name="protocol_failure", reason=text)
        reason = report.short(verdict.reason)
        room = most - REPLY_ROOM - len(_encode(reason))
        output = report.output(verdict, ended.summary, work.live.state(), ended.said, room)
        if report.unregistered:
            self._log.warning("assets not registered", aid=aid, count=report.unregistered, reason=report.why)
        if len(_encode(output)) > room:
            return verdicts.oversize(aid, most)
        if verdict.name == "protocol_failure":
            kind = errors.TIMEOUT if ended.late else errors.CRASH if verdict.died else errors.BAD_REPLY
            refusal = Refusal(kind, _with_last_words(reason, ended.said), output_json=output)
            self._log.warning("event tool failed", aid=aid, reason=refusal.text)
            return refusal
        ids = b"" if work.ids is None else b'"id":' + work.ids[:-1] + b","
        told = _encode(output), _encode(reason)
        if verdict.name == "success":
            return b'{%b"ok":true,"status":"OK","output_json":%b,"error":%b' % (ids, *told) + UNCHANGED
        return b'{%b"ok":false,"status":"TOOL_ERROR","output_json":%b,"error":%b' % (ids, *told) + UNCHANGED


def _with_last_words(reason: str, said: bytes) -> str:
    words = " | ".join(said.decode(errors="replace").strip().splitlines()[-3:])[-400:]
    return f"{reason}{verdicts.SAID}{words}" if words else reason
