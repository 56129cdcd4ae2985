"""One toolhost: its process, its conversation on the board, its last words, and its end."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from broker import errors
from broker._native import ffi, lib
from broker.errors import Refusal
from broker.model import NEWCOMER_CALLS, NOBODY, Tool, Work
from broker.pool import verdicts
from broker.pool.asides import OURS, Aside, Fence, Permit, asks_for_a_lease, with_token
from broker.pool.rules import STARTUP_SECONDS

if TYPE_CHECKING:
    from broker.pool.pool import Pool
    from broker.pool.process import Process

QUIET_SECONDS = 0.005  # instead of a fence, where the toolhost cannot say which line it answers
GRACE_SECONDS = 2.0  # between the end of its input and SIGKILL

TOOL, VALUE, ABOUT, DATA, DATA_LEN = lib.TB_R_TOOL, lib.TB_R_VALUE, lib.TB_R_ABOUT, lib.TB_R_DATA, lib.TB_R_DATA_LEN
NANOSECONDS = lib.TB_R_AT  # of a reply
REPLY, FREE, REST = lib.TB_ROW_REPLY, lib.TB_ROW_FREE, lib.TB_ROW_REST
WRONG = (lib.TB_ROW_JUNK, lib.TB_ROW_OVERSIZE, lib.TB_ROW_SWALLOWED, lib.TB_ROW_STRANGER)


class Host:
    """A toolhost process while it lives. The pool's lists say in which state it is; this is what it is doing.

    Lines and replies pass on the board (`line`). The works of calls whose reply somebody has to look at, and of our own
    lines, are here.
    """

    __slots__ = (
        "asked_to_leave",
        "blamed",
        "born",
        "condemned",
        "core",
        "expires",
        "line",
        "lived",
        "max_calls",
        "number",
        "pool",
        "process",
        "rss",
        "stderr",
        "stop_reason",
        "works",
    )

    def __init__(self, pool: Pool, process: Process, now: float) -> None:
        self.pool = pool
        self.core = pool.core
        self.process = process
        self.works: dict[int, Work] = {}
        self.asked_to_leave = False
        self.blamed = False  # a tool has to answer for its end, not its start
        self.condemned = ""  # what it did against the protocol
        self.lived = False  # it has answered at least once
        self.born = now
        self.expires = 0.0
        self.max_calls = 0
        self.stderr = b""
        self.stop_reason = ""
        self.rss = 0  # bytes, when it came alive
        self.number = self.core.name()
        self.line = lib.tb_host_new(self.core.board, self.number, process.stdin, process.stdout)
        if self.line == ffi.NULL:
            raise MemoryError
        self.core.peers[self.number] = self
        self.core.loop.add_reader(process.stderr, self._on_stderr)
        self.core.loop.add_reader(process.pidfd, self._on_exit)
        self._ask(Fence(STARTUP_SECONDS, OURS, self._alive))

    # --- work in ----------------------------------------------------------------------------------------------------

    def send(self, work: Work, lines: bytes | None = None) -> None:
        """Hands a call over, behind a fence if the one before was another caller's. A plain run is the board's from
        now on; what somebody has lent something to, or wants to look at, comes back to us. So does what is run again:
        the board does not count how often."""
        if work.ticket is not None:
            work.ticket.handed_over()
        passes = (work.ticket is None or work.entries is not None) and not (work.moves or self.line.alone)
        self._put(work, lines or work.lines, work.caller.number, work.caller.line if passes else None)

    def send_alone(self, work: Work) -> None:
        """One call with a toolhost to itself."""
        self.line.alone = True
        if self.pool.asks_leases and work.tool.tier:
            self._ask(Permit(work, STARTUP_SECONDS, self._permitted))
        else:
            self.send(work)

    def _ask(self, aside: Aside) -> None:
        self._put(aside.work, aside.work.lines, 0, None)

    def _put(self, work: Work, lines: bytes, who: int, caller: Any) -> None:
        run = ffi.new("tb_run *")
        run.who = who
        run.tool = work.tool.index
        run.suspect = work.suspect.index
        run.at = work.at
        run.count = work.count
        run.timeout = work.timeout
        text = ffi.from_buffer(lines)
        run.lines, run.len = text, len(lines)
        if work.ids is not None:
            ids = ffi.from_buffer(work.ids)
            run.ids, run.ids_len = ids, len(work.ids)
        if caller is not None:
            run.caller = caller
            if work.entries is not None:
                entries = ffi.new("tb_entry *[]", work.entries)
                run.entries = entries  # the board's, and its to settle, from now on
        else:
            run.work = self.core.name()
            self.works[run.work] = work
        if lib.tb_host_send(self.core.board, self.line, run):
            raise MemoryError

    # --- what the board has for us ----------------------------------------------------------------------------------

    def row(self, row: list[int], data: Any) -> None:
        what = row[0]
        if what == REPLY:
            self._reply(row, data)
        elif what == FREE:
            if not self.line.alone:
                self.pool.host_free(self)
        elif what == REST:
            self._rest()
        elif what == lib.TB_ROW_COUNT:
            tool = self._tool(row[TOOL])
            self.core.policy.answered(tool, row[lib.TB_R_COUNT], row[VALUE], time.monotonic())
        elif what == lib.TB_ROW_KEPT:
            self.core.policy.kept(row[VALUE])
        elif what in WRONG:
            self._wrong(what, self._tool(row[TOOL]), row, data)
        elif self.stop_reason:  # it is dying as it is; whatever it says until then is taken
            if what == lib.TB_ROW_LATE:
                lib.tb_host_resume(self.core.board, self.line)
        elif what == lib.TB_ROW_CLOSED:
            self.die("closed its output")
        elif what == lib.TB_ROW_UNREADABLE:
            self.die(f"its output cannot be read: {os.strerror(row[VALUE])}")
        elif what == lib.TB_ROW_BROKEN:
            self.die("stopped reading its input")
        elif what == lib.TB_ROW_UNASKED:
            self.pool.violation(self, self._tool(row[TOOL]), verdicts.MORE_THAN_ASKED)
        elif what == lib.TB_ROW_LATE:
            self.pool.late(self)

    def _tool(self, index: int) -> Tool:
        return OURS if index < 0 else self.core.tools[index]

    def _reply(self, row: list[int], data: Any) -> None:
        """Of a call that somebody has to look at, or of a line of our own."""
        work = self.works.pop(row[VALUE])
        line: bytes = ffi.buffer(data + row[DATA], row[DATA_LEN])[:]
        succeeded = row[ABOUT]
        if not succeeded and self._wants_lease(work, line):
            return
        if work.tool is not OURS:
            tool = work.tool
            tool.took(work.caller.face, row[NANOSECONDS] * 1e-9)
            if succeeded and work.ticket is None:  # the policy is told of it when something else happens
                tool.untold += 1
                tool.used = time.monotonic()
            else:
                self.core.policy.answered(tool, 1, succeeded, time.monotonic())
        work.sink.deliver(work, line, 1)

    def _rest(self) -> None:
        """It was alone with a call, and has answered it: newcomers are followed by a fence."""
        if self.line.runs or self.stop_reason or not self.line.alone:
            return
        tool = self._tool(self.line.last_tool)
        if tool.clean >= NEWCOMER_CALLS and self.pool.settings.pipeline:
            self._open()
        elif self.line.quotes:
            self._ask(Fence(STARTUP_SECONDS, tool, self._proved))
        else:
            self.core.loop.call_later(QUIET_SECONDS, self._quiet, tool)

    def _open(self) -> None:
        self.line.alone = False
        self.pool.host_free(self)

    def _wrong(self, what: int, tool: Tool, row: list[int], data: Any) -> None:
        """It does not keep to the protocol, perhaps with its last words."""
        pool = self.pool
        if what == lib.TB_ROW_STRANGER:
            if row[VALUE] == 1:
                pool.babbled(self, tool)
            else:
                pool.violation(self, tool, "said far more than it was asked")
        elif what == lib.TB_ROW_JUNK:
            pool.violation(self, tool, verdicts.junk(ffi.buffer(data + row[DATA], row[DATA_LEN])[:]))
        elif what == lib.TB_ROW_SWALLOWED:
            self._swallowed(tool)
        elif what == lib.TB_ROW_OVERSIZE:
            if self.running():
                call = self._first_call()
                pool.failed(call, verdicts.oversize(call.tool.name, pool.limits.reply_bytes))
                lib.tb_host_resume(self.core.board, self.line)
            else:
                pool.violation(self, tool, "answered a line that no tool answers with far too much")

    # --- what our own lines have shown ------------------------------------------------------------------------------

    def _alive(self, fence: Fence, quoted: bool) -> None:  # noqa: ARG002
        """The first sign of life; from now on we know whether its refusals name the line that they answer."""
        self.line.quotes = quoted
        self._open()

    def _proved(self, fence: Fence, quoted: bool) -> None:
        """A newcomer had it to itself, and said what it had to say, no more."""
        if not quoted:
            self.pool.violation(self, fence.work.suspect, verdicts.MORE_THAN_ONCE)
            return
        fence.work.suspect.trust(fence.work.suspect.clean + 1)
        self.line.last = 0
        self._open()

    def _quiet(self, tool: Tool) -> None:
        if self.stop_reason:
            return
        tool.trust(tool.clean + 1)
        self._open()
        self.core.flush()

    def _permitted(self, call: Work, token: str, error: str) -> None:
        if token:
            self.send(call, with_token(call.lines, token))
        else:
            call.sink.refuse(call, verdicts.no_lease(call.tool.name, error))
            self._open()

    def _wants_lease(self, work: Work, line: bytes) -> bool:
        """The first call of a tool above tier 0 learns whether the toolhost enforces leases: then it gets one."""
        pool = self.pool
        if not self.line.alone or pool.asks_leases or not work.tool.tier or not asks_for_a_lease(line):
            return False
        pool.asks_for_leases()
        self.send_alone(work)
        return True

    def _swallowed(self, tool: Tool) -> None:
        """A fence's reply came as a call's: calls before it have none, and those behind it may have run."""
        what = "left a request without an answer"
        refusal = Refusal(errors.BAD_REPLY, f"its toolhost {what}; the call may have run")
        for lost in self.abandon():
            lost.sink.refuse(lost, refusal)
        self.pool.violation(self, tool, what)

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
            self.core.loop.remove_reader(self.process.stderr)

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
        lib.tb_host_deafen(self.core.board, self.line)
        self.process.close_stdin()
        self.core.loop.call_later(GRACE_SECONDS, self.process.kill)

    def _on_exit(self) -> None:
        process = self.process
        if not process.reap():
            return
        if not self.stop_reason:
            self.stop_reason = process.how_it_ended()
            self.pool.host_leaves(self)
        self._read_dry()
        self._on_stderr()
        for fd in (process.stderr, process.pidfd):
            self.core.loop.remove_reader(fd)
        self.pool.host_dead(self)
        self.core.peers.pop(self.number, None)
        lib.tb_host_free(self.core.board, self.line)
        process.close()
        self.core.flush()

    def _read_dry(self) -> None:
        """What it had said before it died counts."""
        while lib.tb_host_read(self.core.board, self.line):
            self.core.flush()
        self.core.flush()

    def abandon(self) -> list[Work]:
        """All calls that it has, given up: nothing that it says matters any more. `running()` says, before, whether the
        first one may have run."""
        works = []
        for i in range(self.line.runs):
            work = self._work(self._run(i))
            if not isinstance(work.sink, Aside):
                works.append(work)
            elif work.sink.held is not None:
                work.sink.held.moves += 1
                works.append(work.sink.held)
        lib.tb_host_forget(self.line)
        lib.tb_host_mute(self.core.board, self.line)
        return works

    def _first_call(self) -> Work:
        """Takes the first call in flight out."""
        run = self._run(0)
        run.count = 1
        run.len = lib.tb_skip_lines(run.lines, run.len, 1)
        run.ids_len = lib.tb_skip_lines(run.ids, run.ids_len, 1) if run.ids_len else 0
        work = self._work(run)
        lib.tb_host_take(self.line, 1)
        return work

    def _run(self, i: int) -> Any:
        run = ffi.new("tb_run *")
        lib.tb_host_peek(self.line, i, run)
        return run

    def _work(self, run: Any) -> Work:
        """What is under way, as something that can be given to another toolhost."""
        if run.work:
            return self.works.pop(run.work)
        caller: Any = self.core.peers.get(run.who, NOBODY)
        lines = ffi.buffer(run.lines, run.len)[:]
        ids = ffi.buffer(run.ids, run.ids_len)[:] if run.ids != ffi.NULL else None
        work = Work(self.core.tools[run.tool], lines, run.count, ids, caller, caller, run.timeout)
        work.at = run.at
        if run.entries != ffi.NULL:
            work.entries = list(run.entries[0 : run.count])
            for entry in work.entries:
                lib.tb_entry_hold(entry)
            self.core.policy.keyed(work)
        return work

    def may_have_run(self) -> int:
        """Of a dead one that broke the protocol: so many of its calls may have run. It went on with what it had until
        it was killed: each line that it has said since the one at fault is somebody's, and one more had begun."""
        left = lib.tb_host_lines(self.core.board, self.line) + 2  # and the line at fault
        calls = 0
        for i in range(self.line.runs):
            run = self._run(i)
            left -= run.fenced
            if left <= 0:
                break
            calls += min(run.count, left) if run.tool >= 0 else 0
            left -= run.count
        return calls

    def first_tool(self) -> Tool:
        """Whose line is the first under way."""
        return self._tool(self._run(0).tool)

    def running(self) -> bool:
        """The first line without a reply is a call: that one may have run."""
        if not self.line.runs:
            return False
        first = self._run(0)
        return first.tool >= 0 and not first.fenced

    def tools(self) -> set[int]:
        """Of all that it has under way, or may be blamed for."""
        runs = [self._run(i) for i in range(self.line.runs)]
        return {self.line.last_tool, *(run.tool for run in runs), *(run.suspect for run in runs)}

    def working(self) -> bool:
        """It has calls, not only lines of our own."""
        return self.line.working > 0 or any(isinstance(work.sink, Permit) for work in self.works.values())
