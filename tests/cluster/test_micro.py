"""Any NATS client calls a tool: a micro service (ADR-32), the line protocol's request object, one answer a message."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Brokers, Served
from tests.support.event_tools import Tools, output
from tests.support.nats import Client, NatsServer

ECHO = "AID.DEMO.ECHO.v1"
ODD = "an odd*name >.here"


def config(where: dict[str, str], folder: Path) -> str:
    script = folder / "odd.py"
    script.write_text(f'#!{sys.executable}\nprint(\'{{"ok":true,"status":"OK","output_json":"7"}}\')\n')
    script.chmod(0o755)
    speaker = Tools(folder).tool("speaker", 'say("log", level="info", message="one")\nsay("done", ok=True)')
    return f"""
    [[toolhost]]
    name = "demo"
    plugins = ["{where["demo_plugin"]}", "{where["fault_plugin"]}"]
    [[oneshot]]
    name = "{ODD}"
    command = ["{script}"]
    {speaker}
    [[principal]]
    name = "nats:default"
    tools = ["AID.DEMO.*", "AID.FAULT.*", "{ODD.replace("*", "[*]")}", "speaker"]
    """


@pytest.fixture(scope="module")
def broker(
    tmp_path_factory: pytest.TempPathFactory, where: dict[str, str], shared_nats: NatsServer
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("micro")
    brokers = Brokers(folder)
    served = brokers.start("--nats", shared_nats.url, config=config(where, folder))
    served.eventually(lambda: served.status()["cluster"]["face"]["tools"] > 5)
    yield served
    brokers.end()


@pytest.fixture(scope="module")
def client(broker: Served, shared_nats: NatsServer) -> Iterator[Client]:  # noqa: ARG001 (somebody has to answer it)
    client = Client(shared_nats.url)
    yield client
    client.close()


def test_a_tool_is_called_with_the_request_object_of_the_line_protocol(client):
    reply = client.call(ECHO, inputs={"n": 1})
    assert (reply["ok"], reply["status"], reply["output_json"]) == (True, "OK", '{"n":1}')
    assert client.call(ECHO, aid=ECHO, input_json="[1]")["output_json"] == "[1]"
    raw = client.ask(f"tools.default.{ECHO}", {"id": [7], "inputs": {}}).data
    assert raw.startswith(b'{"id":[7],"ok":true')
    spaced = b' {\n "inputs" : {"a":\n1}\n }\r\n'
    assert json.loads(json.loads(client.ask(f"tools.default.{ECHO}", spaced).data)["output_json"]) == {"a": 1}


def test_a_key_and_a_state_are_as_on_any_other_face(client):
    first = client.call("AID.DEMO.COUNTER.v1", idempotency_key="micro")
    again = client.call("AID.DEMO.COUNTER.v1", idempotency_key="micro")
    assert again["idempotent_hit"] is True
    assert again["output_json"] == first["output_json"]
    put = {"op": "put", "slot": 3, "value": "x"}
    changed = client.call("AID.DEMO.STATE.v1", inputs=put, ds_state={"slots": {}}, session="s")["ds_state"]
    assert "3" in changed["slots"]
    got = client.call("AID.DEMO.STATE.v1", inputs={"op": "get", "slot": 3}, ds_state={"delta": True}, session="s")
    assert "x" in got["output_json"]


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (b"", "bad_request", "invalid JSON"),
        (b"nonsense", "bad_request", "invalid JSON"),
        (b"[]", "bad_request", "invalid JSON"),
        (b'{"inputs":{},"inputs":{}}', "bad_request", "twice"),
        (b'{"inputs":{},"timeout_ms":"x"}', "bad_request", "timeout_ms"),
        (b'{"inputs":{},"stream":true}', "bad_request", '"id"'),
        (b'{"aid":"AID.DEMO.SLEEP.v1"}', "bad_request", "subject"),
        (b'{"inputs":{"ms":2000},"timeout_ms":100,"aid":"AID.DEMO.ECHO.v1","id":1}', None, ""),
    ],
)
def test_what_is_wrong_is_refused_once_in_words_and_headers(client, request_, code, words):
    message = client.ask(f"tools.default.{ECHO}", request_)
    reply = json.loads(message.data)
    assert reply.get("type") == code
    assert words in reply.get("error", "")
    if code:
        assert message.headers["Broker-Ran"] == "0"
        assert message.headers["Nats-Service-Error-Code"] == "400"


def test_a_tools_own_failure_and_a_crash_are_told_apart(client):
    failed = client.ask("tools.default.AID.DEMO.FAIL.v1", {"inputs": {"error": "näh\nein"}})
    assert json.loads(failed.data)["status"] == "TOOL_ERROR"
    assert "Broker-Ran" not in failed.headers
    assert failed.headers["Nats-Service-Error"]
    crashed = client.ask("tools.default.AID.FAULT.SEGV.v1", {})
    assert json.loads(crashed.data)["type"] == "crash"
    assert crashed.headers["Broker-Ran"] == "1"


def test_odd_names_have_subjects_and_forbidden_tools_have_none(broker, client):
    [info] = client.services(f"INFO.toolhost-broker.{broker.status()['cluster']['broker']}")
    by_tool = {one["metadata"]["tool"]: one for one in info["endpoints"]}
    assert json.loads(client.ask(by_tool[ODD]["subject"], {}).data)["output_json"] == "7"
    assert "AID.FILE.WRITE.v1" not in by_tool
    with pytest.raises(Exception, match="no responders"):
        client.ask("tools.default.AID.FILE.WRITE.v1", {})


def test_it_answers_what_nats_own_tools_ask_services(broker, client):
    me = broker.status()["cluster"]["broker"]
    for verb in ("PING", "INFO", "STATS"):
        for whom in ("", ".toolhost-broker", f".toolhost-broker.{me}"):
            answer = next(one for one in client.services(verb + whom) if one["id"] == me)
            assert answer["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
            assert answer["name"] == "toolhost-broker"
            assert answer["metadata"]["cluster"] == "default"
    client.call("AID.DEMO.FAIL.v1", inputs={"error": "so it is"})
    [stats] = client.services(f"STATS.toolhost-broker.{me}")
    failing = next(one for one in stats["endpoints"] if one["name"] == "AID_DEMO_FAIL_v1")
    assert failing["num_requests"] >= failing["num_errors"] > 0
    assert failing["last_error"] == "so it is"
    assert failing["queue_group"] == "q"


def test_events_come_before_the_reply_for_whoever_asks(client):
    asked = {"id": "e", "stream": True, "inputs": {}}
    heard = client.gather("tools.default.speaker", asked, lambda message: b'"event":' not in message.data)
    messages = [json.loads(one.data) for one in heard]
    assert [one["event"]["type"] for one in messages[:-1]] == ["log", "done"]
    assert output(messages[-1])["verdict"] == "success"


def test_what_is_larger_than_a_message_goes_by_reference_to_whoever_says_so(client):
    ask = {"inputs": {"bytes": 1_048_000}}  # with what stands around it over the megabyte that NATS takes
    assert json.loads(client.ask("tools.default.AID.DEMO.BLOB.v1", ask).data)["type"] == "reply_too_large"
    message = client.ask("tools.default.AID.DEMO.BLOB.v1", ask, {"Broker-Accept-Object": "1"})
    assert message.data == b""

    async def fetch(name: str) -> bytes:
        store = await client.nats.jetstream().object_store("broker_default_objects")
        return (await store.get(name)).data

    reply = json.loads(client.run(fetch(message.headers["Broker-Object"])))
    assert len(reply["output_json"]) == 1_048_000

    async def put(payload: bytes) -> None:
        store = await client.nats.jetstream().object_store("broker_default_objects")
        await store.put("mine", payload)

    client.run(put(json.dumps({"inputs": {"text": "x " * 1_000_000}}).encode()))
    headers = {"Broker-Object": "mine", "Broker-Accept-Object": "1"}
    large = json.loads(client.ask("tools.default.AID.DEMO.WORD_COUNT.v1", b"", headers).data)
    assert json.loads(large["output_json"])["total_tokens"] == 1_000_000
    nothing = client.ask("tools.default.AID.DEMO.ECHO.v1", b"", {"Broker-Object": "nowhere"})
    assert json.loads(nothing.data)["type"] == "bad_request"


def test_a_flood_is_bounded_and_each_message_has_its_answer(start, where, nats):
    flooded = start("--nats", nats.url, "--plugin", where["demo_plugin"], config="[limits]\nconnection_calls = 50")
    flooded.eventually(lambda: flooded.status()["cluster"]["face"]["tools"] > 5)
    client = Client(nats.url)

    async def flood() -> list[Any]:
        import asyncio

        ask = json.dumps({"inputs": {"ms": 200}}).encode()
        many = [client.nats.request("tools.default.AID.DEMO.SLEEP.v1", ask, timeout=20) for _ in range(200)]
        return [json.loads(one.data) for one in await asyncio.gather(*many)]

    replies = client.run(flood())
    refused = [reply for reply in replies if not reply["ok"]]
    assert 100 <= len(refused) <= 150
    assert {reply["type"] for reply in refused} == {"overloaded"}
    assert "limits.connection_calls" in refused[0]["error"]
    client.close()


def test_brokers_share_what_comes_and_one_that_leaves_loses_nothing(start, where, nats):
    pair = [start("--nats", nats.url, "--plugin", where["demo_plugin"], "--cluster", "two") for _ in range(2)]
    for one in pair:
        one.eventually(lambda one=one: one.status()["cluster"]["face"]["tools"] > 5)
    client = Client(nats.url)

    async def load(count: int) -> list[Any]:
        import asyncio

        async def ask(n: int) -> Any:
            await asyncio.sleep(n * 0.002)
            if n == count // 2:
                pair[0].process.send_signal(signal.SIGTERM)
            ask = json.dumps({"inputs": {"ms": 5}}).encode()
            while True:  # what was still waiting there has not run, and is the other one's
                message = await client.nats.request("tools.two.AID.DEMO.SLEEP.v1", ask, timeout=20)
                reply = json.loads(message.data)
                if reply.get("type") != "draining":
                    return reply
                assert message.headers["Broker-Ran"] == "0"

        return await asyncio.gather(*(ask(n) for n in range(count)))

    replies = client.run(load(300))
    assert [reply.get("error") for reply in replies if not reply["ok"]] == []
    assert pair[0].process.wait(10) == 0
    [stats] = client.services("STATS.toolhost-broker")
    requests = sum(one["num_requests"] for one in stats["endpoints"])
    assert 150 < requests < 290, "the other one has had its share"
    client.close()
