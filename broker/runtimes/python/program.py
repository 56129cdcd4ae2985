"""One [[python]]: its interpreter, its tools, and a call of one of them. The same in the daemon and in `Embedded`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from broker import errors
from broker.errors import ConfigError, Refusal
from broker.model import ToolInfo, Work
from broker.observe.log import Log
from broker.pool import verdicts
from broker.pool.process import Spawner
from broker.runtimes.builtin import UNCHANGED
from broker.runtimes.python import conversation
from broker.runtimes.python.conversation import Heard
from broker.runtimes.python.nursery import Nursery, Unavailable
from broker.runtimes.python.server import Child
from broker.settings import Limits, Python, PythonTool

TRIES = 3  # children that were dead before they had the request

_encode = msgspec.json.Encoder().encode


class _Error(msgspec.Struct):
    type: str
    message: str
    code: str | None = None  # of an error that has one,
    detail: Any = None  # and what it says beside that
    http_status: Any = None
    retryable: Any = None

    def details(self) -> bytes:
        """Its output_json."""
        if self.code is None:
            return b'"{}"'
        more = {"detail": self.detail, "http_status": self.http_status, "retryable": self.retryable}
        given = {name: value for name, value in more.items() if value is not None}
        return _encode(_encode({"code": self.code, "message": self.message, **given}).decode())


class _Line(msgspec.Struct):
    input_json: str = "{}"


class _Target(NamedTuple):
    """What a tool's name stands for."""

    entry: str
    guarded: bool  # somebody else than the operator has named it


class Asked(NamedTuple):
    """A call that has begun; perhaps a child has had all of its request, or some."""

    request: bytes
    child: Child | None
    said: int  # bytes of the request
    since: float


def describe(tool: PythonTool) -> ToolInfo:
    return ToolInfo(tool.name, tool.name, deterministic=False, schema=tool.schema)


def interpreter(settings: Python) -> str:
    """The app's own, where it has one."""
    root = os.path.realpath(settings.app_root)
    if settings.python and os.sep not in settings.python and (found := shutil.which(settings.python)):
        return found
    chosen = os.path.join(root, settings.python or ".venv")
    if os.path.isdir(chosen):
        chosen = os.path.join(chosen, "bin", "python")
    if not settings.python and not os.path.exists(chosen):
        return sys.executable
    if not os.access(chosen, os.X_OK):
        raise ConfigError(f"[[python]] {root}: python = {settings.python!r}: {chosen} is no interpreter")
    return chosen


class Program:
    """One app. Any thread may call."""

    def __init__(self, settings: Python, limits: Limits, spawner: Spawner, log: Log) -> None:
        self.settings = settings
        self.root = os.path.realpath(settings.app_root)
        self.python = interpreter(settings)
        self.timeout = settings.timeout_seconds
        self.calls = {"crash": 0, "timeout": 0, "violation": 0}  # that ended so
        self.last_reason = ""
        self.nursery = Nursery(self.root, self.python, self.root, settings.reuse, spawner)
        self._limits = limits
        self._log = log
        self._targets = {tool.name: _Target(tool.entry, False) for tool in settings.tools}

    def tools(self) -> list[ToolInfo]:
        return [*map(describe, self.settings.tools)]

    def timeout_of(self, name: str) -> float:
        own = next((tool.timeout_seconds for tool in self.settings.tools if tool.name == name), 0.0)
        return own or self.timeout

    def _target(self, name: str) -> _Target:
        return self._targets.get(name) or _Target(name.removeprefix(f"{self.root}#"), True)

    def prepare(self) -> None:
        """Starts the interpreter ahead."""
        try:
            self.nursery.prepare()
        except Unavailable as error:
            self._log.error("python app does not start", app=self.root, reason=error.refusal.text)

    # --- one call -----------------------------------------------------------------------------------------------------

    def ask(self, work: Work) -> Asked:
        """A child that waits gets the request at once, as far as that takes no time."""
        target = self._target(work.tool.name)
        payload = msgspec.json.decode(work.lines, type=_Line).input_json.encode()
        request = conversation.frame(target.entry, target.guarded, payload)
        child = self.nursery.spare()
        since = time.monotonic()
        return Asked(request, child, conversation.say(child, request) if child is not None else 0, since)

    def see_through(
        self, work: Work, asked: Asked | None, take: Callable[[], Child], end: Callable[[Child], int | None]
    ) -> tuple[Child | None, Heard, bytes | Refusal]:
        """Until it is answered: by whom, what was heard, and what comes of it."""
        child, heard = None, Heard()
        try:
            request, child, said, since = asked or self.ask(work)
            for _ in range(TRIES):
                if child is None:
                    child, said, since = take(), 0, time.monotonic()
                most = self._limits.reply_bytes
                heard = conversation.converse(child, request, said, since + work.timeout, most)
                if heard.ended != conversation.UNASKED:
                    return child, heard, self._outcome(work, child, heard, end)
                end(child)
                child = None
            text = f"{work.tool.name}: its processes end before they are asked"
            return None, heard, Refusal(errors.UNAVAILABLE, text)
        except Unavailable as error:
            return None, heard, error.refusal
        except Exception as error:
            self._log.error("internal error", aid=work.tool.name, reason=repr(error))
            heard.ended = heard.ended or conversation.DEAD
            return child, heard, Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}", ran=True)

    def _outcome(self, work: Work, child: Child, heard: Heard, end: Callable[[Child], int | None]) -> bytes | Refusal:
        aid = work.tool.name
        if heard.head is None or heard.ended:
            refusal = self._failure(work, child, heard, end)
            self.last_reason = refusal.text
            return refusal
        ids = b"" if work.ids is None else b'"id":' + work.ids[:-1] + b","
        if heard.head.ok:
            outcome = b'"ok":true,"status":"OK","output_json":%b,"error":""' % _encode(heard.text.decode())
        else:
            error = msgspec.json.decode(heard.text, type=_Error)
            words = error.details(), _encode(error.message), _encode(error.type)
            outcome = b'"ok":false,"status":"TOOL_ERROR","output_json":%b,"error":%b,"code":%b' % words
        line = b"{" + ids + outcome + UNCHANGED
        if len(line) > self._limits.reply_bytes + len(ids):
            return verdicts.oversize(aid, self._limits.reply_bytes)
        return line

    def _failure(self, work: Work, child: Child, heard: Heard, end: Callable[[Child], int | None]) -> Refusal:
        aid = work.tool.name
        if heard.ended == conversation.LATE:
            self.calls["timeout"] += 1
            child.kill()
            return verdicts.timeout(aid, work.timeout)
        if heard.ended == conversation.TOO_LONG:
            return verdicts.oversize(aid, self._limits.reply_bytes)
        if heard.ended == conversation.JUNK:
            self.calls["violation"] += 1
            return verdicts.bad_reply(aid, "wrote into what is not its own")
        self.calls["crash"] += 1
        return verdicts.crash(aid, _obituary(end(child), heard.said))

    def release(self, child: Child | None, heard: Heard) -> None:
        """The child may be used again at once, where the app wants that: its caller may be about to call."""
        if child is not None and self.settings.reuse and not heard.ended:
            self.nursery.keep(child)

    def tidy(self, child: Child | None, heard: Heard) -> None:
        """What can be done when the caller has its answer."""
        nursery = self.nursery
        if child is not None and heard.ended and child.pidfd >= 0:
            nursery.end(child)
        elif child is not None and not heard.ended:
            nursery.starts.succeeded()
            if not self.settings.reuse:
                nursery.leave(child)
        if heard.head is not None:
            if heard.head.modules:
                nursery.learn(heard.head.modules)
            if heard.head.sources:
                nursery.compile(heard.head.sources)
        nursery.refill()


def _obituary(status: int | None, said: bytes) -> str:
    if status is None:
        ended = "its process ended"
    elif os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = f"signal {number}"
        with contextlib.suppress(ValueError):  # a real-time signal has no name
            name = signal.Signals(number).name
        ended = f"its process was killed by {name}"
    else:
        ended = f"its process exited with code {os.WEXITSTATUS(status)}"
    words = " | ".join(said.decode(errors="replace").strip().splitlines()[-3:])[-400:]
    return f"{ended}{verdicts.SAID}{words}" if words else ended
