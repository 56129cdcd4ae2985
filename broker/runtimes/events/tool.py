"""[[events]] in the daemon: a process for each call, whose events reach the caller, and the session, as they come."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import NamedTuple

from broker.errors import Refusal
from broker.model import Caller, Work
from broker.observe.log import Log
from broker.pool.core import Core
from broker.pool.process import Process
from broker.runtimes.events.invocation import Ended, Hear, Late
from broker.runtimes.events.program import Heard, Program
from broker.runtimes.events.protocol import Event
from broker.runtimes.events.report import Report
from broker.runtimes.oneshot import count
from broker.runtimes.waiting import Waiting
from broker.settings import Limits


class Pause(NamedTuple):
    """A tool that is not read from until its caller has read what it was told."""

    caller: Caller
    room: Future[None]


class EventTool(Waiting):
    """One tool: a runtime whose calls cost a start each time, and speak while they run."""

    def __init__(self, program: Program, limits: Limits, core: Core, log: Log) -> None:
        super().__init__(program.settings.max, limits, core)
        self.settings = program.settings
        self.source = program.source
        self.timeout = program.timeout
        self.calls = 0
        self._program = program
        self._log = log
        self._threads = ThreadPoolExecutor(2 * program.settings.max, thread_name_prefix="broker-events")
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
        report = self._program.report()
        begun, soon = time.monotonic(), self._core.loop.call_soon_threadsafe
        hear = self._hearing(work, report)

        def over(outcome: Ended | Refusal) -> None:
            soon(self._over, work, report, outcome, time.monotonic() - begun)

        call = self._threads.submit(self._program.run, work, hear, self._born, self._gone, over)
        call.add_done_callback(lambda _: soon(self._left))

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
            heard = self._program.examined(events)
            applied: Future[str] = Future()
            room: Future[None] = Future()
            problem = None
            self._core.loop.call_soon_threadsafe(self._heard, work, report, heard, applied, room)
            try:
                problem = applied.result(max(0.0, deadline - time.monotonic()))
                room.result(max(0.0, deadline - time.monotonic()))
            except NotYet:
                applied.cancel()
                room.cancel()
                raise Late(problem) from None
            return problem

        return hear

    def _heard(self, work: Work, report: Report, heard: Heard, applied: Future[str], room: Future[None]) -> None:
        if applied.cancelled():  # nobody waits any longer, and the call may have its answer
            return
        problem: str | None = ""
        try:
            problem = self._program.apply(work, report, heard)
        except Exception as error:
            self._log.error("internal error", aid=work.tool.name, reason=repr(error))
            problem = f"the broker made a mistake: {error!r}"
        self._core.flush()
        if problem is None:
            self._core.loop.call_soon(self._heard, work, report, heard, applied, room)
            return
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            applied.set_result(problem)
        if work.live is not None and work.live.stream and not self._ending and work.caller.behind():
            self._paused.append(Pause(work.caller, room))
            super().pump()
        else:
            room.set_result(None)

    def _room(self) -> int:
        """Those that wait for their readers take no place from others; a tool that may run once only runs once."""
        stalled = sum(not pause.room.cancelled() for pause in self._paused) if self._most > 1 else 0
        return min(super()._room() + stalled, 2 * self._most - self.running)

    def pump(self) -> None:
        super().pump()
        paused, self._paused = self._paused, []
        for pause in paused:
            if self._ending or not pause.caller.behind():
                with contextlib.suppress(InvalidStateError):  # nobody waits any longer
                    pause.room.set_result(None)
            elif not pause.room.cancelled():
                self._paused.append(pause)

    def forget(self, caller: Caller) -> None:
        super().forget(caller)
        self.pump()

    # --- end ----------------------------------------------------------------------------------------------------------

    def _over(self, work: Work, report: Report, outcome: Ended | Refusal, seconds: float) -> None:
        """Its caller is answered, also if its process has yet to end."""
        self.calls += 1
        assert work.live is not None
        answer = outcome if isinstance(outcome, Refusal) else self._program.answer(work, report, outcome)
        work.live.end()
        count(self._core.policy, work.tool, answer)
        if isinstance(answer, Refusal):
            work.sink.refuse(work, answer)
        else:
            work.tool.took(work.caller.face, seconds)
            work.sink.deliver(work, answer, 1)
        self._core.flush()

    def _left(self) -> None:
        """Its process is gone: the next one may come."""
        self.running -= 1
        self._core.processes -= 1
        self.pump()
        self._core.flush()

    def close(self, refusal: Refusal) -> None:
        """Ends every process; their calls are answered `crash`."""
        self._ending = True
        self.drain(refusal)
        with self._children_lock:
            for child in self._children:
                child.kill()
        self.pump()
        self._threads.shutdown(wait=False)
