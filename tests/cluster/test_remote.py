"""Tools that other brokers of the cluster have are called here, through every face, with the promises of all tools."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import Client
from tests.conftest import Served
from tests.support.cluster import Crowd, keyed
from tests.support.event_tools import Tools, output
from tests.support.http import Web
from tests.support.load import LEASED, LEDGER
from tests.support.nats import NatsServer

ECHO = "AID.DEMO.ECHO.v1"
COUNTER = "AID.DEMO.COUNTER.v1"


@pytest.fixture
def crowd(tmp_path: Path, where: dict[str, str], nats: NatsServer) -> Iterator[Crowd]:
    brokers = Crowd(tmp_path / "brokers", where["include"], nats)
    yield brokers
    brokers.end()


def demo(where: dict[str, str], *more: str) -> str:
    return f'[[toolhost]]\nname = "demo"\nplugins = {json.dumps([where["demo_plugin"], *more])}\n'


def front(crowd: Crowd, tool: str = LEDGER, *flags: str, **settings: Any) -> Served:
    """A broker that has no tools of its own, and has heard of those that there are."""
    broker = crowd.start("--remote", *flags, tools=False, **settings)
    broker.eventually(lambda: tool in names(broker))
    return broker


def names(broker: Served) -> set[str]:
    return {tool["aid"] for tool in broker.ask({"aid": "_tools"})["tools"]}


def remote(broker: Served) -> dict[str, int]:
    found: dict[str, int] = broker.status()["cluster"]["remote"]
    return found


def pids(ask: Callable[[], dict[str, Any]], count: int) -> set[int]:
    return {json.loads(ask()["output_json"])["pid"] for _ in range(count)}


def test_a_tool_that_is_elsewhere_answers_through_every_face(crowd, where):
    crowd.start(config=demo(where))
    here = front(crowd, ECHO, "--http", "127.0.0.1:0")
    assert here.ask({"aid": ECHO, "input_json": '{"a" :1}', "id": 7})["output_json"] == '{"a" :1}'
    said = Web(here.ready).execute(ECHO, {"n": 2})
    assert said.json["output"] == {"n": 2}
    with Client(here.path) as client:
        assert client.call(ECHO, {"n": 3}).output == {"n": 3}
    with here.wire() as wire:
        wire.send(*[{"aid": ECHO, "input_json": str(n)} for n in range(200)])
        assert [reply["output_json"] for reply in wire.replies(200)] == [str(n) for n in range(200)], "in order"


def test_our_own_tools_come_first_and_come_back_first(crowd, where):
    theirs = crowd.start(config=demo(where))
    ours = crowd.start("--remote", config=demo(where))
    own = set(ours.toolhosts())
    ours.eventually(lambda: remote(ours) != {})
    assert pids(lambda: ours.call(COUNTER), 20) <= own
    assert theirs.status()["cluster"]["face"]["calls_under_way"] == 0
    Path(ours.process.args[-1]).write_text("")  # type: ignore[union-attr,index]
    with ours.operator() as wire:
        assert wire.ask({"aid": "_reload"})["ok"]
    ours.eventually(lambda: ours.call(ECHO)["ok"])
    assert pids(lambda: ours.call(COUNTER), 5).isdisjoint(own)


def test_whoever_looks_for_tools_elsewhere_is_given_no_demo_tools(crowd, where):
    crowd.start(config=demo(where))
    here = front(crowd, ECHO)
    assert here.status()["pools"] == []


def test_states_sessions_and_errors_are_the_callers_as_if_the_tool_were_here(crowd, where):
    crowd.start(config=demo(where, where["fault_plugin"]))
    here = front(crowd, ECHO)
    with here.wire() as wire:
        put = {"op": "put", "slot": 3, "value": "x"}
        first = wire.ask({"aid": "AID.DEMO.STATE.v1", "inputs": put, "ds_state": {"slots": {}}})
        assert "3" in first["ds_state"]["slots"]
        get = {"op": "get", "slot": 3}
        assert "x" in wire.ask({"aid": "AID.DEMO.STATE.v1", "inputs": get, "ds_state": {"delta": True}})["output_json"]
        assert "x" not in wire.ask({"aid": "AID.DEMO.STATE.v1", "inputs": get})["output_json"]
        assert wire.ask({"aid": "AID.DEMO.FAIL.v1", "inputs": {"error": "so"}})["error"] == "so"
        assert wire.ask({"aid": "AID.FAULT.SEGV.v1"})["type"] == "crash"
        late = wire.ask({"aid": "AID.DEMO.SLEEP.v1", "inputs": {"ms": 5000}, "timeout_ms": 200})
        assert (late["type"], late["aid"]) == ("timeout", "AID.DEMO.SLEEP.v1")


def test_what_is_larger_than_a_message_goes_there_and_back(crowd, where):
    crowd.start(config=demo(where) + "[limits]\nreply_bytes = 8000000")
    here = front(crowd, ECHO, config="[limits]\nreply_bytes = 8000000")
    text = json.dumps("y" * 5_000_000)
    assert here.ask({"aid": ECHO, "input_json": text})["output_json"] == text
    assert len(here.call("AID.DEMO.BLOB.v1", bytes=3_000_000)["output_json"]) == 3_000_000


def test_events_are_heard_and_the_session_is_where_its_caller_is(crowd, tmp_path):
    body = 'say("state_patch", patch={"n": {"a": 1}})\nsay("log", level="info", message="m")\nsay("done", ok=True)'
    speaker = Tools(tmp_path).tool("speaker", body)
    there = crowd.start(config=speaker, tools=False)
    assert names(there) == {"speaker"}, "who has a tool is given no demo tools"
    here = front(crowd, "speaker")
    assert names(here) == {"speaker"}
    with here.wire() as wire:
        wire.send({"aid": "speaker", "id": 1, "stream": True, "session": "s", "inputs": {}})
        lines = wire.replies(4)
        assert [line["event"]["type"] for line in lines[:3]] == ["state_patch", "log", "done"]
        assert output(lines[3])["state"] == {"n": {"a": 1}}
        assert wire.ask({"aid": "_state", "session": "s"})["state"] == {"n": {"a": 1}}


def test_a_broker_that_leaves_is_left_and_its_calls_are_not_lost(crowd):
    pair = [crowd.start(), crowd.start()]
    here = front(crowd)
    here.eventually(lambda: len(remote(here)) == 2)
    replies: list[dict[str, Any]] = []

    def load() -> None:
        with here.wire() as wire:
            for n in range(300):
                wire.send({"aid": LEDGER, "input_json": f"r{n} 2 ok"})
            replies.extend(wire.replies(300))

    calling = threading.Thread(target=load)
    calling.start()
    here.eventually(lambda: sum(crowd.runs().values()) > 50)
    pair[0].process.send_signal(signal.SIGTERM)
    calling.join(60)
    assert [reply for reply in replies if not reply["ok"]] == []
    assert len(replies) == 300
    assert set(crowd.runs().values()) == {1}
    assert pair[0].process.wait(20) == 0
    here.eventually(lambda: len(remote(here)) == 1)


def test_calls_of_a_broker_that_is_killed_may_have_run_and_keys_remember_that(crowd):
    there = crowd.start()
    here = front(crowd)
    with here.wire() as wire:
        wire.send(keyed("k", 60_000, id=1), {"aid": LEDGER, "input_json": "plain 60000 ok", "id": 2})
        here.eventually(lambda: len(crowd.runs()) == 2)
        there.process.kill()
        begun = time.monotonic()
        replies = {reply["id"]: reply for reply in wire.replies(2)}
        assert time.monotonic() - begun < 12
        assert {reply["type"] for reply in replies.values()} == {"crash"}
        other = crowd.start()
        here.eventually(lambda: list(remote(here)) == [other.status()["cluster"]["broker"]], 15)
        again = wire.ask(keyed("k", 60_000))
        assert (again["type"], again["idempotent_hit"]) == ("crash", True)
        assert wire.ask(keyed("new"))["ok"]
    assert crowd.runs() == {"k": 1, "plain": 1, "new": 1}


def test_nats_may_go_and_come_back_while_a_call_runs(crowd, nats):
    crowd.start()
    here = front(crowd)
    with here.wire() as wire:
        wire.send({"aid": LEDGER, "input_json": "slow 2500 ok"})
        here.eventually(lambda: crowd.runs()["slow"] == 1)
        nats.kill()
        time.sleep(0.3)
        nats.start()
        assert wire.reply()["ok"]
    assert crowd.runs() == {"slow": 1}


def test_without_nats_calls_wait_then_are_told_so(crowd, nats):
    crowd.start()
    here = front(crowd, config="[nats]\nwait_seconds = 1.0")
    nats.kill()
    refused = here.ask({"aid": LEDGER, "input_json": "x 0 ok"})
    assert refused["type"] == "unavailable"
    assert "nats.wait_seconds" in refused["error"]
    nats.start()
    here.eventually(lambda: here.ask({"aid": LEDGER, "input_json": "y 0 ok"})["ok"], 20)
    assert crowd.runs()["x"] == 0


def test_a_lease_of_any_broker_opens_a_tool_of_another_once(crowd):
    enforce = {"MACHINA_LEASE_ENFORCE": "1"}
    crowd.start(env=enforce)
    here = front(crowd, env=enforce)
    with here.operator() as wire:
        token = wire.ask({"aid": "_lease.issue", "tool_aid": LEASED})["token_id"]
    call = {"aid": LEASED, "input_json": "leased 0 ok", "_lease_token": token}
    assert here.ask({"aid": LEASED, "input_json": "leased 0 ok"})["type"] == "lease_required"
    assert here.ask(call)["ok"]
    assert here.ask(call)["reason"] == "lease already consumed"
    assert crowd.runs()["leased"] == 1


def test_load_is_shared_and_a_broker_in_trouble_is_spared(crowd, where):
    fail = f"{demo(where, where['fault_plugin'])}\n[breaker]\nin_a_row = 2"
    one, other = crowd.start(config=fail), crowd.start(config=demo(where))
    here = front(crowd, ECHO)
    here.eventually(lambda: len(remote(here)) == 2)
    with here.wire() as wire:
        for n in range(60):
            wire.send({"aid": "AID.DEMO.SLEEP.v1", "inputs": {"ms": 30}, "id": n})
        assert all(reply["ok"] for reply in wire.replies(60))
    counts = [sum(tool["calls"] for tool in broker.status()["tools"]) for broker in (one, other)]
    assert min(counts) > 10, counts
    with one.operator() as wire:
        assert wire.ask({"aid": "_pause", "name": COUNTER})["ok"]
    time.sleep(1.5)  # it has said so
    assert pids(lambda: here.call(COUNTER), 10).isdisjoint(one.toolhosts())
