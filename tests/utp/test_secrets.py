"""From a definition to a result: options that go with a call, and values of variables that nobody gets to read.

A definition is posted as CommonGround's management clients do it, and called as its workers call.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Brokers, Served
from tests.support.commonground import Project, SQLite, Tables
from tests.support.http import Web
from tests.support.nats import Client, NatsServer
from tests.support.python_app import python_app, python_config
from tests.support.upstream import Asked, Upstream, http
from tests.utp.conftest import database
from tests.utp.test_manage import PROJECT, add_project, post

KEY, OTHER = "jina-0123456789-abcdef", "other/0123456789+abcdef"

APP = """
import os, sys

def show(payload):
    if payload.get("do") == "boom":
        raise ValueError("the key " + payload["api_key"] + " is wrong")
    if payload.get("do") == "die":
        print("last words:", payload["api_key"], file=sys.stderr, flush=True)
        os._exit(3)
    return payload
"""

DEFINITION = """
tool_name: {name}
target_subject: cg.v1r3.{{project_id}}.{{channel_id}}.cmd.tool.{target}.call
after_execution: suspend
parameters: {{type: object, properties: {{q: {{type: string}}, api_key: {{type: string}}}}}}
options: {options}
"""


class Stage:
    def __init__(self, served: Served, tables: Tables, upstream: Upstream, client: Client, folder: Path) -> None:
        self.served = served
        self.web = Web(served.ready)
        self.tables = tables
        self.upstream = upstream
        self.folder = folder
        add_project(tables)
        self.project = Project(tables, client, PROJECT)

    def define(self, name: str, options: str, target: str = "jina") -> None:
        answer = post(self.web, DEFINITION.format(name=name, target=target, options=options))
        assert answer.status == 201, answer.body

    def call(self, call: str, name: str, arguments: dict[str, Any], target: str = "jina") -> dict[str, Any]:
        """The result card's content."""
        self.project.put_call(call, arguments, name)
        self.project.put_edge(call)
        self.project.say(self.project.command(call, target, tool_name=name), target)
        self.served.eventually(lambda: bool(self.project.reports(call)))
        return self.project.results(call)[0]["content"]

    def written(self) -> str:
        files = (one for one in self.folder.rglob("*") if one.is_file())
        return self.tables.everything() + "".join(one.read_bytes().decode(errors="replace") for one in files)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("secrets")
    tables: Tables = SQLite(folder / "utp.sqlite3")
    if request.param == "postgres":
        tables = database(request.getfixturevalue("postgres_server"))
    upstream, brokers = Upstream(), Brokers(folder)
    config = (
        python_config(python_app(folder / "app", APP, "shows"), "show", module="shows")
        + f"[jina]\ntools = ['web']\nsearch = '{upstream.url}'\nreader = '{upstream.url}'\n"
        + f"[utp]\nstore = '{tables.kind}'\ndsn = '{tables.dsn}'\nvariables = ['*_KEY']\n"
        + "[utp.targets]\njina = 'web'\nshow = { tool = 'show', envs = { service_key = 'OTHER_KEY' } }\n"
    )
    with NatsServer(folder / "nats") as nats:
        client = Client(nats.url)
        flags = ("--nats", nats.url, "--http", "127.0.0.1:0")
        env = {"JINA_API_KEY": KEY, "OTHER_KEY": OTHER, "PRIVATE": "private-0123456789"}
        served = brokers.start(*flags, config=config, env=env)
        served.eventually(lambda: all(one["state"] == "serving" for one in served.status()["utp"]["targets"]))
        yield Stage(served, tables, upstream, client, folder)
        client.close()
        brokers.end()
    upstream.close()


def test_a_defined_search_is_asked_as_its_options_say(stage: Stage) -> None:
    stage.define("search", "{jina: {mode: search, base_url: 'https://s.jina.ai', path: /search, method: GET}}")
    stage.upstream.answer = http(200, {"data": [{"title": "T"}]})
    content = stage.call("tc_search", "search", {"q": "to be"})
    assert (content["status"], content["result"]) == ("success", {"data": [{"title": "T"}]})
    assert stage.upstream.asked[-1].query == {"q": ["to be"]}
    assert stage.upstream.asked[-1].headers["authorization"] == f"Bearer {KEY}"


def test_one_target_serves_tools_with_other_options(stage: Stage) -> None:
    stage.define("read", "{jina: {mode: reader, method: POST, auth_env: OTHER_KEY}}")
    stage.upstream.answer = http(200, "# Title", "text/markdown")
    content = stage.call("tc_read", "read", {"url": "https://e.com"})
    assert content["result"] == {"data": "# Title"}
    assert json.loads(stage.upstream.asked[-1].body) == {"url": "https://e.com"}
    assert stage.upstream.asked[-1].headers["authorization"] == f"Bearer {OTHER}"


@pytest.mark.parametrize(
    ("status", "code", "number"),
    [(401, "auth_failed", 403), (404, "not_found", 404), (409, "conflict", 409), (429, "upstream_unavailable", 503),
     (500, "upstream_unavailable", 503), (400, "bad_request", 400)],
)  # fmt: skip
def test_an_unhappy_answer_is_a_failed_result(stage: Stage, status: int, code: str, number: int) -> None:
    stage.define("search", "{jina: {mode: search}}")
    stage.upstream.answer = http(status, {"message": "so it is"})
    content = stage.call(f"tc_{status}", "search", {"q": "x"})
    assert content["status"] == "failed"
    assert (content["error"]["code"], content["error"]["http_status"]) == (code, number)
    assert content["result"]["error_code"] == code
    assert "so it is" in content["error"]["message"]


@pytest.mark.parametrize(
    ("options", "arguments", "code", "words"),
    [
        ("{}", {"q": "x"}, "bad_request", "options have no jina"),
        ("{jina: {mode: search}}", {}, "bad_request", "needs an argument q"),
        ("{jina: {mode: search, base_url: 'https://evil.example'}}", {"q": "x"}, "bad_request", "may be asked"),
        ("{jina: {mode: search, auth_env: NO_KEY}}", {"q": "x"}, "auth_failed", "NO_KEY"),
        ("{jina: {mode: search, auth_env: PRIVATE}}", {"q": "x"}, "auth_failed", "PRIVATE"),
        ("{jina: {mode: search}, envs: {api_key: NO_KEY}}", {"q": "x"}, "internal_error", "NO_KEY"),
        ("{jina: {mode: search}, envs: {api_key: PRIVATE}}", {"q": "x"}, "internal_error", "PRIVATE"),
        ("{jina: {mode: search}, envs: {api_key: BROKER_NATS_URL}}", {"q": "x"}, "internal_error", "BROKER_NATS_URL"),
    ],
)
def test_what_cannot_be_asked_is_a_failed_result_and_nobody_is(
    stage: Stage, request: pytest.FixtureRequest, options: str, arguments: dict[str, Any], code: str, words: str
) -> None:
    stage.define("odd", options)
    before = len(stage.upstream.asked)
    content = stage.call(f"tc_{request.node.name}", "odd", arguments)
    assert (content["status"], content["error"]["code"]) == ("failed", code)
    assert words in content["error"]["message"]
    assert len(stage.upstream.asked) == before
    assert "private-0123456789" not in stage.written()


def test_the_services_own_variables_are_added_to_every_tool_of_a_target(stage: Stage) -> None:
    stage.define("show", "{envs: {api_key: JINA_API_KEY}}", "show")
    content = stage.call("tc_show", "show", {"q": "x", "api_key": "the model's"}, "show")
    assert content["result"] == {"q": "x", "api_key": "[hidden]", "service_key": "[hidden]"}


def told_everything(wire: socket.socket, asked: Asked) -> None:
    wire.sendall(http(200, {"headers": asked.headers, "target": asked.target}))


def test_values_of_variables_are_in_nothing_that_was_written(stage: Stage) -> None:
    """Cards, reports, jobs, what NATS keeps, logs, and what an operator is shown."""
    stage.define("show", "{envs: {api_key: JINA_API_KEY}}", "show")
    for do in ("echo", "boom", "die"):
        stage.call(f"tc_secret_{do}", "show", {"do": do}, "show")
    stage.define("search", "{jina: {mode: search}, envs: {api_key: OTHER_KEY}}")
    stage.upstream.answer = told_everything
    content = stage.call("tc_told", "search", {"q": "x"})
    assert "[hidden]" in json.dumps(content)
    stage.upstream.answer = http(401, f"no such key: {KEY} {OTHER}", "text/plain")
    stage.call("tc_untold", "search", {"q": "x"})
    seen = stage.written() + json.dumps(stage.served.status()) + stage.web.get("/status").body.decode()
    for value in (KEY, OTHER, OTHER.replace("/", "%2F").replace("+", "%2B")):
        assert value not in seen
