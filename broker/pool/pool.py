"""The toolhosts of one plugin: who gets a call, how many there are, and what becomes of calls when one dies.

A toolhost's state is the collection that it is in: `starting`, `ready` or `leaving`.
"""

from __future__ import annotations

import asyncio
import fnmatch
import random
import time

from broker import errors
from broker._native import ffi, lib
from broker.errors import Refusal
from broker.model import HUNG_UP, Caller, Judge, Tool, Work
from broker.observe.log import Log
from broker.policy.admission import Lane, Queue, is_settled
from broker.policy.starts import Starts
from broker.pool import placing, process, verdicts
from broker.pool.asides import OURS
from broker.pool.core import Core
from broker.pool.host import Host
from broker.pool.process import Process, Spawner, SpawnError, Spec
from broker.pool.rules import CPUS, JITTER, PATIENCE_SECONDS, PROBATION, SETTLED_SECONDS
from broker.settings import Limits, Toolhost

IDLE_ENOUGH = 0.15  # of the machine
RERUNS = 3


class Pool:
    def __init__(self, name: str, settings: Toolhost, limits: Limits, core: Core, spawner: Spawner, log: Log) -> None:
        self.name = name
        self.settings = settings
        self.limits = limits
        self.core = core
        self.log = log
        self._spawner = spawner
        self._spec: Spec | None = None
        self.generation = 0
        self.starting: set[Host] = set()
        self.ready: list[Host] = []
        self.leaving: set[Host] = set()
        self.spawning = 0  # asked of the spawner, no process yet
        self.queue = Queue()
        self.board = ffi.gc(ffi.new("tb_pool *"), lib.tb_pool_clear)  # what the board knows of it
        self.tools: list[Tool] = []  # whose plain calls the board may hand over by itself
        self._patience: asyncio.TimerHandle | None = None
        self.asks_leases = False  # its toolhosts enforce leases on their own
        self.held = False  # calls wait while the plugin is being replaced
        self.closed: Refusal | None = None  # no new work; what it is told
        self.starts = Starts()
        self._reserved: Host | None = None
        self.counts = {"crash": 0, "timeout": 0, "violation": 0, "started": 0, "recycled": 0, "moved": 0}
        self.last_reason = ""

    # --- size -------------------------------------------------------------------------------------------------------

    def attach(self, tools: list[Tool]) -> None:
        """Plain calls of these are the board's to hand over, while nothing stands against it."""
        self.tools = tools
        for tool in tools:
            tool.stats.pool = self.board if self.settings.pipeline else ffi.NULL
            tool.stats.guarded = self.asks_leases and tool.tier > 0

    def asks_for_leases(self) -> None:
        """Its toolhosts enforce leases on their own."""
        self.asks_leases = True
        self.log.info("toolhost enforces leases, the broker gets them", pool=self.name)
        self.attach(self.tools)

    def hold(self, held: bool) -> None:
        """Calls wait while the plugin is being replaced."""
        self.held = held
        self._gate()

    def _gate(self) -> None:
        """Tells the board whether plain calls may pass, and whether we want to know when there is room."""
        self.board.open = not self.held and self.closed is None and not self.starts.broken
        self.board.wants = bool(self.queue) or self.starts.failures > 0

    @property
    def reserved(self) -> Host | None:
        """Kept free of new work until a slow call can have it."""
        return self._reserved

    @reserved.setter
    def reserved(self, host: Host | None) -> None:
        if self._reserved is not None:
            self._reserved.line.reserved = False
        if host is not None:
            host.line.reserved = True
        self._reserved = host

    def _enter(self, host: Host) -> None:
        """It is ready."""
        self.starting.discard(host)
        self.ready.append(host)
        if lib.tb_pool_add(self.board, host.line):
            raise MemoryError

    def _exit(self, host: Host) -> None:
        """It is given no more calls."""
        self.starting.discard(host)
        if host in self.ready:
            self.ready.remove(host)
            lib.tb_pool_remove(self.board, host.line)
        self.leaving.add(host)
        if self.reserved is host:
            self.reserved = None

    @property
    def size(self) -> int:
        return len(self.ready) + len(self.starting) + self.spawning

    def use(self, spec: Spec) -> None:
        """From now on toolhosts are started like this; those of before finish what they have and leave."""
        self._spec = spec
        self.generation += 1
        self.starts = Starts()
        self.hold(False)
        for host in [*self.ready, *self.starting]:
            self.retire(host, "plugin replaced")
        self.fill()
        self.pump()

    def fill(self) -> None:
        """Up to the minimum: started ahead of the calls."""
        while self.size < self.settings.min and self._start():
            pass

    def _start(self) -> bool:
        now = time.monotonic()
        if self._spec is None or self.closed is not None or now < self.starts.retry_at:
            return False
        if self.size >= self.settings.max:
            return False
        if self.core.processes >= self.limits.processes:
            if not self.size:
                self.core.make_room()
            return False
        if self.starts.failures and (self.starting or self.spawning):
            return False  # one at a time, until one has done well
        self.spawning += 1
        self.core.processes += 1
        generation = self.generation
        loop = self.core.loop
        self._spawner.start(self._spec, lambda result: loop.call_soon_threadsafe(self._started, result, generation))
        return True

    def _started(self, result: Process | SpawnError, generation: int) -> None:
        self.spawning -= 1
        now = time.monotonic()
        if isinstance(result, SpawnError):
            self.core.processes -= 1
            self._start_failed(str(result), now)
        else:
            self.counts["started"] += 1
            host = Host(self, result, now)
            host.expires = now + self.settings.lifetime_seconds * random.uniform(1 - JITTER, 1 + JITTER)
            host.max_calls = round(self.settings.max_calls * random.uniform(1 - JITTER, 1 + JITTER))
            host.line.max_calls = host.max_calls
            host.line.pool = self.board
            self.starting.add(host)
            if self.closed is not None or generation != self.generation:
                self.retire(host, "not needed any more")
        self.core.flush()

    def _start_failed(self, reason: str, now: float) -> None:
        wait = self.starts.failed(reason, now)
        self.last_reason = reason
        self.log.warning("toolhost did not start", pool=self.name, reason=reason, tries=self.starts.failures)
        self.core.policy.noted(self.name, verdicts.DID_NOT_START, reason)
        refusal = self.starts.refusal(self.name, now)
        self._gate()
        if refusal is not None and not self.ready:
            for work in self._clear_queue():
                work.sink.refuse(work, refusal)
        elif self.closed is None:
            self.core.loop.call_later(wait, self._again)

    def _again(self) -> None:
        if self.closed is None:
            self.fill()
            self._grow()

    def retire(self, host: Host, reason: str) -> None:
        """No new calls; it leaves when it has answered what it has."""
        self._exit(host)
        host.line.tell = True
        host.lived = True  # whatever comes, it is not a start that failed
        if not host.working():
            host.abandon()
            host.finish(reason)

    # --- work in ----------------------------------------------------------------------------------------------------

    def submit(self, work: Work, now: float) -> None:
        self._gate()
        if self.closed is not None:
            self.core.policy.rehome(work, self.closed)
        elif not self.held and (refusal := self.starts.refusal(self.name, now)) is not None:
            work.sink.refuse(work, refusal)
        elif self.held or work.tool.paused or self.queue.waits(work.tool) or not is_settled(work):
            self._enqueue(work, now)
            self.pump()  # those in front may be waiting for something else than room
        elif not self._place(work):
            self._enqueue(work, now)
            self._grow()

    def _enqueue(self, work: Work, now: float, *, front: bool = False) -> None:
        self.core.queued_bytes += work.weight()
        self.queue.push(work, now, front=front)
        self.board.wants = True

    def _place(self, work: Work) -> bool:
        """Hands over as much as there is room for; True if that was all of it."""
        tool = work.tool
        if self._runs_alone(tool):
            return self._place_alone(work)
        while True:
            host, room = self._room(tool, work.caller.number)
            if host is None:
                self._replace_foreign(work.caller)
                return False
            if room >= work.count:
                host.send(work)
                return True
            host.send(work.take(room))

    def _room(self, tool: Tool, who: int) -> tuple[Host | None, int]:
        """The least busy toolhost that this caller (0: anybody) can be put into, and how many calls it has room for."""
        line = lib.tb_pool_pick(self.board, who)
        room = lib.tb_room(line, tool.stats) if line != ffi.NULL else 0
        return (self.core.peers[line.name] if room else None), room  # type: ignore[return-value]

    def _runs_alone(self, tool: Tool) -> bool:
        return placing.runs_alone(tool, self.settings) or (self.asks_leases and tool.tier > 0)

    def _place_alone(self, work: Work) -> bool:
        """A slow call, or a newcomer's, gets an idle toolhost to itself; the slow leave one, if there are two."""
        while (host := placing.idle_for(work.tool, self.ready, self.settings.max)) is not None:
            if placing.foreign(host, work.caller):
                self._replace_foreign(work.caller)
                continue
            if host is self.reserved:
                self.reserved = None
            if work.count == 1:
                host.send_alone(work)
                return True
            host.send_alone(work.take(1))
        return False

    def _replace_foreign(self, caller: Caller) -> None:
        """A toolhost that cannot be fenced serves one caller: the next one gets another process."""
        for host in self.ready:
            if not host.line.runs and placing.foreign(host, caller):
                self.retire(host, "served another caller, and cannot be fenced")
                self.fill()
                return

    def pump(self) -> None:
        """Gives waiting calls what room there is, each tool and each caller in turn."""
        if self.held or not self.queue:
            return
        for lane in self._going():
            before = lane.lines
            while lane.lines and self._pump_lane(lane):
                pass
            if lane.lines < before:
                self.queue.turn(lane)
        if self.queue:
            self._grow()
        elif self.reserved is not None:
            self.reserved = None

    def _going(self) -> list[Lane]:
        """Those that wait for nothing but room."""
        return [lane for lane in self.queue if not lane.tool.paused]

    def _pump_lane(self, lane: Lane) -> bool:
        """One turn of one caller; False when there is no room for this tool."""
        tool = lane.tool
        if self._runs_alone(tool):
            room = int(placing.idle_for(tool, self.ready, self.settings.max) is not None)
        else:
            room = self._room(tool, 0)[1]
        if not room:
            return False
        work = lane.pop(room)
        if work is None:
            return False
        size, count = work.weight(), work.count
        if self._place(work):
            self.core.queued_bytes -= size
            return True
        self.core.queued_bytes -= size - work.weight()
        lane.push_back(work, next_turn=work.count == count)
        return False

    def _grow(self) -> None:
        """More processes, once calls have waited long enough; until then, room is made among those there are."""
        waiting = self._going()
        if not waiting:
            self.reserved = None
            return
        if not self.size:
            self._start()
        if self._patience is None:
            self._patience = self.core.loop.call_later(PATIENCE_SECONDS, self._out_of_patience)
        slow = [lane.tool for lane in waiting if self._runs_alone(lane.tool)]
        if not any(placing.may_be_alone(tool, self.ready, self.settings.max) for tool in slow):
            self.reserved = None
        elif self.reserved is None:
            busy = [host for host in self.ready if not host.line.alone]
            self.reserved = min(busy, key=lambda host: int(host.line.inflight), default=None)

    def _out_of_patience(self) -> None:
        """Calls that wait for something else than a processor get a process each; a busy machine gets none."""
        self._patience = None
        before = time.monotonic() - PATIENCE_SECONDS
        slow = fast = 0
        for lane in self._going():
            if lane.oldest() > before:
                continue
            if self._runs_alone(lane.tool):
                slow += lane.lines
            else:
                fast = 1
        coming = len(self.starting) + self.spawning
        while coming < slow and self._worth_it() and self._start():
            coming += 1
        if fast and not coming and self.size < CPUS:
            self._start()
        if self.queue and self.closed is None:
            self._grow()

    def _worth_it(self) -> bool:
        """More processes than processors help calls that wait for something else, not a machine that is busy."""
        return self.size < CPUS or self.core.idle() > IDLE_ENOUGH

    # --- what hosts report ------------------------------------------------------------------------------------------

    def host_free(self, host: Host) -> None:
        """It has room: it has come alive, or answered something."""
        if host in self.starting:
            self._enter(host)
            host.lived = True
            host.rss = process.resident(host.process.pid)
        elif host in self.leaving:
            if not host.line.runs:
                host.finish("replaced")
            return
        else:
            self.starts.succeeded()
            if self.settings.max_calls and host.line.calls >= host.max_calls:
                self.recycle(host, "call count")
        self.pump()
        self._gate()

    def recycle(self, host: Host, reason: str) -> None:
        self.counts["recycled"] += 1
        self.log.info("toolhost recycled", pool=self.name, pid=host.process.pid, reason=reason, calls=host.line.calls)
        self.retire(host, reason)
        self.fill()

    def spare(self) -> bool:
        """Gives up an idle process that it does not have to keep, for a pool that has none."""
        idle = (host for host in self.ready if not host.line.runs and not host.line.alone)
        host = next(idle, None) if len(self.ready) > self.settings.min else None
        if host is not None:
            self.retire(host, "its place is needed elsewhere")
        return host is not None

    def host_leaves(self, host: Host) -> None:
        """It is dying: nobody may be given to it."""
        self._exit(host)

    def host_dead(self, host: Host) -> None:
        """It is dead and its pipe is dry: the first call without a reply may have run, those behind it have not."""
        self.leaving.discard(host)
        self.core.processes -= 1
        now = time.monotonic()
        if host.condemned:
            self._bury(host, now)
        running, works = host.running(), host.abandon()
        short = host.line.calls <= 0 and now - host.born < SETTLED_SECONDS and not (host.asked_to_leave or host.blamed)
        if not works and (not host.lived or short) and self.closed is None:
            self._start_failed(host.obituary(), now)
        elif works:
            self.counts["crash"] += 1
            self.last_reason = host.obituary()
            self.log.warning("toolhost died", pool=self.name, pid=host.process.pid, reason=self.last_reason)
            self._lose(works, running, verdicts.crash(works[0].tool.name, self.last_reason), now)
        if self.closed is None:
            self.fill()
            self.pump()

    def _lose(self, works: list[Work], running: bool, refusal: Refusal, now: float) -> None:
        """The running call ends here, unless the configuration says that it is safe to run again; the others move."""
        lost = None
        if running:
            lost = _next_of(works)
            if refusal.kind is not errors.TIMEOUT and self._may_rerun(lost):
                lost.moves += 1
                works.insert(0, lost)
                lost = None
        for work in reversed(works):
            self._move(work, now)
        if lost is not None:  # last: if this opens its breaker, those that have just moved are refused with the rest
            self.failed(lost, refusal)

    def _move(self, work: Work, now: float) -> None:
        """Back to the front of the queue: its toolhost died before it came to this."""
        if work.caller.gone():
            work.sink.refuse(work, HUNG_UP)
            return
        if work.moves > RERUNS:
            self.failed(work, Refusal(errors.UNAVAILABLE, f"{work.tool.name}: {self.last_reason}, again and again"))
            return
        work.queued = 0.0
        work.moved = True
        if self.closed is not None:
            self.core.policy.rehome(work, self.closed)
            return
        refusal = self.core.policy.judge(work)  # it may have been handed over before its tool was replaced
        if refusal is not None:
            work.sink.refuse(work, refusal)
            return
        self.counts["moved"] += work.count
        self._enqueue(work, now, front=True)

    def _may_rerun(self, work: Work) -> bool:
        """The configuration says that it is safe, and no promise of at most once stands against it."""
        if work.moves >= RERUNS or (work.ticket is not None and work.ticket.once):
            return False
        return any(fnmatch.fnmatchcase(work.tool.name, pattern) for pattern in self.settings.rerun)

    def failed(self, call: Work, refusal: Refusal) -> None:
        """A call that its toolhost did not answer as it should have."""
        tool = call.tool
        tool.calls += 1
        tool.failed += 1
        self.core.policy.failed(tool, refusal.kind, refusal.text, time.monotonic())
        call.sink.refuse(call, refusal)

    def late(self, host: Host) -> None:
        """The first call has had its time. The toolhost is dead to us at once: a late reply reaches nobody."""
        now = time.monotonic()
        running, works = host.running(), host.abandon()
        if not running:
            host.die("did not answer in time after it was started" if host in self.starting else "stopped answering")
            for work in reversed(works):
                self._move(work, now)
            return
        tool, seconds = works[0].tool, works[0].timeout
        self.counts["timeout"] += 1
        self.last_reason = f"{tool.name} ran into its timeout of {seconds:g} s"
        self.log.warning("call timed out", pool=self.name, aid=tool.name, pid=host.process.pid, seconds=seconds)
        host.blamed = True
        host.die("timeout")
        self._lose(works, True, verdicts.timeout(tool.name, seconds), now)
        self.fill()
        self.pump()

    def violation(self, host: Host, tool: Tool, what: str) -> None:
        """It broke the protocol: what it says next could be anybody's. It is killed; when it is dead we know what it
        can have run, and the rest moves."""
        self._distrust(host, tool, what, count=not host.running() and tool is not OURS)
        host.condemned = what
        host.die(what)
        self.fill()

    def _bury(self, host: Host, now: float) -> None:
        """Whatever a toolhost that broke the protocol may have run is answered, not run again."""
        running, lost = host.running(), host.may_have_run()
        works = host.abandon()
        if not works:
            return
        refusal = verdicts.bad_reply(works[0].tool.name, host.condemned)
        beside = Refusal(errors.BAD_REPLY, f"its toolhost {host.condemned}, before this call; it may have run")
        first = [_next_of(works)] if running else []
        for _ in range(lost - running):
            call = _next_of(works)
            call.sink.refuse(call, beside)
        self._lose(first + works, running, refusal, now)

    def babbled(self, host: Host, tool: Tool) -> None:
        """It said more than it was asked, in front of a fence: nobody got what is not his. It finishes, and leaves."""
        self._distrust(host, tool, verdicts.MORE_THAN_ONCE, count=True)
        self.retire(host, verdicts.MORE_THAN_ONCE)
        self.fill()

    def _distrust(self, host: Host, tool: Tool, what: str, *, count: bool) -> None:
        """The tool is on probation; where no call ends badly for it, its breaker is told here."""
        self.counts["violation"] += 1
        host.blamed = tool is not OURS
        self.last_reason = f"its toolhost {what}"
        tool.trust(PROBATION)
        self.log.warning("protocol violation", pool=self.name, aid=tool.name, pid=host.process.pid, reason=what)
        if count:
            self.core.policy.failed(tool, errors.BAD_REPLY, self.last_reason, time.monotonic())

    # --- callers and time -------------------------------------------------------------------------------------------

    def forget(self, caller: Caller) -> None:
        """The caller has hung up: what it had waiting is dropped."""
        for work in self.queue.remove(caller):
            self.core.queued_bytes -= work.weight()
            work.sink.refuse(work, HUNG_UP)

    def revise(self, judge: Judge, index: int | None) -> None:
        """Asks about what waits; what may not run after all ends here."""
        for lane in self.queue:
            if index is not None and lane.tool.index != index:
                continue
            refused = []
            for work in lane.clear():
                refusal = judge(work)
                if refusal is None:
                    lane.push(work)
                else:
                    refused.append((work, refusal))
            if not lane.lines:
                self.queue.turn(lane)
            for work, refusal in refused:
                self.core.queued_bytes -= work.weight()
                work.sink.refuse(work, refusal)

    def expire(self, now: float) -> None:
        """The janitor's round: calls that waited too long, processes that are too old, idle or broken."""
        for work in self.queue.overdue(now - self.limits.queue_seconds):
            self.core.queued_bytes -= work.weight()
            refusal = verdicts.overloaded(work.tool, self.limits.queue_seconds)
            self.core.policy.noted(work.tool.name, refusal.kind.code, refusal.text)
            work.sink.refuse(work, refusal)
        for host in list(self.ready):
            if self.starts.failures and now - host.born > SETTLED_SECONDS:
                self.starts.succeeded()
            if now > host.expires:
                self.recycle(host, "lifetime")
            elif len(self.ready) > self.settings.min and self._idle(host, now):
                self.retire(host, "idle")
        self.fill()
        if self.queue:
            self._grow()
            self.pump()

    def _idle(self, host: Host, now: float) -> bool:
        seconds = self.settings.idle_seconds * random.uniform(1 - JITTER, 1 + JITTER)
        return not host.line.runs and now - host.line.mark > seconds

    def _clear_queue(self) -> list[Work]:
        waiting = self.queue.clear()
        self.core.queued_bytes -= sum(work.weight() for work in waiting)
        return waiting

    def close(self, refusal: Refusal) -> None:
        """Ends every process; whatever is still in flight gets this answer."""
        self.drain(refusal)
        for host in [*self.ready, *self.starting, *self.leaving]:
            for work in host.abandon():
                work.sink.refuse(work, refusal)
            host.die("broker is stopping")

    def drain(self, refusal: Refusal) -> None:
        """What waits goes elsewhere or is refused; idle toolhosts leave now, the others when they have answered."""
        self.closed = refusal
        self._gate()
        for work in self._clear_queue():
            self.core.policy.rehome(work, refusal)
        for host in [*self.ready, *self.starting]:
            self.retire(host, "broker is stopping")

    def uses(self) -> set[int]:
        """The tools that calls here are of, also of those that have been taken out."""
        waiting = {lane.tool.index for lane in self.queue}
        return waiting.union(*(host.tools() for host in [*self.ready, *self.starting, *self.leaving]))

    def busy(self) -> bool:
        return any(host.line.runs for host in [*self.ready, *self.leaving]) or bool(self.queue)

    def alive(self) -> bool:
        return bool(self.ready or self.starting or self.leaving or self.spawning)


def _next_of(works: list[Work]) -> Work:
    """The next call."""
    return works[0].take(1) if works[0].count > 1 else works.pop(0)
