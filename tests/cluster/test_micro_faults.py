"""The micro service when its callers, its tools or what lies in the object store are not as they should be."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from tests.conftest import Brokers, Served
from tests.support.nats import Client, NatsServer

ECHO = "AID.DEMO.ECHO.v1"
STATUSES = {"null": "null", "number": "7", "none": ""}


def oneshot(folder: Path, name: str, body: str) -> str:
    script = folder / f"{name}.py"
    script.write_text(f"#!{sys.executable}\n{body}\n")
    script.chmod(0o755)
    return f'[[oneshot]]\nname = "{name}"\ncommand = ["{script}"]\n'


@pytest.fixture(scope="module")
def broker(
    tmp_path_factory: pytest.TempPathFactory, where: dict[str, str], shared_nats: NatsServer
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("odd_micro")
    brokers = Brokers(folder)
    config = f'[limits]\nrequest_bytes = 3000000\n[[toolhost]]\nname = "demo"\nplugins = ["{where["demo_plugin"]}"]\n'
    for name, status in STATUSES.items():
        member = f'"status":{status},' if status else ""
        reply = f'{{"ok":false,{member}"output_json":"1","error":{{"odd":1}}}}'
        config += oneshot(folder, name, f"print({reply!r})")
    ledger = folder / "ledger"
    config += oneshot(
        folder,
        "writes",
        f'open({str(ledger)!r}, "a").write("x")\nprint(\'{{"ok":true,"status":"OK","output_json":"1"}}\')',
    )
    served = brokers.start("--nats", shared_nats.url, config=config)
    served.eventually(lambda: served.status()["cluster"]["face"]["tools"] > 5)
    yield served
    brokers.end()


@pytest.fixture(scope="module")
def client(broker: Served, shared_nats: NatsServer) -> Iterator[Client]:  # noqa: ARG001 (somebody has to answer it)
    client = Client(shared_nats.url)
    yield client
    client.close()


@pytest.fixture
def store(client: Client) -> Any:
    client.ask(f"tools.default.{ECHO}", b"", {"Broker-Object": "nobody's"})  # the bucket is there from now on

    async def open_store() -> Any:
        return await client.nats.jetstream().object_store("broker_default_objects")

    return client.run(open_store())


def idle(broker: Served) -> bool:
    return bool(broker.status()["cluster"]["face"]["calls_under_way"] == 0)


@pytest.mark.parametrize("tool", STATUSES)
def test_a_tool_may_say_what_it_likes_and_its_caller_hears_it(broker, client, tool):
    message = client.ask(f"tools.default.{tool}", {}, seconds=5)
    assert json.loads(message.data)["error"] == {"odd": 1}
    assert message.headers["Nats-Service-Error"]
    broker.eventually(lambda: idle(broker))


def test_nats_pys_own_classes_understand_what_the_service_says_of_itself(broker, client):
    me = broker.status()["cluster"]["broker"]
    for kind, verb in ((ServicePing, "PING"), (ServiceInfo, "INFO"), (ServiceStats, "STATS")):
        [said] = client.services(f"{verb}.toolhost-broker.{me}")
        assert kind.from_dict(said).id == me
    [stats] = client.services(f"STATS.toolhost-broker.{me}")
    assert {one["data"]["tool"] for one in stats["endpoints"]} >= {ECHO, "writes"}


def test_whoever_wants_no_reply_gets_none_and_the_call_runs(broker, client, tmp_path_factory):
    ledger = next(tmp_path_factory.getbasetemp().glob("odd_micro*/")) / "ledger"
    before = len(ledger.read_text()) if ledger.exists() else 0
    client.run(client.nats.publish("tools.default.writes", b"{}"))
    broker.eventually(lambda: ledger.exists() and len(ledger.read_text()) == before + 1)
    broker.eventually(lambda: idle(broker))


def test_headers_are_known_however_their_names_are_written(client):
    ask = {"inputs": {"bytes": 1_048_000}}
    message = client.ask("tools.default.AID.DEMO.BLOB.v1", ask, {"broker-accept-object": "1"})
    assert message.headers["Broker-Object"]


def test_a_message_as_large_as_nats_takes_is_a_call(client):
    most = client.nats.max_payload
    head, tail = b'{"inputs":{"text":"', b'"}}'
    payload = head + b"w " * ((most - len(head) - len(tail)) // 2) + tail
    payload = payload[: -len(tail)] + b"w" * (most - len(payload)) + tail
    assert len(payload) == most
    reply = json.loads(client.ask("tools.default.AID.DEMO.WORD_COUNT.v1", payload).data)
    assert json.loads(reply["output_json"])["total_tokens"] > 500_000


def test_junk_in_the_object_store_is_refused_and_not_waited_for(broker, client, store):
    prefix, bucket = "$O.broker_default_objects.M", store._name
    assert bucket == "broker_default_objects"

    async def junk(name: str, meta: bytes) -> None:
        import base64

        await client.nats.jetstream().publish(f"{prefix}.{base64.urlsafe_b64encode(name.encode()).decode()}", meta)

    for name, meta in {"text": b"no json", "list": b"[]", "empty": b"{}", "odd": b'{"name":7,"size":"x"}'}.items():
        client.run(junk(name, meta))
        message = client.ask(f"tools.default.{ECHO}", b"", {"Broker-Object": name}, seconds=10)
        assert json.loads(message.data)["type"] == "bad_request", name
    for name in ("", "a b", "x" * 2000, ">"):
        message = client.ask(f"tools.default.{ECHO}", b"", {"Broker-Object": name or " "}, seconds=10)
        assert json.loads(message.data)["type"] == "bad_request", name
    broker.eventually(lambda: idle(broker))


def test_a_request_by_reference_is_there_again_until_it_has_run(broker, client, store):
    wrong, right = b'{"inputs":{},"inputs":{}}', b'{"inputs":{"n":1}}'
    large = b'{"inputs":{"text":"' + b"x" * 3_000_001 + b'"}}'
    for name, data in (("wrong", wrong), ("right", right), ("large", large)):
        client.run(store.put(name, data))
    for _ in range(2):
        for name, words in (("wrong", "twice"), ("large", "3000000")):
            message = client.ask(f"tools.default.{ECHO}", b"", {"Broker-Object": name})
            assert words in json.loads(message.data)["error"]
    assert json.loads(client.ask(f"tools.default.{ECHO}", b"", {"Broker-Object": "right"}).data)["ok"]

    def gone() -> bool:
        message = client.ask(f"tools.default.{ECHO}", b"", {"Broker-Object": "right"})
        return not json.loads(message.data)["ok"]

    broker.eventually(gone)


def test_objects_whose_bucket_is_gone_are_not_there_and_a_new_one_is_made(client, store):
    assert store

    async def wipe() -> None:
        await client.nats.jetstream().delete_object_store("broker_default_objects")

    client.run(wipe())
    message = client.ask(f"tools.default.{ECHO}", b"", {"Broker-Object": "x"}, seconds=10)
    assert json.loads(message.data)["type"] == "bad_request"
    client.run(wipe())
    ask = {"inputs": {"bytes": 1_048_000}}
    message = client.ask("tools.default.AID.DEMO.BLOB.v1", ask, {"Broker-Accept-Object": "1"}, seconds=10)
    assert message.headers.get("Broker-Object"), message.data[:200]


def test_a_flood_of_messages_is_answered_to_the_last_one(broker, client):
    """Far more than any bound, and as fast as they come: each has its answer, and the next caller finds us well."""
    count = 20_000

    async def flood() -> tuple[int, int]:
        inbox = client.nats.new_inbox()
        subscription = await client.nats.subscribe(inbox)
        for _ in range(count):
            await client.nats.publish(f"tools.default.{ECHO}", b'{"inputs":{"n":1}}', reply=inbox)
        good = 0
        for _ in range(count):
            message = await subscription.next_msg(20)
            good += message.data.startswith(b'{"ok":true')
        return good, subscription.pending_msgs

    begun = time.monotonic()
    good, more = client.run(flood(), 60)
    assert more == 0
    assert good > 0
    assert json.loads(client.ask(f"tools.default.{ECHO}", {}).data)["ok"]
    assert time.monotonic() - begun < 40
    broker.eventually(lambda: idle(broker))
