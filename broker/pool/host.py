"""One toolhost's conversation: lines out, replies in, in order; its deadline, its last words, and its end."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from typing import TYPE_CHECKING

from broker import errors
from broker._native import ffi, lib
from broker.errors import Refusal
from broker.model import Caller, Tool, Work
from broker.pool import verdicts
from broker.pool.asides import OURS, Aside, Fence, Permit, asks_for_a_lease, fence_line, fence_name, with_token
from broker.pool.outbox import Outbox
from broker.pool.rules import MOST_STRANGERS, NEWCOMER_CALLS, STARTUP_SECONDS, learn

if TYPE_CHECKING:
    from broker.pool.pool import Pool
    from broker.pool.process import Process

QUIET_SECONDS = 0.005  # instead of a fence, where the toolhost cannot say which line it answers
SLOW_SECONDS = 0.001  # a call that takes longer is never in front of another
READS_BEFORE_LATE = 64
GRACE_SECONDS = 2.0  # between the end of its input and SIGKILL


class Host:
    """A toolhost process while it lives. The pool's lists say in which state it is; this is what it is doing."""

    __slots__ = (
        "alone",
        "asked_to_leave",
        "blamed",
        "born",
        "calls",
        "deadline",
        "expires",
        "flight",
        "framer",
        "inflight",
        "last_caller",
        "last_tool",
        "lived",
        "loop",
        "mark",
        "max_calls",
        "outbox",
        "pool",
        "process",
        "quotes",
        "rss",
        "scheduled",
        "stderr",
        "stop_reason",
        "strangers",
        "timer",
        "timer_at",
    )

    def __init__(self, pool: Pool, process: Process, loop: asyncio.AbstractEventLoop, now: float) -> None:
        self.pool = pool
        self.process = process
        self.loop = loop
        self.flight: deque[Work] = deque()
        self.inflight = 0  # calls in `flight`
        self.last_caller: Caller | None = None  # of the call that it was given last; none behind a fence
        self.last_tool = OURS
        self.asked_to_leave = False
        self.blamed = False  # a tool has to answer for its end, not its start
        self.lived = False  # it has answered at least once
        self.alone = True  # nobody may be put behind what it is doing
        self.quotes = True  # its refusals name the line that they answer; if not, it serves one caller only
        self.calls = 0
        self.born = now
        self.expires = 0.0
        self.max_calls = 0
        self.mark = now  # since when the first call in flight has been the first
        self.deadline = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.timer_at = 0.0
        self.scheduled = False
        self.strangers = 0  # replies to nothing that it was asked
        self.stderr = b""
        self.stop_reason = ""
        self.rss = 0  # bytes, when it came alive
        self.framer = ffi.gc(lib.tb_framer_new(pool.limits.reply_bytes), lib.tb_framer_free)
        self.outbox = Outbox(loop, process.stdin, self._input_broken)
        loop.add_reader(process.stdout, self._on_replies)
        loop.add_reader(process.stderr, self._on_stderr)
        loop.add_reader(process.pidfd, self._on_exit)
        self._ask(Fence(STARTUP_SECONDS, OURS, self._alive), now)

    # --- work in ----------------------------------------------------------------------------------------------------

    def send(self, work: Work, now: float, lines: bytes | None = None) -> None:
        """Hands a call over, behind a fence if the one before was another caller's: what the toolhost may still have to
        say to that one must not become this one's answer."""
        lines = lines or work.lines
        if work.ticket is not None:
            work.ticket.handed_over()
        if self.last_caller is not work.caller:
            if self.last_caller is not None and self.quotes:
                work.fence = fence_name()
                work.suspect = self.last_tool
                lines = fence_line(work.fence) + lines
            self.last_caller = work.caller
        self.last_tool = work.tool
        self._put(work, lines, now)

    def _ask(self, aside: Aside, now: float) -> None:
        self._put(aside.work, aside.work.lines, now)

    def _put(self, work: Work, lines: bytes, now: float) -> None:
        """An idle toolhost gets it at once; a busy one with whatever else this round brings."""
        idle = not self.flight
        self.flight.append(work)
        self.inflight += work.count
        self.outbox.put(lines)
        if idle:
            self.mark = now
            self._arm(now)
        if not self.scheduled:
            self.scheduled = True
            if idle:
                self.pool.core.dirty.append(self)
            else:
                self.loop.call_soon(self.flush)

    def send_alone(self, work: Work, now: float) -> None:
        """One call with a toolhost to itself."""
        self.alone = True
        if self.pool.asks_leases and work.tool.tier:
            self._ask(Permit(work, STARTUP_SECONDS, self._permitted), now)
        else:
            self.send(work, now)

    def flush(self) -> None:
        self.scheduled = False
        self.outbox.flush()

    # --- what our own lines have shown ------------------------------------------------------------------------------

    def _alive(self, fence: Fence, quoted: bool) -> None:  # noqa: ARG002
        """The first sign of life; from now on we know whether its refusals name the line that they answer."""
        self.quotes = quoted
        self.alone = False
        self.pool.host_free(self)

    def _proved(self, fence: Fence, quoted: bool) -> None:
        """A newcomer had it to itself, and said what it had to say, no more."""
        if not quoted:
            self.pool.violation(self, fence.work.suspect, verdicts.MORE_THAN_ONCE)
            return
        fence.work.suspect.clean += 1
        self.last_caller = None
        self.alone = False
        self.pool.host_free(self)

    def _permitted(self, call: Work, token: str, error: str) -> None:
        if token:
            self.send(call, time.monotonic(), with_token(call.lines, token))
        else:
            self.alone = False
            call.sink.refuse(call, verdicts.no_lease(call.tool.name, error))
            self.pool.host_free(self)

    # --- replies out ------------------------------------------------------------------------------------------------

    def _on_replies(self) -> None:
        got = lib.tb_framer_read(self.framer, self.process.stdout)
        if got > 0:
            self._settle(time.monotonic())
            self.pool.core.flush()
        elif got == 0:
            self.loop.remove_reader(self.process.stdout)
            self.die("closed its output")
        elif got not in (-11, -4):  # EAGAIN, EINTR
            self.die(f"its output cannot be read: {os.strerror(-got)}")

    def _settle(self, now: float) -> None:
        """Gives each complete reply to the call that it belongs to: the first one in flight."""
        taken = self.pool.core.taken
        flight = self.flight
        answered = 0
        first = flight[0] if flight else None
        last = None  # call that was answered
        while flight:
            work = flight[0]
            asked = work.count
            if self._take(work):
                raise MemoryError
            if taken.fenced:
                work.fence = b""
            lines = taken.lines
            if work.tool is not OURS:
                last = work
            if lines:
                data = ffi.buffer(taken.data, taken.len)[:]
                if lines != taken.succeeded and self._wants_lease(work, data, now):
                    continue
                if len(flight) > 1 and self._swallowed(work, data):
                    return
                work.ids_at += taken.ids_used
                work.done += lines
                work.count -= lines
                self.inflight -= lines
                answered += lines
                if last is work:
                    self._tally(work.tool, lines, now)
                if not work.count:
                    flight.popleft()
                work.sink.deliver(work, data, lines)
            stopped = taken.stopped
            if stopped == lib.TB_REPLY_OVERSIZE:
                if work.fence or work.tool is OURS:
                    self.pool.violation(self, work.suspect, "answered a line that no tool answers with far too much")
                    return
                answered += 1
                self._oversize(work)
            elif stopped == lib.TB_REPLY_JUNK:
                junk = verdicts.junk(ffi.buffer(taken.junk, taken.junk_len)[:])
                ours = work.fence or work.tool is OURS
                self.pool.violation(self, work.suspect if ours else work.tool, junk)
                return
            elif stopped == lib.TB_REPLY_STRANGER:
                if self._stranger(work):
                    return
            elif lines < asked:
                break
        if not flight and not self.stop_reason and lib.tb_framer_pending(self.framer):
            self.pool.violation(self, first.tool if first else OURS, verdicts.MORE_THAN_ASKED)
        elif answered and not self.stop_reason:
            self._progress(first, last, answered, now)

    def _take(self, work: Work) -> int:
        """As many replies of this work as there are."""
        core, fence, ids = self.pool.core, work.fence, work.ids
        rest, left = (ffi.NULL, 0) if ids is None else (ffi.from_buffer(ids) + work.ids_at, len(ids) - work.ids_at)
        depth = self.pool.limits.depth
        return lib.tb_take(self.framer, core.take_batch, work.count, fence, len(fence), rest, left, depth, core.taken)

    def _tally(self, tool: Tool, lines: int, now: float) -> None:
        taken = self.pool.core.taken
        tool.size += (taken.len / lines - tool.size) / 2
        self.calls += lines
        self.pool.core.policy.answered(tool, lines, taken.succeeded, now)

    def _progress(self, first: Work | None, last: Work | None, answered: int, now: float) -> None:
        """Time moves on: what a call costs, when the next one is late, who may come in."""
        if first is not None and first is last:
            learn(first.tool, (now - self.mark) / answered)
        self.mark = now
        if self.flight:
            self._arm(now)
            if not self.alone:
                self.pool.host_free(self)
        elif last is not None:
            if self.alone and (last.tool.clean < NEWCOMER_CALLS or not self.pool.settings.pipeline):
                if self.quotes:
                    self._ask(Fence(STARTUP_SECONDS, last.tool, self._proved), now)
                else:
                    self.loop.call_later(QUIET_SECONDS, self._quiet, last.tool)
            else:
                self.alone = False
                self.pool.host_free(self)

    def _wants_lease(self, work: Work, data: bytes, now: float) -> bool:
        """The first call of a tool above tier 0 learns whether the toolhost enforces leases: then it gets one."""
        pool = self.pool
        if not self.alone or pool.asks_leases or not work.tool.tier or not asks_for_a_lease(data):
            return False
        pool.asks_leases = True
        pool.log.info("toolhost enforces leases, the broker gets them", pool=pool.name)
        self.flight.popleft()
        self.inflight -= 1
        self.send_alone(work, now)
        return True

    def _stranger(self, work: Work) -> bool:
        """In front of a fence, what is not the fence's reply is nobody's. Behind it the count is right again."""
        self.strangers += 1
        if self.strangers > MOST_STRANGERS:
            self.pool.violation(self, work.suspect, "said far more than it was asked")
            return True
        if self.strangers == 1:
            self.pool.babbled(self, work.suspect)
        return False

    def _swallowed(self, work: Work, data: bytes) -> bool:
        """A fence's reply came as a call's: calls before it have none, and those behind it may have run."""
        fence = self.flight[1].fence
        if not fence or fence not in data:
            return False
        what = "left a request without an answer"
        refusal = Refusal(errors.BAD_REPLY, f"its toolhost {what}; the call may have run")
        for lost in self.abandon():
            lost.sink.refuse(lost, refusal)
        self.pool.violation(self, work.tool, what)
        return True

    def _quiet(self, tool: Tool) -> None:
        if self.stop_reason:
            return
        tool.clean += 1
        self.alone = False
        self.pool.host_free(self)
        self.pool.core.flush()

    def _oversize(self, work: Work) -> None:
        call = self._first_call()
        self.pool.failed(call, verdicts.oversize(work.tool.name, self.pool.limits.reply_bytes))

    def _first_call(self) -> Work:
        """Takes the first call in flight out."""
        work = self.flight[0]
        self.inflight -= 1
        if work.count == 1:
            return self.flight.popleft()
        return work.take(1)

    # --- time -------------------------------------------------------------------------------------------------------

    def _arm(self, now: float) -> None:
        """The clock of a call starts when it is the first. One timer a toolhost; it is moved only when it must be."""
        self.deadline = now + self.flight[0].timeout
        if self.timer is None or self.deadline < self.timer_at:
            if self.timer is not None:
                self.timer.cancel()
            self._schedule(now)

    def _schedule(self, now: float) -> None:
        self.timer_at = self.deadline
        self.timer = self.loop.call_later(max(0.001, self.deadline - now), self._on_timer)

    def _on_timer(self) -> None:
        self.timer = None
        if not self.flight or self.stop_reason:
            return
        now = time.monotonic()
        if now >= self.deadline:
            self._catch_up()
        if not self.flight or self.stop_reason:
            return
        if now < self.deadline:
            self._schedule(now)
        else:
            self.pool.late(self)
            self.pool.core.flush()

    def _catch_up(self) -> None:
        """We may be the ones who are late: what has been said in time counts."""
        for _ in range(READS_BEFORE_LATE):
            first, left = self.flight[0], self.flight[0].count
            got = lib.tb_framer_read(self.framer, self.process.stdout)
            if got <= 0:
                break
            self._settle(time.monotonic())
            if self.stop_reason or not self.flight or self.flight[0] is not first or first.count != left:
                break
        self.pool.core.flush()

    # --- the end ----------------------------------------------------------------------------------------------------

    def _on_stderr(self) -> None:
        try:
            data = os.read(self.process.stderr, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.stderr = (self.stderr + data)[-verdicts.STDERR_KEPT :]
        else:
            self.loop.remove_reader(self.process.stderr)

    def _input_broken(self) -> None:
        if not self.stop_reason:
            self.die("stopped reading its input")

    def obituary(self) -> str:
        return verdicts.obituary(self.process, self.stop_reason, self.stderr)

    def die(self, reason: str) -> None:
        """Kills it. What it had in flight is settled when it is dead and its pipe is dry."""
        if not self.stop_reason:
            self.stop_reason = reason
            self.pool.host_leaves(self)
        self.process.kill()

    def finish(self, reason: str) -> None:
        """Nothing is in flight, nothing more will be: the end of its input asks it to leave."""
        if self.stop_reason:
            return
        self.stop_reason = reason
        self.asked_to_leave = True
        self.outbox.close()
        self.process.close_stdin()
        self.loop.call_later(GRACE_SECONDS, self.process.kill)

    def _on_exit(self) -> None:
        process = self.process
        if not process.reap():
            return
        if not self.stop_reason:
            self.stop_reason = process.how_it_ended()
            self.pool.host_leaves(self)
        while self.flight and lib.tb_framer_read(self.framer, process.stdout) > 0:
            self._settle(time.monotonic())
        self._on_stderr()
        for fd in (process.stdout, process.stderr, process.pidfd):
            self.loop.remove_reader(fd)
        self.outbox.close()
        if self.timer is not None:
            self.timer.cancel()
        process.close()
        self.loop.call_soon(ffi.release, self.framer)
        self.pool.host_dead(self)
        self.pool.core.flush()

    def abandon(self) -> list[Work]:
        """All calls that it has, given up. `running()` says, before, whether the first one may have run."""
        works = []
        for work in self.flight:
            if not isinstance(work.sink, Aside):
                works.append(work)
            elif work.sink.held is not None:
                work.sink.held.moves += 1
                works.append(work.sink.held)
        self.flight.clear()
        self.inflight = 0
        for work in works:
            work.fence = b""
        return works

    def running(self) -> bool:
        """The first line without a reply is a call: that one may have run."""
        return bool(self.flight) and self.flight[0].tool is not OURS and not self.flight[0].fence

    def working(self) -> bool:
        """It has calls, not only lines of our own."""
        return any(work.tool is not OURS or isinstance(work.sink, Permit) for work in self.flight)
