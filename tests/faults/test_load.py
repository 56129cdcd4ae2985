"""Everything at once, and the auditor's verdict: faults, kills, reloads, replaced plugins, cut and stalled callers."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tests.support.config import toolhost
from tests.support.load import FAULTS, LEDGER, Caller, Load, build_ledger_plugin
from tests.support.proxy import FaultProxy, Trouble


@pytest.fixture
def load(tmp_path, where):
    return Load(tmp_path, where, seed=7)


def test_mixed_load_with_random_faults_breaks_no_promise(load):
    """`make soak` is the same for ten minutes, or as long as you like."""
    figures = load.run(15, 12, lambda _: None)
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


def test_under_load_one_probe_at_a_time_finds_out_and_everybody_else_is_answered_at_once(start, where, tmp_path):
    plugin, ledger = build_ledger_plugin(tmp_path, where["include"]), tmp_path / "ledger"
    broker = start(
        config="[breaker]\nopen_seconds = 0.5\n" + toolhost("l", str(plugin)) + f'env = {{ LEDGER = "{ledger}" }}\n'
    )
    answers, slowest = [], []
    until = time.monotonic() + 1.3

    def hammer():
        with broker.wire() as wire:
            while time.monotonic() < until:
                began = time.monotonic()
                reply = wire.ask({"aid": LEDGER, "input_json": "probe 100 die"})
                answers.append(reply["type"])
                if reply["type"] == "breaker_open":
                    slowest.append(time.monotonic() - began)

    threads = [threading.Thread(target=hammer) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runs = len(ledger.read_text().split())
    assert runs == answers.count("crash")
    opened = broker.status()["tools"][0]["breaker_trips"]
    assert 2 <= opened <= 3, "it opened, and a probe opened it again"
    assert runs <= 5 + 8 + (opened - 1), "five in a row, those that were running then, and the probes"
    assert answers.count("breaker_open") > 100
    assert sorted(slowest)[len(slowest) * 9 // 10] < 0.1, "at once, whatever the probe is doing"
