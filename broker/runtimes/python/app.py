"""[[python]] in the daemon: an app whose functions are tools, each call in an untouched child of a warm interpreter."""

from __future__ import annotations

import glob
import os
import time
from concurrent.futures import ThreadPoolExecutor

from broker.errors import Refusal
from broker.model import ToolInfo, Work
from broker.observe.log import Log
from broker.pool.core import Core
from broker.pool.process import Spawner
from broker.runtimes.oneshot import count
from broker.runtimes.python.entry import is_within
from broker.runtimes.python.program import Asked, Program
from broker.runtimes.waiting import Waiting
from broker.settings import Limits, Python

MOST_ASKED = 256  # tools of one app that are known by their entry only
LONGEST_ENTRY = 512
SMALL = 1 << 16  # bytes of a call that the loop sends itself


class App(Waiting):
    """One app: a runtime whose calls cost a fork each time, most often one that has already been done."""

    def __init__(self, settings: Python, limits: Limits, core: Core, spawner: Spawner, log: Log) -> None:
        super().__init__(settings.max, limits, core)
        self.settings = settings
        self.program = Program(settings, limits, spawner, log)
        self.root = self.program.root
        self.source = self.root
        self.timeout = settings.timeout_seconds
        self._log = log
        self._asked: dict[str, ToolInfo] = {}
        self._threads = ThreadPoolExecutor(settings.max, thread_name_prefix="broker-python")
        self._ending = False

    def tools(self) -> list[ToolInfo]:
        """Those of the configuration, and those that were asked for by their entry."""
        return [*self.program.tools(), *self._asked.values()]

    def timeout_of(self, name: str) -> float:
        return self.program.timeout_of(name)

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
        file = _file_of(os.path.join(self.root, *parts))
        if not file:
            return "ModuleNotFoundError", _missing(self.root, parts)
        if not is_within(file, self.root):
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

    # --- one call -----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        self._threads.submit(self.program.prepare)

    def _start(self, work: Work) -> None:
        self.running += 1
        self._core.processes += 1
        if work.ticket is not None:
            work.ticket.handed_over()
        asked = self.program.ask(work) if len(work.lines) < SMALL else None  # else the thread does it
        self._threads.submit(self._run, work, asked, time.monotonic())

    def _run(self, work: Work, asked: Asked | None, begun: float) -> None:
        """In a thread. What has to be done after a call is done when the caller has its answer."""
        program = self.program
        child, heard, outcome = program.see_through(work, asked, program.nursery.take, program.nursery.end)
        program.release(child, heard)
        try:
            self._core.loop.call_soon_threadsafe(self._ended, work, outcome, time.monotonic() - begun)
        except RuntimeError:  # the loop has ended
            if child is not None:
                child.kill()
            return
        program.tidy(child, heard)

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
        nursery = self.program.nursery
        nursery.look()
        if not self._ending and nursery.to_bury():
            self._threads.submit(nursery.bury)
        if self.closed is not None and not self.busy():
            self._end()

    def close(self, refusal: Refusal) -> None:
        """Ends every process; their calls are answered `crash`."""
        self.drain(refusal)
        self._end()

    def _end(self) -> None:
        if not self._ending:
            self._ending = True
            self.program.nursery.close()
            self._threads.shutdown(wait=False)

    def alive(self) -> bool:
        return self.busy() or self.program.nursery.alive()


def _missing(root: str, parts: list[str]) -> str:
    """The first one that is not there, as Python says it."""
    for number in range(1, len(parts) + 1):
        place, name = os.path.join(root, *parts[:number]), ".".join(parts[:number])
        if os.path.isdir(place):
            continue
        if _file_of(place):
            return f"No module named {'.'.join(parts[: number + 1])!r}; {name!r} is not a package"
        return f"No module named {name!r}"
    return f"No module named {'.'.join(parts)!r}"


def _file_of(place: str) -> str:
    """What a module of this place would be read from."""
    for stem in (place, os.path.join(place, "__init__")):
        for file in (f"{stem}.py", f"{stem}.pyc", *glob.glob(f"{glob.escape(stem)}*.so")):
            if os.path.isfile(file) and file[len(stem)] == ".":
                return file
    return ""
