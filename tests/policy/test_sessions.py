"""Whose state is whose, without a broker around it."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.policy import sessions
from broker.policy.sessions import BadState, Session, Sessions, WaitingRoom

slots = st.dictionaries(st.integers(0, 255).map(str), st.builds(lambda n: {"v": n}, st.integers()), max_size=5)


def decoded(state):
    return {key: json.loads(bytes(value)) for key, value in state.items()}


@given(
    st.lists(st.tuples(st.booleans(), slots, st.lists(st.integers(0, 255), max_size=4)), max_size=8),
)
def test_full_states_replace_and_deltas_build(steps):
    kept, model = {}, {}
    for delta, changed, removed in steps:
        raw = json.dumps({"delta": delta, "slots": changed, "removed_slots": removed}).encode()
        kept = sessions.applied(kept, sessions.read(raw))
        model = {k: v for k, v in {**model, **changed}.items() if int(k) not in removed} if delta else dict(changed)
        assert decoded(kept) == model
        assert json.loads(b"{" + sessions.written(kept) + b"}") == {"ds_state": {"slots": model}}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"delta":1}',
        b'{"delta":"true"}',
        b'{"delta":null}',
        b'{"slots":[]}',
        b'{"slots":{"-1":{}}}',
        b'{"slots":{"256":{}}}',
        b'{"slots":{"01":{}}}',
        b'{"slots":{"6x":{}}}',
        b'{"slots":{"\xd9\xa1":{}}}',
        b'{"slots":{"1":5}}',
        b'{"removed_slots":["1"]}',
    ],
)
def test_a_state_that_a_toolhost_might_read_otherwise_is_refused(raw):
    with pytest.raises(BadState, match="ds_state"):
        sessions.read(raw)


def test_a_reply_that_reports_no_state_changes_none():
    kept = sessions.read(b'{"slots":{"1":{"v":1}}}').slots
    for line in (b'{"ok":true}', b'{"ds_state":{}}', b'{"ds_state":5}', b'{"ds_state":{"slots":{}}}'):
        assert sessions.after_reply(kept, line) == kept
    line = b'{"ds_state":{"delta":true,"slots":{"2":{"v":2}},"removed_slots":[1]}}'
    assert decoded(sessions.after_reply(kept, line)) == {"2": {"v": 2}}


def test_sessions_are_bounded_in_number_bytes_and_idle_time_and_a_busy_one_stays():
    some = Sessions(3, 1000, 10.0)
    first = some.get("first", 0.0)
    first.holder = object()
    for n in range(5):
        some.get(n, 1.0)
    assert len(some) == 3
    assert some.get("first", 2.0) is first
    heavy = some.get("heavy", 3.0)
    some.keep(heavy, sessions.read(b'{"slots":{"1":{"v":"' + b"x" * 980 + b'"}}}').slots, 3.0)
    some.keep(some.get("other", 4.0), sessions.read(b'{"slots":{"1":{"v":"' + b"x" * 500 + b'"}}}').slots, 4.0)
    assert some.size <= 1000
    assert some.get("heavy", 5.0) is not heavy
    first.holder = None
    some.expire(100.0)
    assert len(some) == 0
    assert some.size == 0


def test_thousands_of_sessions_in_use_cost_no_more_each_and_leave_when_they_are_free():
    some = Sessions(100, 1_000_000, 1000.0)
    begun = time.process_time()
    busy = []
    for n in range(10_000):
        session = some.get(n, 1.0)
        session.holder = object()
        busy.append(session)
    assert time.process_time() - begun < 2.0
    assert len(some) == 10_000
    for session in busy:
        session.holder = None
    some.get("one more", 2.0)
    assert len(some) == 100


class Someone:
    def __init__(self, caller, since, weight):
        self.caller, self.since, self.weight = caller, since, weight


class Rows(RuleBasedStateMachine):
    """The waiting room against a list a session: nobody is lost, nobody overtakes, the sums are right."""

    def __init__(self):
        super().__init__()
        self.room = WaitingRoom(30.0, "its session")
        self.sessions = [Session(), Session()]
        self.model = [[], []]
        self.now = 0.0

    def everybody(self):
        return [one for row in self.model for one in row]

    @rule(row=st.integers(0, 1), caller=st.sampled_from("abc"), weight=st.integers(1, 100))
    def enter(self, row, caller, weight):
        self.now += 1.0
        one = Someone(caller, self.now, weight)
        self.room.enter(one, self.sessions[row])
        self.model[row].append(one)

    @rule(row=st.integers(0, 1))
    def take_turns(self, row):
        if self.model[row]:
            assert self.room.next_of(self.sessions[row]) is self.model[row].pop(0)

    @rule(caller=st.sampled_from("abc"))
    def hang_up(self, caller):
        leaving = self.room.of(caller)
        assert set(leaving) == {one for one in self.everybody() if one.caller == caller}
        self.room.leave(leaving)
        self.model = [[one for one in row if one.caller != caller] for row in self.model]

    @precondition(lambda self: self.everybody())
    @rule(data=st.data(), caller=st.sampled_from("abc"))
    def hand_on(self, data, caller):
        self.now += 1.0
        one = data.draw(st.sampled_from(self.everybody()))
        session = self.room.step_out(one)
        one.caller, one.since = caller, self.now
        self.room.step_in(one, session)

    @rule(age=st.floats(0, 10))
    def time_out(self, age):
        late = self.room.overdue(self.now - age)
        assert set(late) == {one for one in self.everybody() if one.since < self.now - age}
        self.room.leave(late)
        self.model = [[one for one in row if one not in late] for row in self.model]

    @invariant()
    def nobody_is_lost(self):
        assert [list(session.waiting) for session in self.sessions] == self.model
        assert self.room.calls == len(self.everybody()) == len(self.room.everybody())
        assert self.room.size == sum(one.weight for one in self.everybody())


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=150, deadline=None)
