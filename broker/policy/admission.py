"""Who is next: lanes by tool, and within a lane each caller in turn. Pure; the clock is an argument."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from itertools import islice

from broker.model import Caller, Tool, Work


class Lane:
    """The calls that wait for one tool. Callers take turns, so that one caller's flood costs another one turn."""

    __slots__ = ("_callers", "lines", "tool")

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self.lines = 0
        self._callers: OrderedDict[Hashable, deque[Work]] = OrderedDict()

    def push(self, work: Work) -> None:
        """At the end of its caller's row, but never behind one whose reply has to wait for this one's."""
        waiting = self._of(work)
        if work.moved and work.at >= 0:
            later = (i for i, other in enumerate(waiting) if work.at < other.at)
            waiting.insert(next(later, len(waiting)), work)
        else:
            waiting.append(work)
        self.lines += work.count

    def push_back(self, work: Work, *, next_turn: bool) -> None:
        """Work that was here before goes before the rest of its caller's, which may keep the next turn."""
        waiting = self._of(work)
        at = 0
        if work.at >= 0:
            earlier = (0 <= other.at < work.at for other in waiting)
            at = next((i for i, before in enumerate(earlier) if not before), len(waiting))
        waiting.insert(at, work)
        self.lines += work.count
        if next_turn:
            self._callers.move_to_end(_row(work.caller), last=False)

    def _of(self, work: Work) -> deque[Work]:
        key = _row(work.caller)
        waiting = self._callers.get(key)
        if waiting is None:
            waiting = self._callers[key] = deque()
        return waiting

    def pop(self, room: int, soon: int = 0) -> Work | None:
        """At most `room` calls of the caller whose turn it is; that caller then goes to the end of the row.

        None where every caller that waits has yet to read the replies that it already has, or to wait for its ticket.
        """
        ready = (item for item in self._callers.items() if _may_go(item[1], max(room, soon)))
        key, waiting = next(ready, (None, None))
        if waiting is None:
            return None
        work = waiting[0]
        if work.count > room:
            work = work.take(room)
        else:
            waiting.popleft()
        if waiting:
            self._callers.move_to_end(key)
        else:
            del self._callers[key]
        self.lines -= work.count
        return work

    def oldest(self) -> float:
        """Since when the caller that is next has been waiting."""
        return next(iter(self._callers.values()))[0].queued

    def remove(self, caller: Caller) -> list[Work]:
        """All that one caller has waiting."""
        key = _row(caller)
        waiting = self._callers.get(key, ())
        gone = [work for work in waiting if work.caller is caller]
        if len(gone) < len(waiting):
            self._callers[key] = deque(work for work in waiting if work.caller is not caller)
        else:
            self._callers.pop(key, None)
        self.lines -= sum(work.count for work in gone)
        return gone

    def overdue(self, before: float) -> Iterator[Work]:
        """Takes out what has been waiting since before `before`. What came back stands in front, and is younger."""
        for key in list(self._callers):
            waiting = self._callers[key]
            back = []
            while waiting and (waiting[0].moved or waiting[0].queued < before):
                work = waiting.popleft()
                if work.queued < before:
                    self.lines -= work.count
                    yield work
                else:
                    back.append(work)
            waiting.extendleft(reversed(back))
            if not waiting:
                del self._callers[key]

    def clear(self) -> list[Work]:
        everything = [work for waiting in self._callers.values() for work in waiting]
        self._callers.clear()
        self.lines = 0
        return everything


def _may_go(waiting: deque[Work], soon: int) -> bool:
    """What may have its turn soon, but is not ready yet, had better begin to be."""
    first = waiting[0]
    if first.caller.full(first):
        return False
    if is_ready(first):
        return True
    for work in islice(waiting, 1, soon):
        is_ready(work)
    return False


def is_settled(work: Work) -> bool:
    """Its ticket asks for nothing before it runs."""
    return work.ticket is None or work.ticket.settled


def is_ready(work: Work) -> bool:
    return work.ticket is None or work.ticket.ready()


def _row(caller: Caller) -> Hashable:
    """Those who take turns as one stand in one row."""
    return caller if caller.turns is None else caller.turns


class Queue:
    """All lanes of one pool. Only lanes with waiting calls are in it."""

    __slots__ = ("_lanes",)

    def __init__(self) -> None:
        self._lanes: OrderedDict[int, Lane] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes.values()))

    @property
    def lines(self) -> int:
        return sum(lane.lines for lane in self._lanes.values())

    def waits(self, tool: Tool) -> bool:
        """Somebody is already waiting for this tool: whoever comes now stands behind."""
        return tool.index in self._lanes

    def push(self, work: Work, now: float, *, front: bool = False) -> None:
        if not work.queued:
            work.queued = now
        lane = self._lanes.get(work.tool.index)
        if lane is None:
            lane = self._lanes[work.tool.index] = Lane(work.tool)
        work.tool.stats.waits = True
        if front:
            lane.push_back(work, next_turn=True)
        else:
            lane.push(work)

    def turn(self, lane: Lane) -> None:
        """The lane has had its turn: the others come first next time. An empty lane leaves."""
        if not lane.lines:
            self._drop(lane)
        else:
            self._lanes.move_to_end(lane.tool.index)

    def _drop(self, lane: Lane) -> None:
        self._lanes.pop(lane.tool.index, None)
        lane.tool.stats.waits = False

    def remove(self, caller: Caller) -> list[Work]:
        gone: list[Work] = []
        for lane in self:
            gone += lane.remove(caller)
            if not lane.lines:
                self._drop(lane)
        return gone

    def overdue(self, before: float) -> list[Work]:
        late: list[Work] = []
        for lane in self:
            late += lane.overdue(before)
            if not lane.lines:
                self._drop(lane)
        return late

    def clear(self) -> list[Work]:
        everything = []
        for lane in self:
            everything += lane.clear()
            self._drop(lane)
        return everything
