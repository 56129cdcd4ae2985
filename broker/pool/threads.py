"""A runtime whose calls are run by the threads that bring them: each has a toolhost to itself meanwhile."""

from __future__ import annotations

import os
import threading
import time

from broker import errors
from broker._native import ffi, lib
from broker.errors import Refusal
from broker.model import NEWCOMER_CALLS, Caller, Judge, Ticket, Tool, Work
from broker.policy.breaker import State
from broker.pool import verdicts
from broker.pool.asides import OURS, asks_for_a_lease, fence_line, fence_name, issue_line, issued, with_token
from broker.pool.fleet import Fleet, Shared
from broker.pool.process import Spec
from broker.pool.rules import PROBATION, STARTUP_SECONDS, this_thread
from broker.pool.talking import CHANGED, DONE, ENDED, GONE, INTERRUPTED, LATE, STOPPED, UNASKED, TalkingHost
from broker.runtimes.program import Program

PROOF_SECONDS = 0.05  # that a newcomer's caller waits for the fence behind it
say = lib.tb_talk_say

# Something has changed (the plugin, the breaker) before anything was sent: the gates are asked again.
AGAIN = Refusal(errors.UNAVAILABLE, "nothing was sent")


class Threads:
    """One program's tools."""

    def __init__(self, program: Program, spec: Spec, shared: Shared) -> None:
        self.source = program.source
        self.timeout = program.settings.timeout_seconds or program.limits.timeout_seconds
        self.fleet = Fleet(program, spec, shared)
        self._settings = program.settings
        self._limits = program.limits
        self._shared = shared
        self._lock = shared.lock
        self._log = shared.log
        self._asks_leases = False  # its toolhosts enforce leases on their own
        self._unusual = not program.settings.pipeline  # no call takes the short way

    def submit(self, work: Work, now: float) -> None:
        """The thread that brought the work runs it."""
        work.caller.run_here(work, now)  # type: ignore[attr-defined]

    def revise(self, judge: Judge, index: int | None = None) -> None:
        self.fleet.revise(judge, index)

    # --- a call -----------------------------------------------------------------------------------------------------

    def run_plain(self, tool: Tool, line: bytes, caller: Caller) -> bytes | Refusal:
        """A plain call. Where all is as usual (a known tool, an idle toolhost that was this thread's before, a reply
        that is no error), it takes the short way, without the lock."""
        fleet = self.fleet
        if tool.clean < NEWCOMER_CALLS or fleet.waiters or self._unusual:
            return self._run(tool, line, tool.timeout, caller, None)
        try:
            host = fleet.idle.pop()
        except IndexError:
            return self._run(tool, line, tool.timeout, caller, None)
        if (
            host.thread != this_thread()
            or host.generation != fleet.generation
            or tool.breaker.state is not State.CLOSED
        ):
            fleet.idle.append(host)
            return self._run(tool, line, tool.timeout, caller, None)
        host.owner = host.thread
        try:
            now = time.monotonic()
            verdict = say(host.talk, line, len(line), 1, b"", 0, tool.timeout)
            taken = host.taken
            if verdict != DONE or not taken.succeeded or now > fleet.next_look:
                return self._long_way(host, tool, line, verdict, now)
            reply: bytes = ffi.buffer(taken.data, taken.len)[:]
            host.calls += 1
            host.used = tool.used = now
            host.tool = tool
            tool.untold += 1
            host.owner = 0
            if fleet.waiters or host.calls == host.max_calls:
                fleet.give(host)
            else:
                fleet.idle.append(host)
            return reply
        except BaseException:
            self._interrupted(host)
            raise

    def _long_way(self, host: TalkingHost, tool: Tool, line: bytes, verdict: int, begin: float) -> bytes | Refusal:
        """The line has been said; what came of it is not as usual."""
        while verdict == INTERRUPTED:
            verdict = lib.tb_talk_wait(host.talk)
        outcome: bytes | Refusal | None
        if verdict == DONE:
            outcome = self._reply(host, tool, line, tool.timeout, begin)
        else:
            outcome = self._not_answered(host, tool, tool.timeout, verdict)
        return outcome if outcome is not None else AGAIN

    def _interrupted(self, host: TalkingHost) -> None:
        """It might still answer: it is not used again. If it has been given back before, it may be somebody else's."""
        if host.owner == this_thread():
            self.fleet.drop(host, "was given up: its caller was interrupted")

    def run(self, work: Work) -> bytes | Refusal:
        """The reply's line, or what went wrong. AGAIN: nothing was sent, and the tool may be another one now."""
        return self._run(work.tool, work.lines, work.timeout, work.caller, work.ticket)

    def _run(self, tool: Tool, line: bytes, seconds: float, caller: Caller, ticket: Ticket | None) -> bytes | Refusal:
        while True:
            host = self.fleet.take(tool, caller, ticket)
            if isinstance(host, Refusal):
                return host
            if ticket is None and tool.breaker.state is not State.CLOSED:  # it has opened meanwhile
                self.fleet.give(host)
                return AGAIN
            try:
                outcome = self._call(host, tool, line, seconds, ticket)
            except BaseException:
                self._interrupted(host)
                raise
            if outcome is not None:
                return outcome

    def _call(
        self, host: TalkingHost, tool: Tool, line: bytes, seconds: float, ticket: Ticket | None
    ) -> bytes | Refusal | None:
        """None: nothing was sent, another toolhost may do better."""
        if ticket is not None:
            with self._lock:
                ticket.handed_over()
        if self._asks_leases and tool.tier:
            permit = self._permit(host, tool)
            if not isinstance(permit, str):
                return permit
            verdict, begin = self._ask(host, with_token(line, permit), seconds)
        else:
            verdict, begin = self._ask(host, line, seconds)
        if verdict != DONE:
            return self._not_answered(host, tool, seconds, verdict)
        return self._reply(host, tool, line, seconds, begin)

    def _reply(
        self, host: TalkingHost, tool: Tool, line: bytes, seconds: float, begin: float
    ) -> bytes | Refusal | None:
        reply = host.reply()
        succeeded = host.taken.succeeded
        if not succeeded and tool.tier and not self._asks_leases and asks_for_a_lease(reply):
            self._asks_leases = self._unusual = True
            self._log.info("toolhost enforces leases, the broker gets them", pool=self.fleet.name)
            return self._call(host, tool, line, seconds, None)
        self._answered(host, tool, succeeded, begin)
        return reply

    def _ask(self, host: TalkingHost, line: bytes, seconds: float) -> tuple[int, float]:
        """Behind a fence, if the call before was another thread's."""
        fence = b""
        thread = this_thread()
        if host.thread != thread:
            if host.thread and host.quotes:
                fence = fence_name()
                line = fence_line(fence) + line
            host.thread = thread
        begin = time.monotonic()
        verdict = host.ask(line, seconds, fence)
        if host.strangers and host.generation >= 0:
            host.generation = -1  # it leaves after this
            self._distrust(host, host.tool, verdicts.MORE_THAN_ONCE)
        return verdict, begin

    def _answered(self, host: TalkingHost, tool: Tool, succeeded: int, begin: float) -> None:
        now = time.monotonic()
        host.used = now
        host.calls += 1
        host.tool = tool
        lib.tb_learn(tool.stats, now - begin)
        with self._lock:
            self._shared.policy.answered(tool, 1, succeeded, now)
        tool.used = now
        if tool.clean >= NEWCOMER_CALLS and self._settings.pipeline:
            self.fleet.give(host)
        elif not host.quotes:
            tool.trust(tool.clean + 1)
            self.fleet.give(host)
        else:
            self._prove(host, tool)

    def _prove(self, host: TalkingHost, tool: Tool) -> None:
        """A newcomer has said what it had to say, no more."""
        fence = fence_name()
        verdict = host.ask(fence_line(fence), PROOF_SECONDS)
        if verdict == LATE:  # its answer is there: nobody has to wait for this
            rest = lambda: self._proved(host, tool, fence, host.wait_on(STARTUP_SECONDS))  # noqa: E731
            threading.Thread(target=rest, name="broker-proof", daemon=True).start()
        else:
            self._proved(host, tool, fence, verdict)

    def _proved(self, host: TalkingHost, tool: Tool, fence: bytes, verdict: int) -> None:
        if verdict == DONE and fence in host.reply():
            tool.trust(tool.clean + 1)
            self.fleet.give(host)
        elif verdict in (DONE, UNASKED):
            self._violation(host, tool, verdicts.MORE_THAN_ONCE)
        else:
            self.fleet.died_idle(host)

    def _permit(self, host: TalkingHost, tool: Tool) -> str | Refusal | None:
        """A token of the toolhost's own."""
        verdict, _ = self._ask(host, issue_line(tool), STARTUP_SECONDS)
        if verdict == DONE:
            token, error = issued(host.reply())
            if token:
                return token
            self.fleet.give(host)
            return verdicts.no_lease(tool.name, error)
        if verdict in (CHANGED, GONE, UNASKED):
            return self._not_answered(host, tool, STARTUP_SECONDS, verdict)
        reason = self.fleet.end(host, "did not answer when it was asked for a lease")
        return self._lost(host, tool, verdicts.no_lease(tool.name, reason))

    def _not_answered(self, host: TalkingHost, tool: Tool, seconds: float, verdict: int) -> Refusal | None:
        if verdict == STOPPED:
            return self._stopped(host, tool)
        if verdict == LATE:
            self.fleet.counts["timeout"] += 1
            self.fleet.end(host, "ran into a timeout")
            return self._lost(host, tool, verdicts.timeout(tool.name, seconds))
        if verdict == CHANGED:
            self.fleet.changed(host)
            return AGAIN
        if verdict == UNASKED:
            self._violation(host, host.tool, verdicts.MORE_THAN_ASKED)
            return None
        if verdict == GONE:
            self.fleet.died_idle(host)
            return None
        self.fleet.counts["crash"] += 1
        reason = "closed its output" if verdict == ENDED else f"cannot be talked to: {os.strerror(-verdict)}"
        return self._lost(host, tool, verdicts.crash(tool.name, self.fleet.end(host, reason)))

    def _stopped(self, host: TalkingHost, tool: Tool) -> Refusal:
        stopped = host.taken.stopped
        if stopped == lib.TB_REPLY_OVERSIZE:
            self.fleet.give(host)
            return self._failed(tool, verdicts.oversize(tool.name, self._limits.reply_bytes))
        what = "said far more than it was asked" if stopped == lib.TB_REPLY_STRANGER else host.junk()
        self._distrust(host, tool, what, count=False)
        self.fleet.end(host, what)
        return self._lost(host, tool, verdicts.bad_reply(tool.name, what))

    def _lost(self, host: TalkingHost, tool: Tool, refusal: Refusal) -> Refusal:
        """The breaker is told before anybody can have the toolhost's place: what opens it stops the next call."""
        try:
            return self._failed(tool, refusal)
        finally:
            self.fleet.bury(host)

    def _failed(self, tool: Tool, refusal: Refusal) -> Refusal:
        with self._lock:
            tool.calls += 1
            tool.failed += 1
            self._shared.policy.failed(tool, refusal.kind, refusal.text, time.monotonic())
        return refusal

    def _violation(self, host: TalkingHost, tool: Tool, what: str) -> None:
        """It broke the protocol: what it says next could be anybody's."""
        self._distrust(host, tool, what)
        self.fleet.drop(host, what)

    def _distrust(self, host: TalkingHost, tool: Tool, what: str, *, count: bool = True) -> None:
        """The tool is on probation; where no call ends badly for it, its breaker is told here."""
        self.fleet.counts["violation"] += 1
        self.fleet.last_reason = f"its toolhost {what}"
        tool.trust(PROBATION)
        self._log.warning("protocol violation", pool=self.fleet.name, aid=tool.name, pid=host.process.pid, reason=what)
        if count and tool is not OURS:
            with self._lock:
                self._shared.policy.failed(tool, errors.BAD_REPLY, self.fleet.last_reason, time.monotonic())
