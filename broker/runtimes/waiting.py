"""What waits for a runtime that does so many calls at once, and the rest in turn."""

from __future__ import annotations

from broker.errors import Refusal
from broker.model import HUNG_UP, Caller, Judge, Work
from broker.policy.admission import Queue
from broker.pool import verdicts
from broker.pool.core import Core
from broker.settings import Limits


class Waiting:
    """The queue of a runtime: a call whose turn has come is `_start`ed."""

    def __init__(self, most: int, limits: Limits, core: Core) -> None:
        self.queue = Queue()
        self.running = 0
        self.closed: Refusal | None = None
        self._most = most  # at once
        self._limits = limits
        self._core = core

    @property
    def most(self) -> int:
        return self._most

    def _start(self, work: Work) -> None:
        raise NotImplementedError

    # --- work in ----------------------------------------------------------------------------------------------------

    def submit(self, work: Work, now: float) -> None:
        if self.closed is not None:
            self._core.policy.rehome(work, self.closed)
            return
        self._core.queued_bytes += work.weight()
        self.queue.push(work, now)
        self.pump()

    def pump(self) -> None:
        """Starts what may run now, each caller in turn."""
        for lane in self.queue:
            if lane.tool.paused:
                continue
            while lane.lines and (room := self._room()) > 0:
                work = lane.pop(1, room)
                if work is None:
                    break
                self._core.queued_bytes -= work.weight()
                self._start(work)
            self.queue.turn(lane)

    def _room(self) -> int:
        """So many more may be started now."""
        return self._most - self.running if self._core.processes < self._limits.processes else 0

    # --- what happens elsewhere -------------------------------------------------------------------------------------

    def revise(self, judge: Judge, index: int | None = None) -> None:
        for lane in self.queue:
            if index is None or lane.tool.index == index:
                waiting = lane.clear()
                self.queue.turn(lane)
                for work in waiting:
                    refusal = judge(work)
                    if refusal is None:
                        self.queue.push(work, work.queued)
                    else:
                        self._refuse(work, refusal)

    def _refuse(self, work: Work, refusal: Refusal) -> None:
        self._core.queued_bytes -= work.weight()
        work.sink.refuse(work, refusal)

    def forget(self, caller: Caller) -> None:
        for work in self.queue.remove(caller):
            self._refuse(work, HUNG_UP)

    def expire(self, now: float) -> None:
        for work in self.queue.overdue(now - self._limits.queue_seconds):
            refusal = verdicts.overloaded(work.tool, self._limits.queue_seconds)
            self._core.policy.noted(work.tool.name, refusal.kind.code, refusal.text)
            self._refuse(work, refusal)
        self.pump()

    def drain(self, refusal: Refusal) -> None:
        """What waits goes elsewhere or is refused; what runs may end."""
        self.closed = refusal
        for work in self.queue.clear():
            self._core.queued_bytes -= work.weight()
            self._core.policy.rehome(work, refusal)

    def busy(self) -> bool:
        return self.running > 0 or bool(self.queue)

    def alive(self) -> bool:
        return self.busy()
