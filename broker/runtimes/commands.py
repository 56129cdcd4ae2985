"""[[oneshot]] in the daemon: a process for each call, watched by a thread; so many at once, the rest waits its turn."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from broker import errors
from broker.errors import Refusal
from broker.model import Work
from broker.observe.log import Log
from broker.pool.core import Core
from broker.pool.process import Process
from broker.runtimes.oneshot import count, run_command
from broker.runtimes.waiting import Waiting
from broker.settings import Limits
from broker.settings import OneShot as Settings


class Commands(Waiting):
    """One command: a runtime whose calls cost a start each time."""

    def __init__(self, settings: Settings, limits: Limits, core: Core, log: Log) -> None:
        super().__init__(settings.max, limits, core)
        self.settings = settings
        self.source = " ".join(settings.command)
        self.timeout = settings.timeout_seconds or limits.timeout_seconds
        self.calls = 0
        self._log = log
        self._threads = ThreadPoolExecutor(settings.max, thread_name_prefix="broker-command")
        self._children: set[Process] = set()
        self._children_lock = threading.Lock()

    # --- one call ---------------------------------------------------------------------------------------------------

    def _start(self, work: Work) -> None:
        self.running += 1
        self._core.processes += 1
        if work.ticket is not None:
            work.ticket.handed_over()
        begun = time.monotonic()
        call = self._threads.submit(self._run, work)
        ended = self._core.loop.call_soon_threadsafe
        call.add_done_callback(lambda done: ended(self._ended, work, done.result(), time.monotonic() - begun))

    def _run(self, work: Work) -> bytes | Refusal:
        """In a thread."""
        try:
            return run_command(
                self.settings, self._limits, work.tool.name, work.lines, work.timeout, self._born, self._gone, work.job
            )
        except Exception as error:
            return Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}", ran=True)

    def _born(self, child: Process) -> None:
        with self._children_lock:
            self._children.add(child)

    def _gone(self, child: Process) -> None:
        with self._children_lock:
            self._children.discard(child)

    def _ended(self, work: Work, outcome: bytes | Refusal, seconds: float) -> None:
        self.running -= 1
        self.calls += 1
        self._core.processes -= 1
        count(self._core.policy, work.tool, outcome)
        if isinstance(outcome, Refusal):
            if outcome.ran:
                self._log.warning("command failed", aid=work.tool.name, reason=outcome.text)
            work.sink.refuse(work, outcome)
        else:
            work.tool.took(work.caller.face, seconds)
            work.sink.deliver(work, outcome if work.ids is None else _with_id(outcome, work.ids), 1)
        self.pump()
        self._core.flush()

    def close(self, refusal: Refusal) -> None:
        """Ends every process; their calls are answered `crash`."""
        self.drain(refusal)
        with self._children_lock:
            for child in self._children:
                child.kill()
        self._threads.shutdown(wait=False)


def _with_id(line: bytes, ids: bytes) -> bytes:
    """The caller's id comes first; one of the command's own has no meaning here."""
    members = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    members.pop("id", None)
    return msgspec.json.encode({"id": msgspec.Raw(ids[:-1]), **members}) + b"\n"
