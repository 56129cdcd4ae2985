"""Calls over sockets: so many at once (closed loop), or when they are due (open loop).

One thread, one epoll. Calls that are begun together share a time stamp and a write, so that the client costs little of
what it measures. Replies to lines without `id` keep their order, so they are matched by counting.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterator

from broker.bench.model import FOREVER, LATE_NS, TICK_NS, Lost, Plan, Round, Tally, Tick, clock
from broker.bench.timer import undisturbed
from broker.bench.wire import Connection, connect, head_of
from broker.client.request import request_line

READ = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
WRITE = select.EPOLLOUT

Reasons = dict[int, tuple[str, str]]  # which of the replies are no successes: their codes and words


class Unix:
    """The callers' socket of a broker, or of somebody who pretends to be one."""

    def __init__(self, path: str, name: str = "socket") -> None:
        self._path = path
        self.name = name

    def measure(self, plan: Plan, tally: Tally, tick: Tick) -> None:
        line = request_line(plan.tool, plan.input)
        run(
            plan,
            tally,
            tick,
            lambda index: Connection(connect(self._path), line, index),
            _Open if plan.rate else Closed,
        )

    def close(self) -> None:
        """A connection lives as long as its case."""


def run(plan: Plan, tally: Tally, tick: Tick, join: Callable[[int], Connection], loop: type[Load]) -> None:
    """One case; `join` makes its connections."""
    with contextlib.ExitStack() as stack:
        epoll = stack.enter_context(select.epoll())  # first: select takes descriptors below 1024 only
        connections: list[Connection] = []
        for index in range(plan.connections):
            connections.append(join(index))
            stack.callback(connections[-1].close)
        stack.enter_context(undisturbed())
        loop(plan, tally, tick, connections, epoll).run()


class Load:
    """What both loops share: waiting, reading, rounds, and the end."""

    def __init__(
        self, plan: Plan, tally: Tally, tick: Tick, connections: list[Connection], epoll: select.epoll
    ) -> None:
        self.plan = plan
        self.tally = tally
        self.connections = connections
        self._tick = tick
        self._epoll = epoll
        self._by_fd = {one.socket.fileno(): one for one in connections}
        self._head = b""
        self.born = clock()
        self.begin = self.born + int(plan.warmup * 1e9)  # what was due before that does not count
        self.end = self.begin + int(plan.seconds * 1e9)
        self.round = Round(0.0)  # the warm-up's is thrown away
        self._turns = [self.begin + int(n * plan.seconds / plan.rounds * 1e9) for n in range(plan.rounds + 1)]
        self._turned = self.born
        self._cpu = 0.0
        self.stopped = False  # nothing is begun any more

    def start(self, now: int) -> int:
        """Begins what is due; says when to come again."""
        raise NotImplementedError

    def answered(self, connection: Connection, count: int, failed: Reasons | None, now: int) -> None:
        raise NotImplementedError

    def waiting_since(self) -> Iterator[int]:
        """When each call that has no answer was due."""
        raise NotImplementedError

    def run(self) -> None:
        try:
            for fd in self._by_fd:
                self._epoll.register(fd, READ)
            self._loop()
        except Lost as lost:
            self.tally.fail("unavailable", str(lost), sum(one.started - one.answered for one in self.connections))
            raise
        finally:
            if not self.stopped:  # lost, or interrupted
                self._finish_round(clock())
        now = clock()
        for since in self.waiting_since():
            if since >= self.begin:
                self.tally.unanswered += 1
                self.round.latency.record(now - since)

    def _loop(self) -> None:
        tick = self.born + TICK_NS
        deadline = self.end + int(self.plan.grace * 1e9)
        due = self.start(clock())
        while True:
            for fd, what in self._wait(min(due, tick, self._turns[0])):
                connection = self._by_fd[fd]
                if what & READ:
                    self._read(connection)
                if what & WRITE:
                    self.send(connection, 0)
            now = clock()
            if now >= self._turns[0]:
                self._turn(now)
            if self.stopped:
                if now >= deadline or all(one.answered == one.started for one in self.connections):
                    return
            else:
                due = self.start(now)
            if now >= tick:
                tick = now + TICK_NS
                self._tick(self.round.answered)

    def _wait(self, until: int) -> list[tuple[int, int]]:
        """epoll counts in milliseconds. select does not, and an epoll can be selected."""
        seconds = (until - clock()) / 1e9
        if seconds <= 0:
            return self._epoll.poll(0)
        if self.plan.rate and seconds < 0.05:
            select.select([self._epoll], [], [], seconds)
            return self._epoll.poll(0)
        return self._epoll.poll(seconds)

    def send(self, connection: Connection, calls: int) -> None:
        was = connection.blocked
        connection.begin(calls)
        if connection.blocked is not was:
            self._epoll.modify(connection.socket.fileno(), READ | WRITE if connection.blocked else READ)

    def _read(self, connection: Connection) -> None:
        data = connection.receive()
        now = clock()
        count, lines = connection.replies(data, self._head) if data else (0, None)
        if count:
            self.round.answered += count
            self.answered(connection, count, None if lines is None else self._failed(connection, lines), now)

    def _failed(self, connection: Connection, lines: list[bytes]) -> Reasons | None:
        """Looks at those that do not begin as successes do; the first success shows how that is."""
        found: Reasons = {}
        for number, line in enumerate(lines):
            if not (self._head and line.startswith(self._head)):
                reason = connection.reason(line)
                if reason is not None:
                    found[number] = reason
                elif not self._head:
                    self._head = head_of(line)
        return found or None

    def _finish_round(self, now: int) -> None:
        self.round.seconds = (now - self._turned) / 1e9
        self._turned = now
        if self._cpu:
            self.tally.cpu_seconds += time.thread_time() - self._cpu
            self.tally.cpu_calls += self.round.answered

    def _turn(self, now: int) -> None:
        """The next round, or the end."""
        self._finish_round(now)
        self._turns.pop(0)
        if self._turns:
            self._cpu = time.thread_time()
            self.round = Round(0.0)
            self.tally.rounds.append(self.round)
        else:  # what is still answered has a latency, and is no throughput
            self.stopped = True
            self._turns = [FOREVER]
            self.round = Round(0.0, 0, self.round.latency)


class Closed(Load):
    """A reply makes room for the next call."""

    def start(self, now: int) -> int:  # noqa: ARG002
        for one in self.connections:
            if not one.started:
                self._begin(one, self.plan.depth)
        return FOREVER

    def _begin(self, connection: Connection, calls: int) -> None:
        connection.runs.append((clock(), calls))
        self.send(connection, calls)

    def answered(self, connection: Connection, count: int, failed: Reasons | None, now: int) -> None:
        runs = connection.runs
        at = 0
        while at < count:
            since, calls = runs.popleft()
            if calls > count - at:
                runs.appendleft((since, calls - (count - at)))
                calls = count - at
            if since >= self.begin:
                if failed is None:
                    self.round.latency.record(now - since, calls)
                else:
                    for number in range(at, at + calls):
                        if number in failed:
                            self.tally.fail(*failed[number])
                        else:
                            self.round.latency.record(now - since)
            at += calls
        self.make_room(connection, count)

    def make_room(self, connection: Connection, calls: int) -> None:
        if not self.stopped:
            self._begin(connection, calls)

    def waiting_since(self) -> Iterator[int]:
        for one in self.connections:
            for since, calls in one.runs:
                yield from (since for _ in range(calls))


class _Open(Load):
    """Call n is due n / rate seconds after the start, on connection n modulo their number."""

    _started = 0

    def _due(self, connection: Connection, number: int) -> int:
        """The n-th call of this connection."""
        return self.born + int((number * self.plan.connections + connection.index) * 1e9 / self.plan.rate)

    def start(self, now: int) -> int:
        many = self.plan.connections
        upto = int((min(now, self.end - 1) - self.born) * self.plan.rate / 1e9) + 1
        fresh = upto - self._started
        if 0 < fresh < many:
            for number in range(self._started, upto):
                self.send(self.connections[number % many], 1)
        elif fresh > 0:
            for one in self.connections:  # call n goes to connection n modulo their number
                self.send(one, (upto - one.index + many - 1) // many - one.started)
        self._started = upto
        return self.born + int(upto * 1e9 / self.plan.rate)

    def send(self, connection: Connection, calls: int) -> None:
        before = connection.written()
        super().send(connection, calls)
        now = clock()
        for number in range(before, connection.written()):
            due = self._due(connection, number)
            if now - due <= LATE_NS:
                break
            self.tally.late += due >= self.begin

    def answered(self, connection: Connection, count: int, failed: Reasons | None, now: int) -> None:
        first = connection.answered - count
        for number in range(count):
            due = self._due(connection, first + number)
            if due >= self.begin:
                if failed is not None and number in failed:
                    self.tally.fail(*failed[number])
                else:
                    self.round.latency.record(now - due)

    def waiting_since(self) -> Iterator[int]:
        for one in self.connections:
            yield from (self._due(one, number) for number in range(one.answered, one.started))
