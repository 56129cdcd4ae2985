"""Every kind of tool, through every face, gives the same answer."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import AsyncClient, Client, Embedded
from tests.conftest import Brokers, Served, Wire
from tests.support.http import Web
from tests.support.nats import Client as NatsClient
from tests.support.nats import NatsServer

COMMAND = """#!{python}
import json, sys
given = json.loads(json.load(sys.stdin)["input_json"])
print(json.dumps({{"ok": True, "status": "OK", "output_json": json.dumps({{"n": given["n"] + 1}}), "error": ""}}))
"""
EVENTS = """#!{python}
import json, sys
given = json.loads(sys.stdin.readline())["input"]
print(json.dumps({{"version": "0", "type": "state_patch", "patch": {{"n": given["n"] + 1}}}}))
print(json.dumps({{"version": "0", "type": "done", "ok": True}}))
"""
PYTHON = "def add(payload):\n    return {'n': payload['n'] + 1}\n"

SERVED, ONESHOT, FUNCTION, EVENT = "AID.DEMO.ECHO.v1", "AID.ADD.v1", "add", "tell"
TOOLS = (SERVED, ONESHOT, FUNCTION, EVENT)
WITHOUT_DAEMON = (SERVED, ONESHOT, EVENT)


def _right(name: str, output: Any) -> bool:
    """What the tool of this name makes of {"n": 1}."""
    if name == EVENT:
        return output["verdict"] == "success" and output["state"] == {"n": 2} and len(output["events"]) == 2
    return output == {"n": 1 if name == SERVED else 2}


def _events(name: str) -> int:
    """How many it tells while it runs."""
    return 2 if name == EVENT else 0


class World:
    """One configuration, as a daemon with all its faces, and as text for those who have no daemon."""

    def __init__(self, folder: Path, where: dict[str, str]) -> None:
        command, events = folder / "command.py", folder / "events.py"
        for path, text in ((command, COMMAND), (events, EVENTS)):
            path.write_text(text.format(python=sys.executable))
            path.chmod(0o755)
        app = folder / "app"
        app.mkdir()
        (app / "own.py").write_text(PYTHON)
        self.app = str(app)
        self.config = f"""
            [[toolhost]]
            name = "demo"
            plugins = ["{where["demo_plugin"]}"]
            [[oneshot]]
            name = "{ONESHOT}"
            command = ["{command}"]
            [[events]]
            name = "{EVENT}"
            command = ["{events}"]
            [[python]]
            app_root = "{app}"
            tools = [{{ name = "{FUNCTION}", entry = "own:add" }}]
            """
        self.file = folder / "all.toml"
        self.file.write_text(self.config)
        self.brokers = Brokers(folder)
        flags = ("--tcp", "127.0.0.1:0", "--http", "127.0.0.1:0")
        self.broker: Served = self.brokers.start(*flags, config=self.config)
        self.web = Web(self.broker.ready)
        tcp = next(word for word in self.broker.ready.split() if word.startswith("tcp:"))
        host, _, port = tcp.removeprefix("tcp:").rpartition(":")
        self.tcp = (host, int(port))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, where: dict[str, str]) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("every"), where)
    yield made
    made.brokers.end()


@pytest.mark.parametrize("name", TOOLS)
def test_over_the_sockets(world, name):
    for wire in (world.broker.wire(), Wire(world.tcp)):
        with wire:
            reply = wire.ask({"id": 7, "aid": name, "inputs": {"n": 1}})
            assert (reply["id"], reply["ok"], reply["status"]) == (7, True, "OK")
            assert _right(name, json.loads(reply["output_json"]))
            wire.send({"id": 8, "aid": name, "inputs": {"n": 1}, "stream": True})
            *events, last = wire.replies(_events(name) + 1)
            assert all(one["id"] == 8 and "event" in one for one in events)
            assert _right(name, json.loads(last["output_json"]))


@pytest.mark.parametrize("name", TOOLS)
def test_over_autosages_http(world, name):
    answer = world.web.execute(name, {"n": 1})
    assert (answer.status, answer.json["status"], answer.json["solver"]) == (200, "ok", name)
    assert _right(name, answer.json["output"])
    made = world.web.ask("POST", "/v1/jobs", {"tool_name": name, "input": {"n": 1}, "mode": "sync", "wait_ms": 10000})
    assert made.json["status"] == "succeeded"
    assert _right(name, made.json["job"]["result"]["output"])


@pytest.mark.parametrize("name", TOOLS)
def test_as_server_sent_events(world, name):
    asked = {"tool": name, "input": {"n": 1}}
    answer = world.web.ask("POST", "/v1/tools/execute", asked, {"accept": "text/event-stream"})
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    parts = [dict(line.split(": ", 1) for line in part.split("\n")) for part in answer.body.decode().split("\n\n")[:-1]]
    assert [part["event"] for part in parts] == ["event"] * _events(name) + ["result"]
    assert _right(name, json.loads(parts[-1]["data"])["output"])


@pytest.mark.parametrize("name", TOOLS)
def test_over_namel3ss_http(world, name):
    request = {"tool_name": name, "kind": "python", "payload": {"n": 1}, "protocol_version": 1, "timeout_ms": 10000}
    if name == FUNCTION:
        request |= {"entry": "own:add", "project": {"app_root": world.app}}
    answer = world.web.ask("POST", "/tools", request)
    assert (answer.status, answer.json["ok"]) == (200, True), answer.body
    assert _right(name, answer.json["result"])


@pytest.mark.parametrize("name", TOOLS)
def test_with_the_clients(world, name):
    with Client(world.broker.path) as client:
        assert _right(name, client.call(name, {"n": 1}).output)

    async def ask() -> tuple[Any, Any]:
        async with AsyncClient(world.broker.path) as client:
            stream = client.stream(name, {"n": 1})
            events = [event.type async for event in stream]
            assert events == (["state_patch", "done"] if name == EVENT else [])
            return (await client.call(name, {"n": 1})).output, stream.reply.output

    assert all(_right(name, output) for output in asyncio.run(ask()))


def test_embedded(world):
    with Embedded(file=str(world.file)) as tools:
        for name in WITHOUT_DAEMON:
            assert _right(name, tools.call(name, {"n": 1}).output), name
        assert {tool["aid"] for tool in tools.tools()} >= set(WITHOUT_DAEMON)


@pytest.fixture(scope="module")
def nats(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsClient]:
    """A plain NATS client, beside a broker of the same configuration."""
    folder = tmp_path_factory.mktemp("nats")
    with NatsServer(folder) as server:
        brokers = Brokers(folder)
        broker = brokers.start("--nats", server.url, config=world.config)
        client = NatsClient(server.url)
        broker.eventually(lambda: _serves_all(client))
        yield client
        client.close()
        brokers.end()


def _serves_all(client: NatsClient) -> bool:
    try:
        return any(len(one["endpoints"]) >= len(TOOLS) for one in client.services("INFO", 0.1))
    except json.JSONDecodeError:  # nobody is there yet
        return False


@pytest.mark.parametrize("name", TOOLS)
def test_over_nats(nats, name):
    reply = nats.call(name, inputs={"n": 1})
    assert (reply["ok"], reply["status"]) == (True, "OK")
    assert _right(name, json.loads(reply["output_json"]))
    asked = {"id": 9, "inputs": {"n": 1}, "stream": True}
    *events, last = nats.gather(f"tools.default.{name}", asked, lambda message: "ok" in json.loads(message.data))
    assert [json.loads(one.data)["event"]["type"] for one in events] == ["state_patch", "done"][: _events(name)]
    assert _right(name, json.loads(json.loads(last.data)["output_json"]))


@pytest.mark.parametrize("name", TOOLS)
def test_on_the_command_line(world, name):
    command = [sys.executable, "-m", "broker", "call", "--socket", world.broker.path, name, '{"n":1}']
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert _right(name, json.loads(ended.stdout))


@pytest.mark.parametrize("daemon", [True, False])
def test_through_the_drop_in(world, daemon):
    """`machina_dispatch`, in this process or with the daemon."""
    names = TOOLS if daemon else WITHOUT_DAEMON
    script = (
        "import json, sys\nfrom machina_dispatch import run_machina_toolhost as run\n"
        f"print(json.dumps([run(name, {{'n': 1}}) for name in {list(names)!r}]))"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("BROKER_", "MACHINA_"))}
    environment |= {"MACHINA_BROKER_SOCKET": world.broker.path} if daemon else {"BROKER_CONFIG": str(world.file)}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    answers = json.loads(ended.stdout)
    assert all(_right(name, json.loads(answer)) for name, answer in zip(names, answers, strict=True)), answers
