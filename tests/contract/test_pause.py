"""`_pause` and `_resume`: calls of a tool or a pool wait, and go on."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.config import toolhost

ECHO, FAIL = "AID.DEMO.ECHO.v1", "AID.DEMO.FAIL.v1"


def operate(broker, word, **members):
    with broker.operator() as wire:
        return wire.ask({"aid": word, **members})


def line(n, aid=ECHO):
    return {"aid": aid, "id": n, "inputs": {"n": n}}


@pytest.mark.parametrize("name", [ECHO, "toolhost", "*"])
def test_calls_of_what_is_paused_wait_and_go_on_when_it_is_resumed(demo, name):
    with demo.wire() as wire:
        for n in range(10):  # it is well known: its plain calls would pass in C
            wire.ask(line(n))
        assert operate(demo, "_pause", name=name)["paused"] == [name]
        wire.send(*(line(n) for n in range(100)))
        assert wire.quiet(0.3)
        status = demo.status()
        assert (status["paused"], status["waiting"]) == ([name], 100)
        assert operate(demo, "_resume", name=name)["paused"] == []
        assert sorted(reply["id"] for reply in wire.replies(100)) == list(range(100))
    assert demo.status()["paused"] == []


def test_a_paused_tool_does_not_hold_back_others(demo):
    operate(demo, "_pause", name=ECHO)
    with demo.wire() as wire:
        wire.send(line(0), *(line(n, FAIL) for n in range(1, 50)))
        assert sorted(reply["id"] for reply in wire.replies(49)) == list(range(1, 50))
        assert wire.quiet(0.05)
        operate(demo, "_resume", name="*")
        assert wire.reply()["id"] == 0


def test_what_runs_finishes_and_calls_with_keys_and_state_wait_as_well(demo):
    with demo.wire() as wire:
        wire.send({"aid": "AID.DEMO.SLEEP.v1", "id": "runs", "inputs": {"ms": 500}})
        time.sleep(0.2)
        operate(demo, "_pause", name="*")
        assert wire.reply()["id"] == "runs"
        wire.send(
            {**line("key"), "idempotency_key": "k"},
            {**line("same key"), "idempotency_key": "k"},
            {**line("state"), "ds_state": {"slots": {}}},
        )
        assert wire.quiet(0.2)
        operate(demo, "_resume", name="*")
        assert {reply["id"] for reply in wire.replies(3)} == {"key", "same key", "state"}


def test_who_waits_for_too_long_is_told_that_it_is_paused(start, where):
    broker = start("--plugin", where["demo_plugin"], env={"BROKER_LIMITS_QUEUE_SECONDS": "0.3"})
    operate(broker, "_pause", name=ECHO)
    reply = broker.call(ECHO)
    assert reply["type"] == "overloaded"
    assert "paused" in reply["error"]
    assert "limits.queue_seconds" in reply["error"]
    assert broker.status()["recent"][-1]["code"] == "overloaded"


def test_a_pause_survives_a_reload_also_of_what_is_new(start, where, tmp_path):
    first, second = toolhost("first", where["demo_plugin"]), toolhost("second", where["fault_plugin"])
    command = '[[oneshot]]\nname = "cat"\ncommand = ["cat"]\n'
    broker = start(config=first + command)
    operate(broker, "_pause", name="first")
    operate(broker, "_pause", name="cat")
    (tmp_path / "broker0.toml").write_text(toolhost("first", where["demo_plugin"], max=1) + second + command)
    with broker.wire() as wire:
        wire.send(line(1), line(2, "cat"))
        assert wire.quiet(0.1)
        broker.process.send_signal(signal.SIGHUP)
        broker.eventually(lambda: len(broker.status()["pools"]) == 2)
        assert broker.call("AID.FAULT.STDERR.v1", bytes=1)["ok"]
        assert wire.quiet(0.2)
        operate(broker, "_resume", name="first")
        assert wire.reply()["id"] == 1
        assert broker.status()["paused"] == ["cat"]
        operate(broker, "_resume", name="cat")
        assert wire.reply()["id"] == 2


def test_a_name_that_is_not_there_is_answered_with_those_that_are(demo):
    wrong = operate(demo, "_pause", name="AID.NO.v1")
    assert (wrong["type"], "pools: toolhost" in wrong["error"]) == ("not_found", True)
    assert operate(demo, "_resume", name=ECHO)["error"] == f"{ECHO} is not paused; nothing is"
    operate(demo, "_pause", name="*")
    assert "resume *" in operate(demo, "_resume", name=ECHO)["error"]
    with demo.wire() as wire:
        assert wire.ask({"aid": "_pause", "name": ECHO})["type"] == "forbidden"


def test_a_broker_that_is_told_to_stop_does_not_wait_for_what_is_paused(demo):
    operate(demo, "_pause", name="*")
    with demo.wire() as wire:
        wire.send(line(1))
        assert wire.quiet(0.1)
        begin = time.monotonic()
        os.kill(demo.process.pid, signal.SIGTERM)
        assert wire.reply()["type"] == "draining"
        assert demo.process.wait(10) == 0
        assert time.monotonic() - begin < 3
