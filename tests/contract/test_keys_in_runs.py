"""CONTRACT §5, many at once: calls with keys that move as runs, and what becomes of them when a run fares badly."""

from __future__ import annotations

import json

import pytest

from tests.support.config import toolhost
from tests.support.toolhosts import scripted

A = "AID.A.v1"
WRITES = """open("ran", "a").write(request["input_json"] + "\\n")
if request["input_json"] == "die" and not os.path.exists("died"):
    open("died", "w").close()
    os._exit(3)
say(output_json=request["input_json"])"""


@pytest.fixture
def ledger(start, tmp_path):
    """A broker whose tool writes down each of its runs; it is no newcomer any more."""
    settings = {"min": 1, "max": 1, "cwd": str(tmp_path)}
    broker = start(config=toolhost("h", binary=scripted(tmp_path, WRITES), **settings))
    with broker.wire() as wire:
        for _ in range(4):
            wire.ask({"aid": A, "input_json": "warm"})
    (tmp_path / "ran").unlink()
    return broker


def ran(folder):
    return (folder / "ran").read_text().split() if (folder / "ran").exists() else []


def keyed(key, text=None, **more):
    return {"aid": A, "idempotency_key": key, "input_json": text or key, **more}


@pytest.mark.parametrize("ids", [False, True])
def test_many_keys_at_once_run_once_each_and_are_repeated_in_order(start, where, ids):
    broker = start(config=toolhost("d", where["demo_plugin"], min=1, max=1))
    echo = "AID.DEMO.ECHO.v1"
    calls = [
        {"aid": echo, "idempotency_key": f"k{n}", "input_json": str(n), **({"id": n} if ids else {})}
        for n in range(900)
    ]
    with broker.wire() as wire:
        for again in (False, True):
            wire.send(*calls)
            replies = wire.replies(len(calls))
            if ids:
                replies.sort(key=lambda reply: reply["id"])
            assert [reply["output_json"] for reply in replies] == [str(n) for n in range(900)]
            assert all(reply.get("idempotent_hit", False) is again for reply in replies)
    tool = next(tool for tool in broker.status()["tools"] if tool["aid"] == echo)
    assert tool["calls"] == 900
    assert broker.status()["idempotency"]["hits"] == 900


def test_a_key_twice_in_one_write_is_one_execution_and_two_replies(ledger, tmp_path):
    with ledger.wire() as wire:
        wire.send(keyed("a"), keyed("b"), keyed("a", "other"), keyed("c"), keyed("b"))
        replies = wire.replies(5)
    assert [reply["output_json"] for reply in replies] == ["a", "b", "a", "c", "b"]
    assert [reply.get("idempotent_hit", False) for reply in replies] == [False, False, True, False, True]
    assert sorted(ran(tmp_path)) == ["a", "b", "c"]


def test_a_crash_in_the_middle_of_a_run_costs_one_call_and_keeps_its_key(ledger, tmp_path):
    calls = [keyed("a"), keyed("b"), keyed("k", "die"), keyed("c"), keyed("d")]
    with ledger.wire() as wire:
        wire.send(*calls)
        replies = wire.replies(5)
        assert [reply.get("type", reply.get("output_json")) for reply in replies] == ["a", "b", "crash", "c", "d"]
        wire.send(*calls)
        again = wire.replies(5)
    assert all(reply["idempotent_hit"] for reply in again)
    assert [reply.get("type", reply.get("output_json")) for reply in again] == ["a", "b", "crash", "c", "d"]
    assert ran(tmp_path) == ["a", "b", "die", "c", "d"]


def test_calls_that_did_not_run_free_their_keys_when_their_caller_leaves(start, tmp_path):
    body = 'time.sleep(0.3) if request["input_json"] == "slow" else None\nsay(output_json=request["input_json"])'
    settings = {"min": 1, "max": 1, "cwd": str(tmp_path)}
    broker = start(config=toolhost("h", binary=scripted(tmp_path, body), **settings))
    with broker.wire() as other:
        with broker.wire() as wire:
            wire.send({"aid": A, "input_json": "slow"}, *(keyed(f"k{n}") for n in range(20)))
            other.send(keyed("k7", "mine"), {"aid": "_tools"})
            broker.eventually(lambda: broker.status()["idempotency"]["entries"] >= 20)
        broker.eventually(lambda: broker.status()["connections"] == 2)
        assert other.ask(keyed("k3", "after"))["output_json"] in ("mine", "k7")  # the first reply, in order
        assert other.replies(1)[0]["tools"]
        late = other.replies(1)[0]
    assert late["output_json"] == "after"
    assert not late.get("idempotent_hit")


def test_more_calls_with_keys_than_toolhosts_have_room_for_all_run_once(ledger, tmp_path):
    wires = [ledger.wire() for _ in range(4)]
    for number, wire in enumerate(wires):
        wire.send(*(keyed(f"{number}-{n}", id=n) for n in range(500)))
    for wire in wires:
        replies = wire.replies(500)
        assert sorted(reply["id"] for reply in replies) == list(range(500))
        assert all(reply["ok"] and not reply.get("idempotent_hit") for reply in replies)
        wire.socket.close()
    assert len(ran(tmp_path)) == len(set(ran(tmp_path))) == 2000


@pytest.mark.parametrize("key", ["x" * 129, 'quo"te', "\u00e9", "\n"])
def test_keys_that_python_has_to_read_are_the_same_keys(ledger, tmp_path, key):
    escaped = json.dumps(keyed(key, "t")).encode() + b"\n"  # \u00e9 as an escape
    plain = json.dumps(keyed(key, "t"), ensure_ascii=False).encode() + b"\n"
    with ledger.wire() as wire:
        wire.socket.sendall(escaped + plain)
        first, second = wire.replies(2)
    assert (first.get("idempotent_hit", False), second["idempotent_hit"]) == (False, True)
    assert ran(tmp_path) == ["t"]
