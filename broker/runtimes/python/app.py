"""[[python]] in the daemon: an app whose functions are tools, each call in an untouched child of a warm interpreter."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from broker import errors
from broker.config import Limits, Python, PythonTool
from broker.errors import ConfigError, Refusal
from broker.model import ToolInfo, Work
from broker.observe.log import Log
from broker.pool import verdicts
from broker.pool.core import Core
from broker.pool.process import Spawner
from broker.runtimes.builtin import UNCHANGED
from broker.runtimes.oneshot import count
from broker.runtimes.python import conversation
from broker.runtimes.python.conversation import Heard
from broker.runtimes.python.entry import is_within
from broker.runtimes.python.nursery import Nursery, Unavailable
from broker.runtimes.python.server import Child
from broker.runtimes.waiting import Waiting

MOST_ASKED = 256  # tools of one app that are known by their entry only
LONGEST_ENTRY = 512
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


def describe(tool: PythonTool) -> ToolInfo:
    return ToolInfo(tool.name, tool.name, deterministic=False, schema=tool.schema)


class App(Waiting):
    """One app: a runtime whose calls cost a fork each time, most often one that has already been done."""

    def __init__(self, settings: Python, limits: Limits, core: Core, spawner: Spawner, log: Log) -> None:
        super().__init__(settings.max, limits, core)
        self.settings = settings
        self.root = os.path.realpath(settings.app_root)
        self.source = self.root
        self.timeout = settings.timeout_seconds
        self._log = log
        self._targets = {tool.name: _Target(tool.entry, False) for tool in settings.tools}
        self._asked: dict[str, ToolInfo] = {}
        self._nursery = Nursery(self.root, interpreter(settings), self.root, settings.reuse, spawner)
        self._threads = ThreadPoolExecutor(settings.max, thread_name_prefix="broker-python")
        self._ending = False

    def tools(self) -> list[ToolInfo]:
        """Those of the configuration, and those that were asked for by their entry."""
        return [*map(describe, self.settings.tools), *self._asked.values()]

    def timeout_of(self, name: str) -> float:
        own = next((tool.timeout_seconds for tool in self.settings.tools if tool.name == name), 0.0)
        return own or self.timeout

    # --- a tool that is known by its entry only -----------------------------------------------------------------------

    def name_of(self, entry: str) -> str:
        """Its own, where the configuration gives it one."""
        own = next((tool.name for tool in self.settings.tools if tool.entry == entry), "")
        return own or f"{self.root}#{entry}"

    def problem(self, entry: str) -> tuple[str, str]:
        """Why it is not served, in Python's words; all of it is looked at once more before it is called."""
        module, colon, function = entry.partition(":")
        parts = module.split(".")
        if not colon or not module or not function or len(entry) > LONGEST_ENTRY:
            return "ValueError", "Invalid entry"
        if not all(part.isidentifier() for part in parts):
            return "PermissionError", f"{module!r} is no name of a module"
        place = os.path.join(self.root, *parts)
        files = [file for file in (place + ".py", os.path.join(place, "__init__.py")) if os.path.isfile(file)]
        if not files:
            return "ModuleNotFoundError", f"No module named {module!r} in the app"
        if not is_within(files[0], self.root):
            return "PermissionError", f"{module} is not a module of the app's own"
        return "", ""

    def full(self) -> bool:
        return len(self._asked) >= MOST_ASKED

    def ask_for(self, entry: str) -> ToolInfo:
        """It is a tool from now on."""
        name = self.name_of(entry)
        info = self._asked[name] = ToolInfo(name, name, deterministic=False)
        return info

    def give_up(self, name: str) -> None:
        """It is none any more; calls of it that wait may run."""
        del self._asked[name]

    def asked_for(self, name: str) -> bool:
        return name in self._asked

    def _target(self, name: str) -> _Target:
        return self._targets.get(name) or _Target(name.removeprefix(f"{self.root}#"), True)

    # --- one call -----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Starts the interpreter ahead."""
        self._threads.submit(self._prepare)

    def _prepare(self) -> None:
        try:
            self._nursery.prepare()
        except Unavailable as error:
            self._log.error("python app does not start", app=self.root, reason=error.refusal.text)

    def _start(self, work: Work) -> None:
        self.running += 1
        self._core.processes += 1
        if work.ticket is not None:
            work.ticket.handed_over()
        self._threads.submit(self._run, work)

    def _run(self, work: Work) -> None:
        """In a thread. What has to be done after a call is done when the caller has its answer."""
        child: Child | None = None
        heard = Heard()
        begun = time.monotonic()
        try:
            try:
                child, heard = self._call(work)
                outcome = self._outcome(work, child, heard)
            except Unavailable as error:
                outcome = error.refusal
            except Exception as error:
                outcome = Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}", ran=True)
            if child is not None and self.settings.reuse and not heard.ended:
                self._nursery.keep(child)  # now: its caller may be about to call again
            self._core.loop.call_soon_threadsafe(self._ended, work, outcome, time.monotonic() - begun)
            self._tidy(child, heard)
        except RuntimeError:  # the loop has ended
            if child is not None:
                child.kill()

    def _call(self, work: Work) -> tuple[Child, Heard]:
        target = self._target(work.tool.name)
        payload = msgspec.json.decode(work.lines, type=_Line).input_json.encode()
        for _ in range(TRIES):
            child = self._nursery.take()
            heard = conversation.converse(
                child, target.entry, target.guarded, payload, work.timeout, self._limits.reply_bytes
            )
            if heard.ended != conversation.UNASKED:
                return child, heard
            self._nursery.end(child)
        raise Unavailable(Refusal(errors.UNAVAILABLE, f"{work.tool.name}: its processes end before they are asked"))

    def _outcome(self, work: Work, child: Child, heard: Heard) -> bytes | Refusal:
        aid = work.tool.name
        if heard.head is None or heard.ended:
            if heard.ended == conversation.LATE:
                child.kill()
                return verdicts.timeout(aid, work.timeout)
            if heard.ended == conversation.TOO_LONG:
                return verdicts.oversize(aid, self._limits.reply_bytes)
            if heard.ended == conversation.JUNK:
                return verdicts.bad_reply(aid, "wrote into what is not its own")
            return verdicts.crash(aid, _obituary(self._nursery.end(child), heard.said))
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

    def _tidy(self, child: Child | None, heard: Heard) -> None:
        if child is not None:
            if not heard.ended:
                self._nursery.starts.succeeded()
            if heard.ended and child.pidfd >= 0:
                self._nursery.end(child)
            elif not heard.ended and not self.settings.reuse:
                self._nursery.leave(child)
        if heard.head is not None and heard.head.modules:
            self._nursery.learn(heard.head.modules)
        self._nursery.refill()

    def _ended(self, work: Work, outcome: bytes | Refusal, seconds: float) -> None:
        self.running -= 1
        self._core.processes -= 1
        count(self._core.policy, work.tool, outcome)
        if isinstance(outcome, Refusal):
            if outcome.ran:
                self._log.warning("python tool failed", aid=work.tool.name, reason=outcome.text)
            work.sink.refuse(work, outcome)
        else:
            work.tool.took(work.caller.face, seconds)
            work.sink.deliver(work, outcome, 1)
        self.pump()
        self._core.flush()

    # --- end ----------------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        super().expire(now)
        self._nursery.look()
        if not self._ending and self._nursery.to_bury():
            self._threads.submit(self._nursery.bury)
        if self.closed is not None and not self.busy():
            self._end()

    def close(self, refusal: Refusal) -> None:
        """Ends every process; their calls are answered `crash`."""
        self.drain(refusal)
        self._end()

    def _end(self) -> None:
        if not self._ending:
            self._ending = True
            self._nursery.close()
            self._threads.shutdown(wait=False)

    def alive(self) -> bool:
        return self.busy() or self._nursery.alive()


def _obituary(status: int | None, said: bytes) -> str:
    if status is None:
        ended = "its process ended"
    elif os.WIFSIGNALED(status):
        ended = f"its process was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        ended = f"its process exited with code {os.WEXITSTATUS(status)}"
    words = " | ".join(said.decode(errors="replace").strip().splitlines()[-3:])[-400:]
    return f"{ended}{verdicts.SAID}{words}" if words else ended
