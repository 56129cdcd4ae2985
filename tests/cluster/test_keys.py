"""CONTRACT §5 across brokers: at most one execution a key, whoever is asked, and whoever dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Crowd, Trial, keyed
from tests.support.nats import NatsServer


@pytest.fixture
def crowd(tmp_path: Path, where: dict[str, str], nats: NatsServer) -> Iterator[Crowd]:
    brokers = Crowd(tmp_path / "brokers", where["include"], nats)
    yield brokers
    brokers.end()


def test_a_key_runs_once_and_every_broker_repeats_its_reply(crowd):
    one, other = crowd.start(), crowd.start()
    with one.wire() as here, other.wire() as there:
        first = here.ask(keyed("a"))
        assert first["ok"]
        assert "idempotent_hit" not in first
        again = there.ask(keyed("a"))
        assert again["idempotent_hit"] is True
        assert (again["status"], again["output_json"], again["ds_state"]) == ("OK", first["output_json"], {})
        here.send(keyed("b", 500))
        time.sleep(0.1)
        assert there.ask(keyed("b", 500))["idempotent_hit"] is True, "it waits for the one that runs elsewhere"
        assert "idempotent_hit" not in here.reply()
        # a hit needs no broker that ran it
        one.process.kill()
        assert there.ask(keyed("a"))["idempotent_hit"] is True
    assert crowd.runs() == {"a": 1, "b": 1}


def test_many_duplicates_at_once_on_three_brokers_are_one_execution(crowd):
    brokers = [crowd.start() for _ in range(3)]
    wires = [broker.wire() for broker in brokers]
    for wire in wires:
        wire.send(*[keyed(f"k{n % 10}", 20, id=n) for n in range(30)])
    replies = [reply for wire in wires for reply in wire.replies(30)]
    assert all(reply["ok"] for reply in replies)
    assert sum("idempotent_hit" not in reply for reply in replies) == 10
    assert crowd.runs() == {f"k{n}": 1 for n in range(10)}


def test_a_key_is_free_again_where_its_call_was_refused(crowd):
    one, other = crowd.start(config="[limits]\nqueue_seconds = 0.5", most=1), crowd.start()
    with one.wire() as busy, one.wire() as late, other.wire() as there:
        busy.send({"aid": "AID.TEST.LEDGER.v1", "input_json": "busy 1500 ok"})
        time.sleep(0.2)
        refused = late.ask(keyed("k"))
        assert refused["type"] == "overloaded"
        assert there.ask(keyed("k"))["ok"], "nobody has run it"
        assert busy.reply()["ok"]
    assert crowd.runs()["k"] == 1


def test_a_dead_brokers_key_is_taken_over_while_claimed_and_answered_for_once_started(crowd):
    one, other = crowd.start(most=1), crowd.start()
    with one.wire() as running, one.wire() as waiting, other.wire() as there:
        running.send(keyed("started", 60_000))
        one.eventually(lambda: crowd.runs()["started"] == 1)
        waiting.send(keyed("claimed"))
        time.sleep(0.5)
        one.process.kill()
        begun = time.monotonic()
        there.send(keyed("started", 60_000, id=1), keyed("claimed", id=2))
        replies = {reply["id"]: reply for reply in there.replies(2)}
        assert time.monotonic() - begun < 15
    assert replies[1]["type"] == "crash"
    assert "may have run" in replies[1]["error"]
    assert replies[1]["idempotent_hit"] is True
    assert replies[2]["ok"]
    assert crowd.runs() == {"started": 1, "claimed": 1}


def test_a_result_larger_than_a_message_of_nats_is_repeated_whole(crowd, where):
    config = f'[limits]\nreply_bytes = 4000000\n[[toolhost]]\nname = "demo"\nplugins = ["{where["demo_plugin"]}"]'
    one, other = crowd.start(config=config), crowd.start(config=config)
    call = {"aid": "AID.DEMO.BLOB.v1", "inputs": {"bytes": 3_000_000}, "idempotency_key": "large"}
    first, again = one.ask(call), other.ask(call)
    assert again["idempotent_hit"] is True
    assert len(first["output_json"]) == 3_000_000
    assert again["output_json"] == first["output_json"]


def test_without_nats_keyed_calls_wait_then_are_unavailable_and_plain_ones_go_on(crowd, nats):
    one = crowd.start(config="[nats]\nwait_seconds = 1.0")
    nats.kill()
    with one.wire() as wire:
        begun = time.monotonic()
        refused = wire.ask(keyed("k"))
        waited = time.monotonic() - begun
        assert refused["type"] == "unavailable"
        assert "NATS" in refused["error"]
        assert 0.5 < waited < 8
        assert wire.ask({"aid": "AID.TEST.LEDGER.v1", "input_json": "plain 0 ok"})["ok"]
        nats.start()
        one.eventually(lambda: one.status()["cluster"]["connected"])
        assert wire.ask(keyed("k"))["ok"], "what was refused has not run, and its key is free"
    assert crowd.runs() == {"plain": 1, "k": 1}


def test_an_outage_while_a_call_runs_costs_nothing(crowd, nats):
    one, other = crowd.start(), crowd.start()
    with one.wire() as here, other.wire() as there:
        here.send(keyed("k", 1500))
        one.eventually(lambda: crowd.runs()["k"] == 1)
        nats.kill()
        assert here.reply()["ok"], "its caller has its reply without NATS"
        nats.start()
        assert there.ask(keyed("k"))["idempotent_hit"] is True
    assert crowd.runs() == {"k": 1}


def test_a_broker_that_was_frozen_does_not_run_what_another_has_taken_over(crowd):
    import signal

    one, other = crowd.start(most=1), crowd.start()
    with one.wire() as busy, one.wire() as late, other.wire() as there:
        busy.send(keyed("busy", 800))
        one.eventually(lambda: crowd.runs()["busy"] == 1)
        late.send(keyed("k"))  # claimed, and waiting for its turn
        time.sleep(0.3)
        one.process.send_signal(signal.SIGSTOP)
        assert there.ask(keyed("k"))["ok"]
        one.process.send_signal(signal.SIGCONT)
        refused = late.reply()
        assert refused.get("type") == "unavailable" or refused.get("idempotent_hit"), refused
    assert crowd.runs()["k"] == 1


def test_brokers_and_nats_are_killed_under_load_and_no_key_runs_twice(crowd, nats):
    trial = Trial(crowd, nats, seed=1)
    trial.begin(600)
    time.sleep(0.3)
    trial.kill_broker()
    time.sleep(0.2)
    trial.kill_nats()
    assert trial.answered(90)
    assert trial.complaints() == []
