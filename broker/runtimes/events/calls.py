"""[[events]] in the caller's own process: the thread that brings a call runs it, and it is heard of at its end."""

from __future__ import annotations

import threading

from broker.errors import Refusal
from broker.model import Judge, Work
from broker.pool.fleet import Shared
from broker.pool.process import Process
from broker.runtimes.events.invocation import Ended, Hear
from broker.runtimes.events.program import Program
from broker.runtimes.events.protocol import Event
from broker.runtimes.events.report import Report
from broker.runtimes.oneshot import count


class EventCalls:
    """One tool: a runtime without a loop."""

    def __init__(self, program: Program, shared: Shared) -> None:
        self.source = program.source
        self.timeout = program.timeout
        self._program = program
        self._shared = shared
        self._children: set[Process] = set()
        self._children_lock = threading.Lock()
        self._ending = False

    def submit(self, work: Work, now: float) -> None:
        """The thread that brought the work runs it."""
        work.caller.run_here(work, now)  # type: ignore[attr-defined]

    def revise(self, judge: Judge, index: int | None = None) -> None:
        """Nobody waits here."""

    def run(self, work: Work) -> bytes | Refusal:
        program, lock, live = self._program, self._shared.lock, work.live
        assert live is not None
        report = program.report()
        with lock:
            if work.ticket is not None:
                work.ticket.handed_over()
            live.begin()
        outcomes: list[Ended | Refusal] = []
        try:
            program.run(work, self._hearing(work, report), self._born, self._gone, outcomes.append)
            outcome = outcomes[0]
            with lock:
                answer = outcome if isinstance(outcome, Refusal) else program.answer(work, report, outcome)
                count(self._shared.policy, work.tool, answer)
        finally:
            with lock:
                live.end()
        return answer

    def _hearing(self, work: Work, report: Report) -> Hear:
        def hear(events: list[Event], deadline: float) -> str:  # noqa: ARG001
            heard, problem = self._program.examined(events), None
            while problem is None:
                with self._shared.lock:
                    problem = self._program.apply(work, report, heard)
            return problem

        return hear

    def _born(self, child: Process) -> None:
        with self._children_lock:
            self._children.add(child)
            if self._ending:
                child.kill()

    def _gone(self, child: Process) -> None:
        with self._children_lock:
            self._children.discard(child)

    def close(self) -> None:
        """Ends every process; their calls are answered `crash`."""
        with self._children_lock:
            self._ending = True
            for child in self._children:
                child.kill()
