"""Values from the environment reach the tool, and nobody else: not cards, reports, streams, logs or the status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.observe.hidden import INSTEAD, Hidden
from tests.conftest import Served
from tests.support.commonground import Row
from tests.support.postgres import PostgresServer
from tests.utp.conftest import Make, Stage
from tests.utp.test_faults import told

SECRET = 'tok-"quoted"\\é-4711'
OTHER = "another-secret-0815"
OPTIONS = {"envs": {"api_key": "SEARCH_API_KEY"}}
FORMS = [SECRET, OTHER, json.dumps(SECRET)[1:-1], json.dumps(SECRET, ensure_ascii=False)[1:-1], "4711", "0815"]


def define(stage: Stage, options: Row, tool: str = "oracle") -> None:
    row = {"project_id": "proj_v", "tool_name": tool, "parameters": json.dumps({}), "options": json.dumps(options)}
    stage.tables.insert(stage.tables.tools, row)


def streams(stage: Stage) -> str:
    """All messages of all streams, keys and commands."""
    client = stage.project.client

    async def read() -> str:
        js = client.nats.jetstream()
        texts = []
        for info in await js.streams_info():
            for number in range(1, info.state.last_seq + 1):
                try:
                    message = await js.get_msg(info.config.name, number)
                except Exception:  # it has been deleted
                    continue
                texts.append(f"{message.subject} {message.headers} {(message.data or b'').decode(errors='replace')}")
        return "\n".join(texts)

    return str(client.run(read()))


def everything(stage: Stage, broker: Served) -> dict[str, str]:
    """All that was written, by where."""
    folder = Path(broker.path).parent
    files = {
        str(file): file.read_bytes().decode(errors="replace")
        for file in folder.rglob("*")
        if file.is_file() and not {"app", "nats"} & set(file.relative_to(folder).parts)
    }
    return {
        "tables": stage.tables.everything(),
        "streams": streams(stage),
        "status": json.dumps(broker.status(), ensure_ascii=False),
        **files,
    }


@pytest.mark.parametrize("sqlite", [True, False])
def test_no_value_from_the_environment_is_found_in_anything_that_was_written(make: Make, sqlite: bool) -> None:
    stage = make(sqlite)
    env = {"SEARCH_API_KEY": SECRET, "THEIR_KEY": OTHER}
    broker = stage.serving(stage.start("", "--http", "127.0.0.1:0", env=env, envs="{ token = 'THEIR_KEY' }"))
    define(stage, OPTIONS)
    said = {"api_key": "what the model made up"}
    stage.project.ask("echoed", {**said, "do": "echo"})
    assert told(stage, "echoed")["result"] == {"do": "echo", "api_key": INSTEAD, "token": INSTEAD}
    stage.project.ask("complained", {**said, "do": "complain"})
    assert told(stage, "complained")["error"]["message"] == f"the key {INSTEAD} is wrong"
    stage.project.ask("died", {**said, "do": "die"})
    assert f"last words: {INSTEAD}" in told(stage, "died")["error"]["message"]
    stage.project.ask("late", {**said, "do": "sleep", "seconds": 5}, "impatient", tool_name="oracle")
    assert told(stage, "late")["status"] == "timeout"
    stage.project.ask("flawed", {**said, "do": "echo"}, args={})
    told(stage, "flawed")
    for place, text in everything(stage, broker).items():
        for form in FORMS:
            assert form not in text, f"{form} is in {place}"
    assert INSTEAD in broker.log.read_text()


def test_the_tool_itself_gets_the_value_and_the_service_s_word_is_stronger(make: Make) -> None:
    stage = make(sqlite=True)
    stage.serving(stage.start(env={"A": "a-value-of-a", "B": "a-value-of-b"}, envs="{ api_key = 'B' }"))
    define(stage, {"envs": {"api_key": "A"}})
    stage.project.ask("tc", {"do": "measure"})
    assert told(stage, "tc")["result"] == {"api_key": [12, "b"]}


def test_a_variable_without_a_value_is_named_and_nothing_runs(make: Make) -> None:
    stage = make(sqlite=True)
    stage.serving(stage.start())
    define(stage, OPTIONS)
    stage.project.ask("tc", {"id": "tc"})
    error = told(stage, "tc")["error"]
    assert (error["code"], "SEARCH_API_KEY" in error["message"]) == ("internal_error", True)
    assert stage.runs("tc") == 0


@pytest.mark.parametrize("variable", ["PGPASSWORD", "BROKER_UTP_DSN"])
def test_our_own_passwords_are_lent_to_nobody(
    postgres_server: PostgresServer,  # noqa: ARG001
    make: Make,
    variable: str,
) -> None:
    stage = make()
    stage.serving(stage.start(env={"PGPASSWORD": "a-password-of-ours", "BROKER_UTP_DSN": stage.tables.dsn}))
    define(stage, {"envs": {"api_key": variable}})
    stage.project.ask("tc", {"do": "echo"})
    assert variable in told(stage, "tc")["error"]["message"]


def test_what_is_hidden_is_hidden_in_every_form_that_json_has() -> None:
    hidden = Hidden()
    assert hidden.json('{"a": 1.10}') == '{"a": 1.10}'
    hidden.add("no")  # too short to be one
    hidden.add('se"cr\\et')
    hidden.add("ünïcode-value")
    hidden.add("123456")
    assert hidden.text('a se"cr\\et and se\\"cr\\\\et') == f"a {INSTEAD} and {INSTEAD}"
    text = r'{"no":["se\u0022cr\\et","\u00fcn\u00efcode-value",123456,"x123456x"],"k123456":null}'
    shown = json.loads(hidden.json(text))
    assert shown == {"no": [INSTEAD, INSTEAD, INSTEAD, f"x{INSTEAD}x"], f"k{INSTEAD}": None}
    assert hidden.json('{"untouched": 1.10}') == '{"untouched": 1.10}'
    assert "cr" not in hidden.text(repr('se"cr\\et') + repr(b'se"cr\\et'))
    assert hidden.json("123456 is no JSON {") == f"{INSTEAD} is no JSON {{"


def test_a_log_hides_what_it_is_told_to_and_values_are_forgotten_when_there_are_too_many() -> None:
    hidden = Hidden()
    for number in range(3000):
        hidden.add(f"value-{number:05}-")
    assert hidden.text("value-02999-") == INSTEAD
    assert hidden.text("value-00001-") == "value-00001-"
