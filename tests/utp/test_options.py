"""Options of tools in broker.toml: what callers of every face need not give, may not give, and do not get to see."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import Embedded
from broker.client.failures import CallFailed
from tests.conftest import Brokers, Served, Start
from tests.support.command import broker_command
from tests.support.config import toolhost
from tests.support.event_tools import Tools
from tests.support.http import Web
from tests.support.python_app import python_app, python_config

SECRET = 's3cret/"value"-0123456789'
FORMS = {SECRET, json.dumps(SECRET)[1:-1], json.dumps(json.dumps(SECRET))[3:-3], SECRET.replace("/", "\\/")}
ECHO = "AID.DEMO.ECHO.v1"

APP = """
import os, sys

def show(payload):
    return {"seen": payload, "length": len(payload["api_key"])}

def boom(payload):
    raise RuntimeError("the key " + payload["api_key"] + " is wrong")

def die(payload):
    print("last words:", payload["api_key"], file=sys.stderr, flush=True)
    os._exit(3)
"""

SCHEMA = """
[tool.schema]
type = "object"
additionalProperties = false
required = ["q", "session_id", "project_id", "api_key"]
[tool.schema.properties]
q = { type = "string" }
session_id = { type = ["string", "null"] }
project_id = { type = "string" }
api_key = { type = "string", maxLength = 3 }
"""
OPTIONS = """
[tool.options]
args.defaults = { session_id = "none" }
args.fixed = { project_id = "fixed" }
envs = { api_key = " SEARCH_API_KEY " }
"""


def card(name: str, *more: str) -> str:
    return "\n".join([f'[[tool]]\nname = "{name}"', *more, OPTIONS])


class Stage:
    def __init__(self, served: Served, folder: Path) -> None:
        self.served = served
        self.web = Web(served.ready)
        self.folder = folder

    def call(self, aid: str, inputs: Any, **more: Any) -> dict[str, Any]:
        return self.served.ask({"aid": aid, "input_json": json.dumps(inputs), **more})

    def written(self) -> str:
        files = (one for one in self.folder.rglob("*") if one.is_file() and one.name != "config.toml")
        return "".join(one.read_bytes().decode(errors="replace") for one in files)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, where: dict[str, str]) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("options")
    brokers = Brokers(folder)
    tools = Tools(folder)
    config = (
        toolhost("demo", where["demo_plugin"])
        + python_config(python_app(folder / "app", APP, "options"), "show", "boom", "die", module="options")
        + tools.tool("telling", "say('log', level='info', message=given.decode()); say('done', ok=True, summary='ok')")
        + card(ECHO, SCHEMA)
        + "".join(card(name) for name in ("show", "boom", "die", "telling"))
        + '[[tool]]\nname = "AID.DEMO.WORD_COUNT.v1"\n[tool.options]\nenvs = { text = "NOT_SET" }\n'
        + '[[tool]]\nname = "AID.DEMO.COUNTER.v1"\n[tool.options]\nenvs = { a = "BROKER_NATS_WAIT_SECONDS" }\n'
    )
    env = {"SEARCH_API_KEY": SECRET, "BROKER_NATS_WAIT_SECONDS": "5.0"}
    yield Stage(brokers.start("--http", "127.0.0.1:0", config=config, env=env), folder)
    brokers.end()


def output(reply: dict[str, Any]) -> Any:
    assert reply["ok"], reply
    return json.loads(reply["output_json"])


def test_the_tool_is_given_what_its_options_say(stage: Stage) -> None:
    said = output(stage.call("show", {"q": "x"}))
    assert said["length"] == len(SECRET)
    assert said["seen"] == {"session_id": "none", "q": "x", "project_id": "fixed", "api_key": "[hidden]"}


@pytest.mark.parametrize("mine", [{"session_id": "s"}, {"session_id": None}])
def test_what_the_caller_gives_wins_over_a_default_null_too(stage: Stage, mine: dict[str, Any]) -> None:
    assert output(stage.call("show", mine))["seen"]["session_id"] == mine["session_id"]


def test_what_is_fixed_or_comes_from_a_variable_is_not_the_callers_to_give(stage: Stage) -> None:
    said = output(stage.call("show", {"project_id": "mine", "api_key": "mine"}))
    assert (said["seen"]["project_id"], said["length"]) == ("fixed", len(SECRET))


def test_numbers_that_pass_are_not_rewritten(stage: Stage) -> None:
    text = '{"q":"x","session_id":null}'
    reply = stage.served.ask({"aid": "show", "input_json": '{"big":123456789012345678901234567890,"f":1.0}'})
    assert json.loads(reply["output_json"])["seen"]["big"] == 123456789012345678901234567890
    assert stage.served.ask({"aid": ECHO, "input_json": text})["ok"]


def test_the_published_schema_shows_what_a_caller_may_give(stage: Stage) -> None:
    tools = stage.web.get("/v1/tools").json["tools"]
    schema = next(one["input_schema"] for one in tools if one["name"] == ECHO)
    assert set(schema["properties"]) == {"q", "session_id"}
    assert schema["properties"]["session_id"]["default"] == "none"
    assert schema["required"] == ["q"]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [({}, '"q" is a required'), ({"q": 5}, "input.q"), ({"q": "x", "z": 1}, "'z'"), ([], "object"), ("x", "object")],
)
def test_what_a_caller_gives_has_to_fit_that_schema(stage: Stage, inputs: Any, words: str) -> None:
    reply = stage.call(ECHO, inputs)
    assert (reply["ok"], reply["type"]) == (False, "bad_request")
    assert words in reply["error"]
    assert stage.web.execute(ECHO, inputs).status == 400


def test_input_that_is_not_json_is_refused(stage: Stage) -> None:
    for text in ("{", "[" * 100_000, '{"a":1} x'):
        assert stage.served.ask({"aid": "show", "input_json": text})["type"] == "bad_request"


@pytest.mark.parametrize(("aid", "variable"), [("AID.DEMO.WORD_COUNT.v1", "NOT_SET"),
                                               ("AID.DEMO.COUNTER.v1", "BROKER_NATS_WAIT_SECONDS")])  # fmt: skip
def test_a_variable_without_a_value_or_of_the_brokers_own_is_a_refusal(stage: Stage, aid: str, variable: str) -> None:
    reply = stage.call(aid, {})
    assert (reply["ok"], reply["type"]) == (False, "unavailable")
    assert variable in reply["error"]
    assert "5.0" not in reply["error"]
    assert f'"variable":"{variable}"' in stage.served.log.read_text()


def test_tools_without_options_are_left_alone(stage: Stage) -> None:
    reply = stage.served.ask({"aid": "AID.DEMO.BLOB.v1", "input_json": '{"bytes": 10}'})
    assert reply["ok"]


def test_the_value_is_seen_by_the_tool_and_by_nobody_else(stage: Stage) -> None:
    """Not by callers of any face, nor under keys, in jobs, logs, the status or error texts."""
    web, served = stage.web, stage.served
    key = {"idempotency_key": "one"}
    seen = [
        *(stage.call(aid, {"q": "x"}) for aid in (ECHO, "show", "boom", "die", "telling")),
        stage.call("show", {"q": "x"}, **key),
        stage.call("show", {"q": "x"}, **key),
        stage.call("boom", {"q": "x"}, **key),
        stage.call("boom", {"q": "x"}, **key),
        web.execute("show", {"q": "x"}).json,
        web.execute("boom", {"q": "x"}).json,
        web.execute("die", {"q": "x"}).json,
        web.ask("POST", "/v1/jobs", {"tool_name": "show", "input": {"q": "x"}, "mode": "sync"}).json,
        web.ask("POST", "/tools", {"tool_name": "boom", "payload": {"q": "x"}}).json,
        web.get("/v1/tools").json,
        web.get("/status").json,
        web.get("/metrics").body.decode(),
        served.status(),
        served.ask({"aid": "_tools"}),
    ]
    with served.wire() as wire:
        wire.send({"id": 1, "aid": "telling", "inputs": {"q": "x"}, "stream": True})
        seen.append([wire.reply() for _ in range(2)])
    for _ in range(6):  # until its breaker opens, and quotes what it said last
        seen.append(stage.call("die", {"q": "x"}))
    assert seen[-1]["type"] == "breaker_open"
    seen.append(broker_command(stage.folder, "status", "--socket", served.path).stdout)
    seen.append(stage.written())
    text = "\n".join(one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in seen)
    assert "[hidden]" in text
    for form in FORMS:
        assert form not in text


def test_options_change_with_a_reload(start: Start, where: dict[str, str], tmp_path: Path) -> None:
    served = start(config=toolhost("demo", where["demo_plugin"]))
    assert output(served.call(ECHO)) == {}
    file = tmp_path / "broker0.toml"
    file.write_text(file.read_text() + f'[[tool]]\nname = "{ECHO}"\n[tool.options.args]\nfixed = {{ a = 1 }}\n')
    with served.operator() as wire:
        assert wire.ask({"aid": "_reload"})["ok"]
    assert output(served.call(ECHO, b=2)) == {"b": 2, "a": 1}


def test_an_embedded_broker_does_the_same(where: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(toolhost("demo", where["demo_plugin"]) + card(ECHO, SCHEMA))
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SEARCH_API_KEY": SECRET}
    with Embedded(file=str(file), environ=environ) as tools:
        said = tools.call(ECHO, {"q": "x"}).output
        assert said == {"session_id": "none", "q": "x", "project_id": "fixed", "api_key": "[hidden]"}
        with pytest.raises(CallFailed, match=r"input\.q"):
            tools.call(ECHO, {"q": 5})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("args = 5", "args"),
        ("args.fix = { a = 1 }", "did you mean `fixed`"),
        ("envs = { a = 5 }", "envs"),
        ("envs = { a = '' }", "envs"),
        ("envs = { a = 'A B' }", "envs"),
        ("other = 1", "no setting `other`"),
    ],
)
def test_a_mistake_in_options_stops_the_start(tmp_path: Path, options: str, words: str) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(f'[[tool]]\nname = "{ECHO}"\n[tool.options]\n{options}\n')
    done = broker_command(tmp_path, "serve", "--config", str(file), "--check")
    assert done.returncode != 0
    assert words in done.stderr


def test_a_manifest_beside_a_plugin_has_no_say_in_it(tmp_path: Path, where: dict[str, str]) -> None:
    """A plugin's author does not get to name variables of ours."""
    plugin = tmp_path / "mine.so"
    plugin.write_bytes(Path(where["demo_plugin"]).read_bytes())
    (tmp_path / "mine.tools.json").write_text(json.dumps({"tools": {ECHO: {"options": {"envs": {"a": "HOME"}}}}}))
    done = broker_command(tmp_path, "serve", "--plugin", str(plugin), "--check")
    assert done.returncode != 0
    assert "options stand in broker.toml" in done.stderr
