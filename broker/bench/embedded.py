"""Calls through an `Embedded` in this process: as many threads as calls are wanted at once."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from broker import Embedded
from broker.bench.model import LATE_NS, TICK_NS, Plan, Round, Tally, Tick, clock
from broker.bench.timer import undisturbed
from broker.client.failures import CallFailed

OPEN_THREADS = 32  # of an open loop; a call that is due while all are busy starts late


class InProcess:
    """An `Embedded` that is made when it is needed, and anew after calls had to be cut off."""

    name = "embedded"

    def __init__(self, make: Callable[[], Embedded]) -> None:
        self._make = make
        self._tools: Embedded | None = None

    def tools(self) -> Embedded:
        if self._tools is None:
            self._tools = self._make()
        return self._tools

    def measure(self, plan: Plan, tally: Tally, tick: Tick) -> None:
        crew = _Crew(plan, self.tools())
        with undisturbed():
            try:
                crew.run(tick)
            finally:
                if not crew.stop():
                    self.close()  # answers what still runs
                crew.settle(tally)

    def close(self) -> None:
        tools, self._tools = self._tools, None
        if tools is not None:
            tools.close()


class _Member:
    """A thread's own books, added up when all are done."""

    def __init__(self, rounds: int) -> None:
        self.tally = Tally(rounds=[Round(0.0) for _ in range(rounds)])
        self.since = 0  # when its call, if it is in one, was due
        self.bell = threading.Semaphore(0)  # open loop: it is to wait for the next call that is due


class _Crew:
    def __init__(self, plan: Plan, tools: Embedded) -> None:
        self._plan = plan
        self._call = tools.call
        self._gate = threading.Event()
        self._over = False  # what ends now was cut off, and counts for nothing
        self._lock = threading.Lock()
        self._idle: list[_Member] = []  # open loop: the last of them waits for the next call
        self._nobody_waits = True
        self._dismissed = False
        self._number = 0  # of the next call
        self._members = [_Member(plan.rounds) for _ in range(OPEN_THREADS if plan.rate else plan.depth)]
        work = self._due_calls if plan.rate else self._calls
        self._threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in self._members]
        self._part = int(plan.seconds / plan.rounds * 1e9)
        self._born = self._begin = self._end = 0

    def run(self, tick: Tick) -> None:
        for thread in self._threads:
            thread.start()
        self._born = clock()
        self._begin = self._born + int(self._plan.warmup * 1e9)
        self._end = self._begin + self._part * self._plan.rounds
        self._gate.set()
        while (left := self._end - clock()) > 0:
            time.sleep(min(left, TICK_NS) / 1e9)
            tick(sum(one.answered for member in self._members for one in member.tally.rounds))
        if not self._join(self._plan.grace):
            self._give_up()

    def stop(self) -> bool:
        """Nothing is begun or counted any more; says whether all have ended."""
        self._over = True
        self._gate.set()
        self._dismiss()
        return self._join(0.1)

    def _join(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _give_up(self) -> None:
        """What is not answered has waited for so long, at least."""
        self._over = True
        now = clock()
        waiting = [member.since for member in self._members if member.since]
        if self._plan.rate:
            due = map(self._due, itertools.count(self._number))
            waiting += itertools.takewhile(lambda since: since < self._end, due)
        tally = self._members[0].tally
        for since in waiting:
            if since >= self._begin:
                tally.unanswered += 1
                tally.rounds[-1].latency.record(now - since)

    def settle(self, tally: Tally) -> None:
        self._join(10.0)
        elapsed = min(clock(), self._end) - self._begin
        for number in range(self._plan.rounds):
            part = min(elapsed - number * self._part, self._part)
            if part <= 0:
                break
            whole = Round(part / 1e9)
            for member in self._members:
                whole.answered += member.tally.rounds[number].answered
                whole.latency.merge(member.tally.rounds[number].latency)
            tally.rounds.append(whole)
        for member in self._members:
            tally.late += member.tally.late
            tally.unanswered += member.tally.unanswered
            for code, failures in member.tally.failed.items():
                tally.fail(code, failures.example, failures.count)

    # --- in the threads ---------------------------------------------------------------------------------------------

    def _calls(self, member: _Member) -> None:
        self._gate.wait()
        while (now := clock()) < self._end and not self._over:
            self._one(member, now)

    def _due(self, number: int) -> int:
        return self._born + int(number * 1e9 / self._plan.rate)

    def _due_calls(self, member: _Member) -> None:
        """One waits for the next call. When it is due, it has the thread that was idle last wait for the one after: the
        same few threads make the calls, as few as can."""
        self._gate.wait()
        while self._is_to_wait(member):
            due = self._due(self._number)
            if due >= self._end:
                self._dismiss()
                return
            while (early := due - clock()) > 0 and not self._over:
                time.sleep(min(early, TICK_NS) / 1e9)
            if self._over:
                return
            if early < -LATE_NS and due >= self._begin:
                member.tally.late += 1
            self._number += 1
            with self._lock:
                self._nobody_waits = not self._idle
                heir = self._idle.pop() if self._idle else None
            if heir is not None:
                heir.bell.release()
            self._one(member, due)

    def _is_to_wait(self, member: _Member) -> bool:
        """Idles until it is this thread's turn; false if there is nothing to do any more."""
        with self._lock:
            if self._nobody_waits:
                self._nobody_waits = False
                return not self._over
            self._idle.append(member)
        member.bell.acquire()
        return not self._dismissed

    def _dismiss(self) -> None:
        self._dismissed = True
        for member in self._members:
            member.bell.release()

    def _one(self, member: _Member, since: int) -> None:
        failed = None
        member.since = since
        try:
            self._call(self._plan.tool, input_json=self._plan.input)
        except CallFailed as failure:
            failed = failure
        now = clock()
        if self._over:
            return
        member.since = 0
        if now < self._begin:
            return
        number = (now - self._begin) // self._part
        if number < self._plan.rounds:
            member.tally.rounds[number].answered += 1
        if since < self._begin:
            return
        if failed is None:
            member.tally.rounds[min(number, self._plan.rounds - 1)].latency.record(now - since)
        else:
            member.tally.fail(failed.code, failed.text)
