"""Cache, leases and breaker against simple models, with a clock that the tests move."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.policy import breaker as breakers
from broker.policy.breaker import TRANSITIONS, Breaker, Event, Settings, State
from broker.policy.idempotency import Cache, key_of, new_entry
from broker.policy.leases import Leases, TooMany, fingerprint, tier_of

TTL = 10.0
LINE = b'{"id":1,"ok":true,"status":"OK","output_json":"%d","error":""}\n'


class Keys(RuleBasedStateMachine):
    """At most one execution a key within the TTL, unless the entry had to make room."""

    def __init__(self):
        super().__init__()
        self.cache = Cache(TTL, 4, 4000)
        self.now = 0.0
        self.running = {}  # key → (entry, waiters)
        self.done = {}  # key → (result, until)
        self.executions = 0

    @rule(name=st.sampled_from("abcdefgh"))
    def call(self, name):
        key = key_of("uid:0", "T", name)
        entry = self.cache.find(key, self.now)
        if key in self.running:
            assert entry is self.running[key][0], "a call under way is never forgotten"
            self.running[key][1].append(object())
            entry.waiting.append(self.running[key][1][-1])
        elif entry is not None:
            result, until = self.done[key]
            assert self.now < until
            assert b'"output_json":"%d"' % result in entry.hit(b"7\n")
            assert entry.hit(b"7\n").startswith(b'{"id":7,"ok":true,')
            assert entry.hit(None).endswith(b'"idempotent_hit":true,"ds_state":{}}\n')
        else:
            entry = new_entry(key)
            self.cache.begin(entry)
            self.running[key] = (entry, [])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size=st.integers(0, 1500))
    def answer(self, data, size):
        key = data.draw(st.sampled_from(list(self.running)))
        entry, waiters = self.running.pop(key)
        self.executions += 1
        line = LINE % self.executions + b" " * size
        self.cache.finish(entry, line, self.now)
        assert entry.waiting == waiters
        self.done[key] = (self.executions, self.now + TTL)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def refuse(self, data):
        key = data.draw(st.sampled_from(list(self.running)))
        entry, waiters = self.running.pop(key)
        self.cache.free(entry)
        assert entry.waiting == waiters
        assert self.cache.find(key, self.now) is None

    @rule(seconds=st.floats(0, TTL))
    def wait(self, seconds):
        self.now += seconds
        self.cache.expire(self.now)

    @invariant()
    def bounded(self):
        assert len(self.cache) <= 4 + len(self.running)
        assert 0 <= self.cache.size <= 4000


class Permissions(RuleBasedStateMachine):
    """A token opens at most once, only what it names, only while it lives."""

    def __init__(self):
        super().__init__()
        self.leases = Leases(most=6)
        self.now = 0.0
        self.known = {}  # token → [tool, tier, until, free]
        self.reserved = []
        self.used = 0

    @rule(tool=st.sampled_from(["A", "B", "*"]), tier=st.integers(0, 3), seconds=st.none() | st.floats(-5, 1000))
    def issue(self, tool, tier, seconds):
        try:
            lease = self.leases.issue(tool, tier, seconds, "op", self.now)
        except TooMany:
            alive = sum(free and until > self.now for *_, until, free in self.known.values())
            assert alive + len(self.reserved) >= 6
            return
        life = lease.expires - self.now
        assert 1 - 1e-6 <= life <= 300 + 1e-6
        assert life == pytest.approx(10) if seconds is None else True
        self.known[lease.token] = [tool, tier, lease.expires, True]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), tool=st.sampled_from(["A", "B"]), tier=st.integers(1, 3))
    def present(self, data, tool, tier):
        token = data.draw(st.sampled_from(list(self.known)))
        named, allowed, until, free = self.known[token]
        lease = self.leases.reserve(token, tool, tier, self.now)
        opens = free and self.now < until and named in (tool, "*") and tier <= allowed
        assert isinstance(lease, str) is not opens, lease
        if opens:
            self.known[token][3] = False
            self.reserved.append(lease)

    @precondition(lambda self: self.reserved)
    @rule(how=st.sampled_from(["ran", "never handed over", "its toolhost died before"]))
    def settle(self, how):
        lease = self.reserved.pop()
        if how != "never handed over":
            self.leases.use(lease)
            assert self.leases.revoke(lease.token, self.now) is None, "it is beyond recall"
        if how == "ran":
            self.used += 1
        else:
            self.leases.give_back(lease)
            self.known[lease.token][3] = not lease.revoked

    @precondition(lambda self: self.known)
    @rule(data=st.data(), by_name=st.booleans())
    def revoke(self, data, by_name):
        token = data.draw(st.sampled_from(list(self.known)))
        tool, tier, until, free = self.known[token]
        waits = any(lease.token == token and not lease.revoked for lease in self.reserved)
        lease = self.leases.revoke(token if by_name else fingerprint(token), self.now)
        if lease is None:
            assert not ((free or waits) and until > self.now)
        else:
            assert free or waits
            self.known[token] = [tool, tier, until, False]
            assert self.leases.doubt(lease, 0)

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.now += seconds
        self.leases.gc(self.now)

    @invariant()
    def counted(self):
        assert self.leases.gc(self.now).consumed == self.used


class Trips(RuleBasedStateMachine):
    """Open lets nothing pass but one probe at a time; what counts is what the toolhost did."""

    SETTINGS = Settings(open_seconds=30, most_seconds=300, jitter=0.0)

    def __init__(self):
        super().__init__()
        self.breaker = Breaker(self.SETTINGS)
        self.now = 0.0
        self.row = 0
        self.pauses = 0
        self.opened = 0.0
        self.probe = 0

    @precondition(lambda self: self.breaker.state is State.CLOSED)
    @rule(ok=st.booleans())
    def outcome(self, ok):
        if ok:
            self.breaker.succeeded(1, self.now)
            self.row = 0
            return
        self.row += 1
        tripped = self.breaker.failed("x", self.now)
        assert tripped == (self.breaker.state is State.OPEN)
        assert tripped or self.row < 5
        if tripped:
            self.opened, self.pauses = self.now, 1

    @precondition(lambda self: self.breaker.state is State.OPEN)
    @rule(seconds=st.floats(0, 400))
    def knock(self, seconds):
        self.now += seconds
        due = self.opened + min(300, 30 * 2 ** (self.pauses - 1))
        passed = self.breaker.may_probe(self.now)
        assert bool(passed) == (self.now >= due)
        self.probe = passed or self.probe
        assert not passed or not self.breaker.may_probe(self.now), "one probe at a time"

    @precondition(lambda self: self.breaker.state is State.PROBING)
    @rule(how=st.sampled_from(["passed", "failed", "lost"]))
    def probe_ends(self, how):
        if how == "passed":
            self.breaker.probe_passed(self.probe)
            assert self.breaker.state is State.CLOSED
            self.row = self.pauses = 0
        elif how == "failed":
            self.breaker.probe_failed(self.probe, "x", self.now)
            self.pauses += 1
            self.opened = self.now
            assert self.breaker.state is State.OPEN
        else:
            self.breaker.probe_lost(self.probe)
            self.probe = self.breaker.may_probe(self.now)
            assert self.probe, "the next call may try at once"

    @precondition(lambda self: self.breaker.state is State.PROBING and self.probe > 1)
    @rule(how=st.sampled_from(["passed", "failed", "lost"]))
    def an_old_probe_ends(self, how):
        old = self.probe - 1
        if how == "passed":
            self.breaker.probe_passed(old)
        elif how == "failed":
            self.breaker.probe_failed(old, "x", self.now)
        else:
            self.breaker.probe_lost(old)
        assert self.breaker.state is State.PROBING, "it has nothing to say any more"

    @rule()
    def reset(self):
        self.breaker.reset()
        assert self.breaker.state is State.CLOSED
        self.row = self.pauses = 0

    @rule()
    def time_passes(self):
        self.now += 1.0


TestKeys, TestPermissions, TestTrips = Keys.TestCase, Permissions.TestCase, Trips.TestCase
for case in (TestKeys, TestPermissions, TestTrips):
    case.settings = settings(max_examples=120, deadline=None)


def test_every_transition_stands_in_the_table_and_nowhere_else():
    assert {state for state, _ in TRANSITIONS} == set(State)
    assert {event for _, event in TRANSITIONS} == set(Event)
    source = open(breakers.__file__).read()  # noqa: SIM115
    assert source.count("self.state =") == 2, "the initial state, and the table's"


def test_half_of_ten_within_the_window_trips_and_old_failures_are_forgotten():
    breaker = Breaker(Settings())
    for n in range(4):
        assert not breaker.failed("x", float(n))
        breaker.succeeded(1, float(n))
    breaker.succeeded(1, 5.0)
    assert breaker.failed("x", 6.0), "five of ten"
    breaker = Breaker(Settings())
    for _ in range(4):
        breaker.failed("x", 0.0)
    breaker.succeeded(1, 1.0)
    breaker.succeeded(5, 100.0)
    assert not breaker.failed("x", 100.0), "those of a minute ago do not count"


@pytest.mark.parametrize(
    ("aid", "side_effects", "tier"),
    [
        ("AID.GENESIS.COMPILE.v1", [], 3),
        ("AID.SHELL.EXEC.v1", ["none"], 2),
        ("AID.NET.HTTP_GET.v1", [], 2),
        ("AID.X.v1", ["subprocess"], 2),
        ("AID.X.v1", ["network_read"], 2),
        ("AID.X.v1", ["file_write"], 1),
        ("AID.X.v1", ["creates files"], 1),
        ("AID.MEMORY.APPEND.v1", ["none"], 1),
        ("AID.X.v1", ["none"], 0),
        ("AID.X.v1", [], 0),
    ],
)
def test_tiers(aid, side_effects, tier):
    assert tier_of(aid, side_effects) == tier


def test_a_fingerprint_does_not_tell_the_token():
    lease = Leases().issue("A", 1, None, "op", 0.0)
    assert lease.fingerprint == fingerprint(lease.token)
    assert lease.fingerprint not in lease.token
