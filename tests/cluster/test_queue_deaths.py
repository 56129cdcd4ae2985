"""Durable calls while brokers and NATS die: nothing that was kept is lost, nothing runs twice, all is told once."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Served
from tests.support.cluster import Crowd
from tests.support.load import LEDGER
from tests.support.nats import NatsServer
from tests.support.queue import SOON, dead, enqueue, operate, queued, result

LATE = "AID.LATE.LEDGER.v1"


@pytest.fixture
def crowd(tmp_path: Path, where: dict[str, str], nats: NatsServer) -> Iterator[Crowd]:
    brokers = Crowd(tmp_path / "brokers", where["include"], nats)
    yield brokers
    brokers.end()


def has_one(broker: Served) -> bool:
    return broker.status()["cluster"]["queue"]["running_here"] == 1


def busy(broker: Served, word: str, ms: int) -> Any:
    """A caller that has all of a broker's toolhosts, one, for so long."""
    wire = broker.wire(60)
    wire.send({"aid": LEDGER, "input_json": f"{word} {ms} ok"})
    return wire


# --- brokers ----------------------------------------------------------------------------------------------------------


def test_a_call_that_ran_when_its_broker_died_is_reported_and_not_run_again(crowd):
    one = crowd.start(config=SOON, most=1)
    queued(one, "ran 60000 ok", "ran")
    one.eventually(lambda: crowd.runs()["ran"] == 1)
    other = crowd.start(config=SOON)
    one.process.kill()
    told = result(other, "ran", 20)
    assert (told["state"], told["result"]["type"]) == ("dead", "crash")
    assert "may have run" in told["result"]["error"]
    assert dead(other, "ran")["may_have_run"] is True
    assert operate(other, "status")["queue"]["calls"] == 0
    assert crowd.runs()["ran"] == 1


def test_a_call_that_had_not_begun_is_run_by_another_broker_once(crowd):
    one = crowd.start(config=SOON, most=1)
    wire = busy(one, "before", 60_000)
    one.eventually(lambda: crowd.runs()["before"] == 1)
    queued(one, "waits 0 ok", "waits")
    one.eventually(lambda: has_one(one))
    other = crowd.start(config=SOON)
    time.sleep(1.5)
    assert result(other, "waits")["state"] == "queued", "the one that has it is alive"
    one.process.kill()
    wire.socket.close()
    assert result(other, "waits", 20)["result"]["output_json"] == '"waits"'
    assert crowd.runs()["waits"] == 1


def test_what_the_configuration_calls_safe_is_run_again(crowd):
    one = crowd.start(config=SOON, most=1, rerun=["AID.TEST.*"])
    queued(one, "safe 2500 ok", "safe")
    one.eventually(lambda: crowd.runs()["safe"] == 1)
    other = crowd.start(config=SOON, rerun=["AID.TEST.*"])
    one.process.kill()
    assert result(other, "safe", 20)["state"] == "done"
    assert crowd.runs()["safe"] == 2


def test_a_call_that_its_brokers_die_of_is_dead_in_the_end(crowd):
    config = SOON.replace("[queue]\n", "[queue]\ndeliveries = 1\n")
    one = crowd.start(config=config, most=1)
    wire = busy(one, "before", 60_000)
    one.eventually(lambda: crowd.runs()["before"] == 1)
    queued(one, "poison 0 ok", "poison")
    one.eventually(lambda: has_one(one))
    other = crowd.start(config=config)
    one.process.kill()
    wire.socket.close()
    told = result(other, "poison", 20)
    assert told["state"] == "dead"
    assert "queue.deliveries" in told["result"]["error"]
    assert dead(other, "poison")["may_have_run"] is False
    assert operate(other, "requeue", call_id="poison")["requeued"] == ["poison"]
    other.eventually(lambda: result(other, "poison")["state"] == "done")
    assert crowd.runs()["poison"] == 1


def test_at_sigterm_what_runs_is_finished_and_the_rest_is_given_to_others_at_once(crowd):
    one = crowd.start(config=SOON.replace("= 1\n", "= 60\n"), most=1)  # nobody may wait for that
    queued(one, "runs 1500 ok", "runs")
    one.eventually(lambda: crowd.runs()["runs"] == 1)
    for n in range(5):
        queued(one, f"next{n} 0 ok", f"next{n}")
    other = crowd.start(config=SOON.replace("= 1\n", "= 60\n"), most=1)
    begun = time.monotonic()
    with one.wire() as waiting:
        waiting.send({"aid": "_result", "call_id": "next4", "wait_ms": 60_000})
        time.sleep(0.2)
        assert one.stop() == 0
        assert waiting.reply()["state"] in ("queued", "running", "done"), "nobody is left without a word"
    assert all(result(other, f"next{n}", 10)["state"] == "done" for n in range(5))
    assert time.monotonic() - begun < 10
    assert result(other, "runs")["result"]["output_json"] == '"runs"'
    assert crowd.runs() == {"runs": 1, **{f"next{n}": 1 for n in range(5)}}


def test_what_waits_in_a_broker_that_stops_goes_to_another_at_once(crowd):
    slow = SOON.replace("= 1\n", "= 60\n")
    one = crowd.start(config=slow, most=1)
    wire = busy(one, "before", 1500)
    one.eventually(lambda: crowd.runs()["before"] == 1)
    queued(one, "waits 0 ok", "waits")
    one.eventually(lambda: has_one(one))
    other = crowd.start(config=slow)
    one.process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    assert result(other, "waits", 10)["state"] == "done"
    assert time.monotonic() - begun < 5
    wire.socket.close()
    assert crowd.runs()["waits"] == 1


def test_a_broker_that_was_frozen_runs_nothing_that_another_has_run(crowd):
    one = crowd.start(config=SOON, most=1)
    wire = busy(one, "before", 600)
    one.eventually(lambda: crowd.runs()["before"] == 1)
    queued(one, "waits 0 ok", "waits")
    one.eventually(lambda: has_one(one))
    other = crowd.start(config=SOON)
    one.process.send_signal(signal.SIGSTOP)
    assert result(other, "waits", 20)["state"] == "done"
    one.process.send_signal(signal.SIGCONT)
    one.eventually(lambda: one.status()["cluster"]["queue"]["running_here"] == 0)
    wire.socket.close()
    assert crowd.runs()["waits"] == 1


# --- NATS -------------------------------------------------------------------------------------------------------------


def test_what_nats_has_kept_survives_its_death(crowd, nats):
    one = crowd.start(config=SOON, tools=False)
    ids = [queued(one, f"kept{n} 0 ok") for n in range(50)]
    nats.kill()
    nats.start()
    crowd.start(config=SOON)
    one.eventually(lambda: one.status()["cluster"]["connected"])
    assert all(result(one, call_id, 20)["state"] == "done" for call_id in ids)
    assert crowd.runs() == {f"kept{n}": 1 for n in range(50)}


def test_an_outage_while_a_call_runs_costs_nothing(crowd, nats):
    one, other = crowd.start(config=SOON), crowd.start(config=SOON)
    queued(one, "outage 1500 ok", "outage")
    one.eventually(lambda: crowd.runs()["outage"] == 1)
    nats.kill()
    time.sleep(2)
    nats.start()
    one.eventually(lambda: one.status()["cluster"]["connected"])
    other.eventually(lambda: other.status()["cluster"]["connected"])
    assert result(other, "outage", 20)["result"]["output_json"] == '"outage"'
    one.eventually(lambda: operate(one, "status")["queue"]["calls"] == 0)
    assert crowd.runs()["outage"] == 1


def test_without_nats_enqueueing_waits_then_says_so_and_may_be_said_again(crowd, nats):
    one = crowd.start(config=SOON.replace("wait_seconds = 3", "wait_seconds = 1"))
    queued(one, "first 0 ok")
    nats.pause()  # it has what it is told, and says nothing
    begun = time.monotonic()
    refused = enqueue(one, "again 0 ok")
    assert refused["type"] == "unavailable"
    assert 0.5 < time.monotonic() - begun < 8
    nats.go_on()
    call_id = refused["call_id"]
    assert queued(one, "again 0 ok", call_id) == call_id
    assert result(one, call_id, 20)["state"] == "done"
    nats.kill()
    refused = enqueue(one, "third 0 ok", "third")
    assert (refused["type"], refused["call_id"]) == ("unavailable", "third")
    assert result(one, call_id)["type"] == "unavailable"
    assert one.ask({"aid": LEDGER, "input_json": "plain 0 ok"})["ok"], "plain calls go on"
    nats.start()
    one.eventually(lambda: one.status()["cluster"]["connected"])
    assert queued(one, "third 0 ok", "third") == "third"
    assert result(one, "third", 20)["state"] == "done"
    time.sleep(0.5)
    assert crowd.runs() == {"first": 1, "again": 1, "third": 1, "plain": 1}


# --- all of it --------------------------------------------------------------------------------------------------------


class Producer(threading.Thread):
    """Enqueues each of its calls until that is acknowledged, at whichever broker is there."""

    def __init__(self, brokers: list[Served], ids: list[str], seed: int) -> None:
        super().__init__(daemon=True)
        self._brokers = brokers  # may change while it runs
        self._ids = ids
        self._dice = random.Random(seed)

    def run(self) -> None:
        left = list(self._ids)
        while left:
            try:
                with self._dice.choice(self._brokers).wire(30) as wire:
                    some = left[:20]
                    calls = [{"aid": LEDGER, "input_json": f"{one} 2 ok", "id": one} for one in some]
                    wire.send(*[{"aid": "_enqueue", "id": call["id"], "call": call} for call in calls])
                    for _ in some:
                        answer = wire.reply()
                        if answer["ok"]:
                            left.remove(answer["id"])
                        else:
                            assert answer["type"] in ("unavailable", "draining"), answer
            except (OSError, AssertionError, ValueError):
                time.sleep(0.05)


def test_brokers_and_nats_are_killed_under_load_and_each_call_is_told_of_once(crowd, nats):
    brokers = [crowd.start(config=SOON) for _ in range(3)]
    ids = [f"q{n}" for n in range(600)]
    producers = [Producer(brokers, ids[n::3], n) for n in range(3)]
    for producer in producers:
        producer.start()
    time.sleep(0.2)
    brokers[0].process.kill()
    brokers[0].process.wait()
    brokers[0] = crowd.start(config=SOON)
    nats.kill()
    time.sleep(0.5)
    nats.start()
    for producer in producers:
        producer.join(60)
        assert not producer.is_alive()
    states = {}
    for call_id in ids:
        told = result(brokers[1], call_id, 40)
        states[call_id] = told.get("state", told)
    runs = crowd.runs()
    assert not {key: count for key, count in runs.items() if count > 1}
    for call_id, state in states.items():
        assert (state == "done" and runs[call_id] == 1) or (
            state == "dead" and dead(brokers[1], call_id)["may_have_run"]
        )
    brokers[1].eventually(lambda: operate(brokers[1], "status")["queue"]["calls"] == 0, 20)  # acks that got lost, too
