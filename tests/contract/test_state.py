"""CONTRACT §4: state belongs to the caller."""

from __future__ import annotations

import json
import threading

from tests.support.config import toolhost

STATE = "AID.DEMO.STATE.v1"


def artifact(text):
    return {"type": "json", "provenance": "test", "content_json": json.dumps(text), "size_bytes": len(json.dumps(text))}


def state(op, slot, value=None, **more):
    return {"aid": STATE, "input_json": json.dumps({"op": op, "slot": slot, "value": value}), **more}


def got(reply):
    assert reply["status"] == "OK", reply
    return json.loads(reply["output_json"])


def test_nobody_sees_what_another_caller_left_in_the_toolhost(start, where):
    broker = start(
        config=toolhost("one", where["demo_plugin"], min=1, max=1),
    )
    with broker.wire() as first, broker.wire() as second:
        assert "5" in first.ask(state("put", 5, "secret"))["ds_state"]["slots"]
        assert got(second.ask(state("get", 5)))["found"] is False
        assert got(first.ask(state("get", 5)))["found"] is False, "a call without ds_state does not read the session"


def test_a_session_keeps_state_for_those_who_send_deltas(demo):
    with demo.wire() as wire:
        assert got(wire.ask(state("put", 1, "a", ds_state={"slots": {}}))) is not None
        assert got(wire.ask(state("get", 1, ds_state={"delta": True})))["value"] == "a"
        assert got(wire.ask(state("get", 1)))["found"] is False
        reply = wire.ask(state("put", 2, "b", ds_state={"delta": True, "slots": {"7": artifact("x")}}))
        assert sorted(reply["ds_state"]["slots"]) == ["2"], "the reply's delta is against what the caller sent"
        assert got(wire.ask(state("get", 7, ds_state={"delta": True})))["value"] == "x"
        assert wire.ask(state("del", 1, ds_state={"delta": True}))["ds_state"]["removed_slots"] == [1]
        assert got(wire.ask(state("get", 1, ds_state={"delta": True})))["found"] is False
        assert got(wire.ask(state("get", 2, ds_state={"delta": True, "removed_slots": [2]})))["found"] is False
        assert got(wire.ask(state("get", 7, ds_state={"slots": {}})))["found"] is False, "a full state replaces"


def test_a_named_session_outlives_its_connection_and_belongs_to_its_principal(demo):
    with demo.wire() as wire:
        wire.ask(state("put", 1, "kept", ds_state={"slots": {}}, session="s"))
    with demo.wire() as wire:
        assert got(wire.ask(state("get", 1, ds_state={"delta": True}, session="s")))["value"] == "kept"
        assert got(wire.ask(state("get", 1, ds_state={"delta": True}, session="t")))["found"] is False
        assert got(wire.ask(state("get", 1, ds_state={"delta": True})))["found"] is False


def test_calls_of_one_session_that_use_its_state_run_one_at_a_time_in_order(demo):
    with demo.wire() as wire:
        wire.send(*(state("put", n, n, ds_state={"delta": True}, session="o", id=n) for n in range(50)))
        assert [wire.reply()["id"] for _ in range(50)] == list(range(50))
        reply = wire.ask(state("get", 49, ds_state={"delta": True}, session="o"))
        assert got(reply)["value"] == 49

    def put(slot):
        with demo.wire() as other:
            other.ask(state("put", slot, slot, ds_state={"delta": True}, session="o"))

    threads = [threading.Thread(target=put, args=(100 + n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with demo.wire() as wire:
        for slot in [*range(50), *range(100, 116)]:
            assert got(wire.ask(state("get", slot, ds_state={"delta": True}, session="o")))["found"], slot


def test_a_refused_call_does_not_change_the_session(demo):
    with demo.wire() as wire:
        wire.ask(state("put", 1, "a", ds_state={"slots": {}}))
        bad = state("get", 1, ds_state={"slots": {"1": "not an object"}})
        assert wire.ask(bad)["type"] == "bad_request"
        assert wire.ask({"aid": "NOPE", "ds_state": {"slots": {}}})["type"] == "not_found"
        assert got(wire.ask(state("get", 1, ds_state={"delta": True})))["value"] == "a"


def test_sessions_are_bounded_in_number(start, where):
    broker = start("--plugin", where["demo_plugin"], env={"BROKER_LIMITS_SESSIONS": "10"})
    with broker.wire() as wire:
        for n in range(50):
            wire.ask(state("put", 1, n, ds_state={"slots": {}}, session=str(n)))
        assert broker.status()["sessions"] <= 10
        assert got(wire.ask(state("get", 1, ds_state={"delta": True}, session="49")))["value"] == 49


def test_isolated_principals_have_processes_of_their_own(start, where):
    broker = start(
        config=toolhost("d", where["demo_plugin"], isolate="principal"),
    )
    assert json.loads(broker.call("AID.DEMO.COUNTER.v1")["output_json"])["count"] == 1
    assert "@uid:" in broker.status()["pools"][0]["name"]
