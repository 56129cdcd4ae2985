"""CONTRACT §5: at most one execution a key, from outside."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from tests.support.config import toolhost

COUNTER = "AID.DEMO.COUNTER.v1"
SLEEP = "AID.DEMO.SLEEP.v1"


@pytest.fixture
def one(start, where):
    """One process, so that COUNTER counts every execution."""
    return start(config=toolhost("one", where["demo_plugin"], min=1, max=1) + toolhost("f", where["fault_plugin"]))


def keyed(aid, key, inputs=None, **more):
    return {"aid": aid, "idempotency_key": key, "input_json": json.dumps(inputs or {}), **more}


def count(reply):
    assert reply["status"] == "OK", reply
    return json.loads(reply["output_json"])["count"]


def test_a_hit_repeats_the_first_reply_is_marked_and_runs_nothing(one):
    with one.wire() as wire:
        first = wire.ask(keyed(COUNTER, "k", id=1))
        wire.send(keyed(COUNTER, "k", {"other": "input"}, id=2))
        line = wire.raw()
        assert line.startswith(b'{"id":2,"ok":true,"status":"OK","output_json":')
        assert line.endswith(b',"error":"","idempotent_hit":true,"ds_state":{}}')
        assert json.loads(line)["output_json"] == first["output_json"]
        assert "idempotent_hit" not in first
        assert count(wire.ask({"aid": COUNTER})) == 2


def test_the_same_key_under_another_tool_or_an_empty_key_is_another_call(one):
    with one.wire() as wire:
        assert count(wire.ask(keyed(COUNTER, "k"))) == 1
        assert wire.ask(keyed("AID.DEMO.ECHO.v1", "k", {"n": 1}))["output_json"] == '{"n": 1}'
        assert count(wire.ask(keyed(COUNTER, ""))) == 2
        assert count(wire.ask(keyed(COUNTER, ""))) == 3
        assert count(wire.ask(b'{"aid":"AID.DEMO.COUNTER.v1","idempotency_key":"\\u006b"}\n')) == 1, "\\u006b is k"


def test_duplicates_wait_for_the_first_one_execution_many_replies(one):
    replies = []

    def ask():
        with one.wire() as wire:
            replies.append(wire.ask(keyed(SLEEP, "same", {"ms": 300})))

    threads = [threading.Thread(target=ask) for _ in range(64)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < 3
    assert len(replies) == 64
    assert sum("idempotent_hit" in reply for reply in replies) == 63
    assert {reply["output_json"] for reply in replies} == {replies[0]["output_json"]}


def test_duplicates_on_one_connection_keep_their_order(one):
    with one.wire() as wire:
        wire.send(keyed(SLEEP, "a", {"ms": 200}), keyed(SLEEP, "a"), {"aid": COUNTER}, keyed(SLEEP, "a", id="x"))
        replies = wire.replies(4)
    assert ["idempotent_hit" in reply for reply in replies if "id" not in reply] == [False, True, False]
    assert [reply["idempotent_hit"] for reply in replies if "id" in reply] == [True]


def test_the_first_caller_hangs_up_and_the_others_are_answered_with_one_execution(one):
    blocker, first = one.wire(), one.wire()
    blocker.send({"aid": SLEEP, "input_json": '{"ms":600}'})
    time.sleep(0.1)
    first.send(keyed(COUNTER, "k"))  # waits behind the blocker: it has not run when its caller leaves
    time.sleep(0.1)
    with one.wire() as second, one.wire() as third:
        second.send(keyed(COUNTER, "k"))
        third.send(keyed(COUNTER, "k"))
        time.sleep(0.1)
        first.socket.close()
        assert count(second.reply()) == 1
        assert count(third.reply()) == 1
        assert count(second.ask({"aid": COUNTER})) == 2
    blocker.socket.close()


def test_a_running_first_caller_that_hangs_up_leaves_its_result(one):
    with one.wire() as first:
        first.send(keyed(SLEEP, "k", {"ms": 300}))
        time.sleep(0.1)
    with one.wire() as second:
        reply = second.ask(keyed(SLEEP, "k", {"ms": 300}))
        assert reply["status"] == "OK"
        assert reply["idempotent_hit"] is True


def test_a_tools_own_error_is_kept(one):
    with one.wire() as wire:
        first = wire.ask(keyed("AID.DEMO.FAIL.v1", "k", {"error": "no luck"}))
        again = wire.ask(keyed("AID.DEMO.FAIL.v1", "k", {"error": "other"}))
    assert (again["status"], again["error"], again["ok"]) == ("TOOL_ERROR", "no luck", False)
    assert (first["error"], again["idempotent_hit"]) == ("no luck", True)


@pytest.mark.parametrize(
    ("aid", "inputs", "kind"),
    [("AID.FAULT.EXIT.v1", {}, "crash"), ("AID.FAULT.HANG.v1", {}, "timeout")],
)
def test_a_call_that_may_have_run_keeps_its_key(one, aid, inputs, kind):
    with one.wire() as wire:
        first = wire.ask(keyed(aid, "k", inputs, timeout_ms=200))
        again = wire.ask(keyed(aid, "k", inputs, timeout_ms=200, id=1))
        assert (first["type"], again["type"]) == (kind, kind)
        assert (again["idempotent_hit"], again["error"]) == (True, first["error"])
        assert "idempotent_hit" not in wire.ask(keyed(aid, "new", inputs, timeout_ms=200))


def test_a_refusal_before_the_toolhost_frees_the_key(start, where):
    broker = start(config="[limits]\nqueue_seconds = 0.2\n" + toolhost("one", where["demo_plugin"], min=1, max=1))
    with broker.wire() as blocker, broker.wire() as wire:
        blocker.send({"aid": SLEEP, "input_json": '{"ms":800}'})
        time.sleep(0.1)
        assert wire.ask(keyed(COUNTER, "k"))["type"] == "overloaded"
        blocker.reply()
        reply = wire.ask(keyed(COUNTER, "k"))
        assert count(reply) == 1
        assert "idempotent_hit" not in reply


def test_the_time_to_live_counts_from_completion_and_entries_are_bounded(start, where):
    broker = start(
        "--plugin",
        where["demo_plugin"],
        env={"BROKER_IDEMPOTENCY_TTL_SECONDS": "0.5", "BROKER_IDEMPOTENCY_ENTRIES": "10"},
    )
    with broker.wire() as wire:
        wire.ask(keyed(SLEEP, "slow", {"ms": 400}))
        time.sleep(0.3)
        assert "idempotent_hit" in wire.ask(keyed(SLEEP, "slow", {"ms": 400}))
        time.sleep(0.6)
        assert "idempotent_hit" not in wire.ask(keyed(SLEEP, "slow", {"ms": 1}))
        for n in range(30):
            wire.ask(keyed("AID.DEMO.ECHO.v1", str(n)))
        assert broker.status()["idempotency"]["entries"] <= 10
        assert "idempotent_hit" in wire.ask(keyed("AID.DEMO.ECHO.v1", "29"))
        assert "idempotent_hit" not in wire.ask(keyed("AID.DEMO.ECHO.v1", "0"))


def test_the_first_ones_toolhost_is_killed_and_all_duplicates_learn_of_it(one):
    replies = []

    def ask():
        with one.wire() as wire:
            replies.append(wire.ask(keyed(SLEEP, "same", {"ms": 2000})))

    threads = [threading.Thread(target=ask) for _ in range(64)]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    busy = [p["pid"] for pool in one.status()["pools"] for p in pool["processes"] if p["in_flight"]]
    os.kill(busy[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert [reply["type"] for reply in replies] == ["crash"] * 64
    assert sum("idempotent_hit" in reply for reply in replies) == 63
