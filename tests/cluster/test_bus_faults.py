"""NATS that throws us out, has no JetStream, forbids things or is at one of several addresses: told, and survived."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.nats import NatsServer

ECHO = "AID.DEMO.ECHO.v1"


def access(password: str) -> str:
    return f'authorization {{ user: "me", password: "{password}" }}'


def connected(broker) -> bool:
    return bool(broker.status()["cluster"]["connected"])


def test_a_password_that_is_changed_and_changed_back_keeps_nobody_out_for_ever(start, where, tmp_path: Path):
    server = NatsServer(tmp_path / "nats", settings=access("one")).start()
    url = f"nats://me:one@127.0.0.1:{server.port}"
    try:
        broker = start("--nats", url, "--plugin", where["demo_plugin"])
        broker.eventually(lambda: connected(broker))
        server.change(access("two"))  # the server asks everybody again, and throws out who is not known any more
        broker.eventually(lambda: not connected(broker))
        time.sleep(0.5)
        assert broker.call(ECHO, n=1)["ok"]
        server.change(access("one"))
        broker.eventually(lambda: connected(broker), 15)
        assert broker.ask({"aid": ECHO, "inputs": {}, "idempotency_key": "k"})["ok"]
        text = broker.log.read_text()
        assert "uthorization" in text
        assert text.count("uthorization") < 10
        assert "one@" not in text
        assert broker.stop() == 0
    finally:
        server.stop()


def test_a_server_without_jetstream_is_told_apart_from_one_that_is_away(start, where, tmp_path: Path):
    with NatsServer(tmp_path / "nats", jetstream=False) as server:
        config = "[nats]\nwait_seconds = 0.5"
        broker = start("--nats", server.url, "--plugin", where["demo_plugin"], config=config)
        broker.eventually(lambda: connected(broker))
        refused = broker.ask({"aid": ECHO, "inputs": {}, "idempotency_key": "k"})
        assert refused["type"] == "unavailable"
        assert "JetStream" in refused["error"]
        assert broker.call(ECHO, n=1)["ok"]


def test_more_replicas_than_servers_are_named_as_the_reason(start, where, nats):
    config = '[nats]\nwait_seconds = 0.5\nreplicas = 3\ncluster = "three"'
    broker = start("--nats", nats.url, "--plugin", where["demo_plugin"], config=config)
    broker.eventually(lambda: connected(broker))
    refused = broker.ask({"aid": ECHO, "inputs": {}, "idempotency_key": "k"})
    assert refused["type"] == "unavailable"
    assert "replicas" in refused["error"]


def test_one_of_several_servers_is_enough(start, where, nats, tmp_path: Path):
    dead = NatsServer(tmp_path / "dead").start()
    dead.stop()
    url = f"{dead.url},{nats.url},nats://127.0.0.1:1"
    broker = start("--nats", url, "--plugin", where["demo_plugin"])
    broker.eventually(lambda: connected(broker))
    nats.kill()
    broker.eventually(lambda: not connected(broker))
    dead.start()
    broker.eventually(lambda: connected(broker), 15)
    dead.stop()


@pytest.mark.parametrize("url", ["http://127.0.0.1:4222", "nats://127.0.0.1:hello", "nats://", "nats://a:1,,", "a b"])
def test_an_address_that_is_none_is_refused_at_the_start(url, tmp_path: Path):
    command = [sys.executable, "-m", "broker", "serve", "--socket", str(tmp_path / "s"), "--nats", url]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=10)
    assert said.returncode == 2, said.stderr
    assert "nats.url" in said.stderr
    assert "nats://HOST:PORT" in said.stderr
    assert "Traceback" not in said.stderr


def test_what_is_forbidden_is_told_without_end_of_lines(start, where, tmp_path: Path):
    settings = """authorization { users: [ { user: "me", password: "one", permissions: {
        publish: { deny: ["broker_members.>", "$JS.>", "$KV.>"] }, subscribe: { deny: ["$SRV.>", "broker_calls.>"] }
    } } ] }"""
    with NatsServer(tmp_path / "nats", settings=settings) as server:
        url = f"nats://me:one@127.0.0.1:{server.port}"
        broker = start("--nats", url, "--plugin", where["demo_plugin"], config="[nats]\nwait_seconds = 0.5")
        broker.eventually(lambda: connected(broker))
        assert broker.ask({"aid": ECHO, "inputs": {}, "idempotency_key": "k"})["type"] == "unavailable"
        time.sleep(3.0)
        text = broker.log.read_text()
        assert re.search(r"(?i)permissions violation for publish to ..?broker_members", text)
        assert len(text.splitlines()) < 40, text
        assert broker.call(ECHO, n=1)["ok"]
