"""The connection to NATS: looked for until it is there, and again, without hurry."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import time
from pathlib import Path

from broker.bus import Bus
from broker.observe.log import Log
from tests.support.nats import NatsServer


async def _until(check, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


def test_a_server_that_comes_late_goes_away_and_comes_back(tmp_path: Path):
    server = NatsServer(tmp_path).start()
    server.kill()
    told = io.StringIO()
    connections = []

    async def listener():
        connections.append(time.monotonic())
        raise KeyError("a listener's mistake")

    async def scenario():
        bus = Bus(server.url, "test", Log(told))
        bus.on_connect(listener)
        joining = asyncio.create_task(bus.start())
        await asyncio.sleep(1.0)
        assert not bus.connected
        server.start()
        await _until(lambda: bus.connected and len(connections) == 1)
        server.kill()
        await _until(lambda: not bus.connected)
        await asyncio.sleep(1.5)
        server.start()
        await _until(lambda: bus.connected and len(connections) == 2)
        await joining
        await bus.stop()

    try:
        asyncio.run(scenario())
    finally:
        server.stop()
    text = told.getvalue()
    assert text.count("nats connected") == 2
    assert text.count("nats is away") == 1
    assert text.count("Connect call failed") == 2, "a problem is told once, as long as it is the same"


def test_what_is_secret_in_an_address_is_not_shown():
    bus = Bus("nats://me:word@one:4222,tls://token@two:4222,three", "test", Log(io.StringIO()))
    assert bus.place == "nats://one:4222,tls://two:4222,three"


def test_a_configuration_is_explained_without_its_passwords(tmp_path: Path):
    file = tmp_path / "broker.toml"
    file.write_text('[nats]\nurl = "nats://me:word@one:4222"\n[utp]\ndsn = "postgresql://me:word@two/cards"\n')
    command = [sys.executable, "-m", "broker", "serve", "--check", "--config", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert said.returncode == 0, said.stderr
    assert "word" not in said.stdout.replace("AID.DEMO.WORD_COUNT.v1", "").replace("password", "")
    assert "nats://one:4222" in said.stdout
    assert "postgresql://two/cards" in said.stdout


def test_a_broker_whose_nats_has_just_died_ends_in_good_order(start, where, nats):
    broker = start("--nats", nats.url, "--plugin", where["demo_plugin"])
    broker.eventually(lambda: broker.status()["cluster"]["connected"])
    nats.kill()
    assert broker.stop() == 0
    assert "Traceback" not in broker.log.read_text()
