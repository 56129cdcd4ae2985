"""Who is next, against a simple model: nothing is lost, nothing is doubled, callers take turns."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.model import Tool, ToolInfo, Work
from broker.policy.admission import Queue
from broker.policy.breaker import Breaker, Settings


class Someone:
    turns = None

    def __init__(self, name: str) -> None:
        self.principal = name
        self.stuffed = False

    def gone(self) -> bool:
        return False

    def full(self, work) -> bool:  # noqa: ARG002
        return self.stuffed


CALLERS = [Someone("a"), Someone("b"), Someone("c")]
TOOLS = [Tool(index, ToolInfo(f"AID.T{index}.v1"), None, 1.0, Breaker(Settings())) for index in range(2)]


def work(tool, caller, first, count):
    lines = b"".join(b"%d\n" % n for n in range(first, first + count))
    return Work(tool, lines, count, None, caller, None, 1.0)


def numbers(piece):
    return [int(n) for n in piece.lines.split()]


class Waiting(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        for caller in CALLERS:
            caller.stuffed = False
        self.queue = Queue()
        self.model: dict[tuple[int, Someone], deque[int]] = {}
        self.born: dict[int, float] = {}
        self.next = 0
        self.now = 1.0

    @rule(tool=st.sampled_from(TOOLS), caller=st.sampled_from(CALLERS), count=st.integers(1, 5))
    def arrive(self, tool, caller, count):
        self.queue.push(work(tool, caller, self.next, count), self.now)
        self.model.setdefault((tool.index, caller), deque()).extend(range(self.next, self.next + count))
        self.born.update(dict.fromkeys(range(self.next, self.next + count), self.now))
        self.next += count
        self.now += 1.0

    @precondition(lambda self: self.queue)
    @rule(data=st.data(), room=st.integers(1, 4), refuse=st.booleans())
    def hand_over(self, data, room, refuse):
        lane = data.draw(st.sampled_from(list(self.queue)))
        piece = lane.pop(room)
        if piece is None:
            assert all(c.stuffed for (t, c), waiting in self.model.items() if t == lane.tool.index and waiting)
            return
        assert not piece.caller.stuffed
        assert piece.count <= room
        if refuse:
            lane.push_back(piece, next_turn=True)
        else:
            waiting = self.model[lane.tool.index, piece.caller]
            assert numbers(piece) == [waiting.popleft() for _ in range(piece.count)]
            self.queue.turn(lane)

    @precondition(lambda self: self.queue)
    @rule(data=st.data(), room=st.integers(1, 4))
    def come_back(self, data, room):
        """Handed over, and back in front because its toolhost died: it starts to wait anew."""
        lane = data.draw(st.sampled_from(list(self.queue)))
        piece = lane.pop(room)
        if piece is None:
            return
        self.queue.turn(lane)
        piece.queued, piece.moved = 0.0, True
        self.queue.push(piece, self.now, front=True)
        self.born.update(dict.fromkeys(numbers(piece), self.now))
        self.now += 1.0

    @rule(caller=st.sampled_from(CALLERS))
    def hang_up(self, caller):
        gone = {n for piece in self.queue.remove(caller) for n in numbers(piece)}
        assert gone == {n for (_, c), waiting in self.model.items() if c is caller for n in waiting}
        self.model = {key: waiting for key, waiting in self.model.items() if key[1] is not caller}

    @rule(age=st.floats(0, 10))
    def time_out(self, age):
        late = {n for piece in self.queue.overdue(self.now - age) for n in numbers(piece)}
        expected = {n for waiting in self.model.values() for n in waiting if self.born[n] < self.now - age}
        assert late == expected
        self.model = {k: deque(n for n in w if n not in late) for k, w in self.model.items()}

    @rule(caller=st.sampled_from(CALLERS), stuffed=st.booleans())
    def read_or_not(self, caller, stuffed):
        caller.stuffed = stuffed

    @invariant()
    def nothing_is_lost(self):
        assert self.queue.lines == sum(map(len, self.model.values()))
        assert bool(self.queue) == bool(self.queue.lines)


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=150, deadline=None)


def test_a_flood_costs_another_caller_one_turn():
    queue = Queue()
    queue.push(work(TOOLS[0], Someone("a"), 0, 1000), 1.0)
    queue.push(work(TOOLS[0], Someone("b"), 5000, 1), 2.0)
    lane = next(iter(queue))
    turns = [lane.pop(10) for _ in range(3)]
    assert [piece.caller.principal for piece in turns] == ["a", "b", "a"]


def test_work_that_is_split_keeps_its_lines_its_ids_and_its_place():
    whole = Work(TOOLS[0], b"a\nb\nc\nd\n", 4, None, CALLERS[0], None, 1.0)
    whole.at = 7
    first = whole.take(3)
    assert (first.lines, first.ids, first.count, first.at) == (b"a\nb\nc\n", None, 3, 7)
    assert (whole.lines, whole.ids, whole.count, whole.at) == (b"d\n", None, 1, 10)

    whole = Work(TOOLS[0], b"a\nb\n", 2, b'"x"\nnull\n', CALLERS[0], None, 1.0)
    first = whole.take(1)
    assert (first.lines, first.ids, first.at) == (b"a\n", b'"x"\n', -1)
    assert (whole.lines, whole.ids, whole.at) == (b"b\n", b"null\n", -1)


def test_a_tool_is_known_to_wait_while_calls_of_it_do():
    queue, caller = Queue(), Someone("a")
    queue.push(work(TOOLS[0], caller, 0, 2), 1.0)
    assert TOOLS[0].stats.waits
    lane = next(iter(queue))
    lane.pop(2)
    queue.turn(lane)
    assert not TOOLS[0].stats.waits
    for empty in (lambda: queue.remove(caller), queue.clear, lambda: queue.overdue(9.0)):
        queue.push(work(TOOLS[0], caller, 0, 2), 1.0)
        assert TOOLS[0].stats.waits
        empty()
        assert not TOOLS[0].stats.waits
