"""[[python]] in the caller's own process: the thread that brings a call waits for its child.

A signal's handler may raise in that thread at any moment, so what talks to a fork server is done by a thread of ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from broker.errors import Refusal
from broker.model import Caller, Judge, Tool, ToolInfo, Work
from broker.pool import verdicts
from broker.pool.fleet import Shared
from broker.pool.process import Spawner
from broker.runtimes.oneshot import count
from broker.runtimes.python.conversation import DEAD, Heard
from broker.runtimes.python.program import Program
from broker.runtimes.python.server import Child
from broker.settings import Python

END_SECONDS = 5.0  # for killed processes to be gone

Said = TypeVar("Said")


class PythonCalls:
    """One app: a runtime without a loop."""

    def __init__(self, settings: Python, shared: Shared) -> None:
        self._helper = Spawner()
        self.program = Program(settings, shared.limits, shared.spawner, shared.log)
        self.source = self.program.root
        self.timeout = settings.timeout_seconds
        self._shared = shared
        self._most = settings.max  # calls at once
        self._places = threading.BoundedSemaphore(self._most)
        self._closed: Refusal | None = None

    def tools(self) -> list[ToolInfo]:
        return self.program.tools()

    def submit(self, work: Work, now: float) -> None:
        """The thread that brought the work runs it."""
        work.caller.run_here(work, now)  # type: ignore[attr-defined]

    def revise(self, judge: Judge, index: int | None = None) -> None:
        """Nobody waits here."""

    # --- one call ---------------------------------------------------------------------------------------------------

    def run_plain(self, tool: Tool, line: bytes, caller: Caller) -> bytes | Refusal:
        return self.run(Work(tool, line, 1, None, caller, None, tool.timeout))  # type: ignore[arg-type]

    def run(self, work: Work) -> bytes | Refusal:
        seconds = self._shared.limits.queue_seconds
        if not self._places.acquire(timeout=seconds):
            return verdicts.overloaded(work.tool, seconds)
        try:
            return self._run(work)
        finally:
            self._places.release()

    def _run(self, work: Work) -> bytes | Refusal:
        held: list[Child] = []
        child, heard = None, Heard(DEAD)

        def take() -> Child:
            held.append(self._at_helper(self.program.nursery.take, self._give_back))
            return held[-1]

        def end(child: Child) -> int | None:
            return self._at_helper(lambda: self.program.nursery.end(child))

        try:
            with self._shared.lock:
                refusal = self._closed
                if refusal is None and work.ticket is not None:
                    work.ticket.handed_over()
            if refusal is not None:
                return refusal
            asked = self.program.ask(work)
            if asked.child is not None:
                held.append(asked.child)
            child, heard, outcome = self.program.see_through(work, asked, take, end)
            self.program.release(child, heard)
            with self._shared.lock:
                count(self._shared.policy, work.tool, outcome)
            return outcome
        finally:
            if child is None and held:  # a signal's handler has raised: it might still answer
                child = held[-1]
                child.kill()
            self._helper.soon(lambda: self._tidy(child, heard))

    def _tidy(self, child: Child | None, heard: Heard) -> None:
        """There is no janitor here: what he would see to is seen to with each call."""
        nursery = self.program.nursery
        self.program.tidy(child, heard)
        nursery.look()
        if nursery.to_bury():
            nursery.bury()

    def _at_helper(self, job: Callable[[], Said], unwanted: Callable[[Said], object] = lambda _: None) -> Said:
        """`unwanted` gets what comes of it, if nobody waits for that any more."""
        done: Future[Said] = Future()

        def do() -> None:
            try:
                said = job()
            except BaseException as error:
                done.set_exception(error)
                return
            try:
                done.set_result(said)
            except Exception:  # it has been cancelled
                unwanted(said)

        self._helper.soon(do)
        try:
            return done.result()
        except BaseException:
            if not done.cancel() and done.exception() is None:
                self._helper.soon(lambda: unwanted(done.result()))
            raise

    def _give_back(self, child: Child) -> None:
        self.program.nursery.end(child)

    # --- end --------------------------------------------------------------------------------------------------------

    def close(self, refusal: Refusal) -> None:
        """Ends every process; their calls are answered `crash`."""
        with self._shared.lock:
            self._closed = refusal
        nursery = self.program.nursery
        nursery.close()
        deadline = time.monotonic() + END_SECONDS
        places = [self._places.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in range(self._most)]
        if all(places):  # nobody waits for it any more
            self._helper.stop()
        while nursery.alive() and time.monotonic() < deadline:
            time.sleep(0.002)

    def abandon(self) -> None:
        """After a fork: the processes are the parent's; only our copies of what leads to them are closed."""
        self.program.nursery.abandon()
