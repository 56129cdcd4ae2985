"""Everything at once, and the auditor's verdict: faults, kills, reloads, replaced plugins, cut and stalled callers."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.load import FAULTS, Caller, Load
from tests.support.proxy import FaultProxy, Trouble


@pytest.fixture
def load(tmp_path, where):
    return Load(tmp_path, where, seed=7)


def test_half_a_minute_of_mixed_load_with_random_faults_breaks_no_promise(load):
    """`make soak` is the same for ten minutes, or as long as you like."""
    figures = load.run(30, 12, lambda _: None)
    assert not load.auditor.complaints, "\n".join(load.auditor.complaints)
    answers = figures["answers"]
    assert answers["ok"] > 1000
    assert answers["hits"] > 50
    assert set(figures["faults"]) == set(FAULTS), "each fault was there"
    assert {"crash", "timeout", "bad_reply", "reply_too_large", "breaker_open", "lease_rejected"} <= set(answers)
    assert figures["chaos"]["kills"] > 3
    assert figures["proxy"]["splits"] > 3


def test_sigterm_under_load_answers_everybody_once_and_leaves_nothing(load):
    people = [Caller(load, f"c{n}", load.broker.path, ordered=n % 2 == 0, seed=n) for n in range(8)]
    load.may_cut = lambda _: load.over.is_set()  # the broker ends them itself
    for person in people:
        person.start()
    time.sleep(2)
    load.over.set()
    load.broker.process.send_signal(signal.SIGTERM)
    for person in people:
        person.join(30)
        assert not person.is_alive()
    load._brokers.end()
    books = load.auditor.close()
    assert not load.auditor.complaints, "\n".join(load.auditor.complaints)
    assert books["answers"]["ok"] > 100


@pytest.mark.parametrize(
    "trouble",
    [Trouble(split=1.0), Trouble(delay=1.0, most=0.005), Trouble(stall=0.3, most=0.02), Trouble(cut=0.05)],
    ids=["split", "delayed", "stalled", "cut"],
)
def test_a_bad_line_to_the_broker_changes_no_answer(load, tmp_path, trouble):
    with FaultProxy(tmp_path / "p.sock", load.broker.path, trouble) as proxy:
        people = [Caller(load, f"c{n}", proxy.path, ordered=n % 2 == 0, seed=n) for n in range(4)]
        for person in people:
            person.start()
        time.sleep(2)
        load.over.set()
        for person in people:
            person.join(30)
            assert not person.is_alive()
    assert sum(proxy.counts.values()) > proxy.counts["connections"], "something was done to them"
    load._brokers.end()
    books = load.auditor.close()
    assert not load.auditor.complaints, "\n".join(load.auditor.complaints)
    assert books["answers"]["ok"] > 20
