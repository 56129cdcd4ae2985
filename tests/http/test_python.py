"""namel3ss' requests with an entry: served for apps that are configured, and for nothing that is not the app's own."""

from __future__ import annotations

import _bisect
import json
import math
import os
from pathlib import Path

import pytest

from tests.conftest import Brokers
from tests.support.http import Web
from tests.support.python_app import python_app, python_config

LOCAL = json.loads((Path(__file__).parent.parent / "vectors" / "namel3ss_local.json").read_text())
SENT = json.loads((Path(__file__).parent.parent / "vectors" / "namel3ss_service.json").read_text())["request_as_sent"]
MORE = """
from functools import lru_cache, partial, wraps
from json import dumps
from subprocess import Popen
import logging, os

indirect = partial(partial(os.system))
borrowed = os.system
shouts = logging.getLogger().error
collects = [].append

class Made:
    def __new__(cls, payload):
        return payload

class Callable:
    def __call__(self, payload):
        return payload
    method = __call__

def own(payload):
    return payload

def half(payload):
    return "\\ud800"

def deep(payload):
    found = []
    for _ in range(200):
        found = [found]
    return found

@wraps(own)
def wrapped(payload):
    return payload

@wraps(os.system)
def disguised(payload):
    return payload

instance = Callable()
bound = Callable().method
shortly = lambda payload: payload
prepared = partial(own)
cached = lru_cache(lambda payload: payload)

def __getattr__(name):
    if name == "late":
        return own
    if name == "late_system":
        return os.system
    raise AttributeError(name)
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("apps")
    python_app(folder / "other", "def run(payload):\n    return 'not to be had'\n")
    root = python_app(folder / "app")
    python_app(root, MORE, "more")
    python_app(root / ".venv" / "lib" / "site-packages", "def run(payload):\n    return 1\n")
    python_app(root / "package", "def run(payload):\n    return payload\n", "inner")
    (root / "package" / "__init__.py").write_text("from .tools.inner import run\nfrom os import system\n")
    (root / "folder").mkdir()
    (root / "folder" / "alone.py").write_text("def run(payload):\n    return payload\n")
    compiled = Path(_bisect.__file__)
    (root / compiled.name).write_bytes(compiled.read_bytes())
    (root / "loose.py").write_text("def run(payload):\n    return 'loose'\n")
    (root / "link.py").symlink_to(folder / "other" / "tools" / "vec.py")
    (root / "linked").symlink_to(folder / "other" / "tools")
    (folder / "same").symlink_to(root)
    return root


@pytest.fixture(scope="module")
def web(tmp_path_factory, app):
    brokers = Brokers(tmp_path_factory.mktemp("python-web"))
    config = python_config(app, "fail", "nan")
    yield Web(brokers.start("--http", "127.0.0.1:0", config=config).ready)
    brokers.end()


def ask(web, app_root, entry, payload=None, tool="whatever"):
    project = {"app_root": str(app_root), "flow": None}
    body = {**SENT["body_json"], "tool_name": tool, "entry": entry, "payload": payload or {}, "project": project}
    answer = web.ask("POST", "/tools", body, {"Content-Type": "application/json"})
    assert answer.status == 200
    return answer.json


def test_an_entry_of_a_configured_app_is_served(web, app):
    expected = {"ok": True, "result": {"message": "Hello Ada", "ok": True}, "protocol_version": 1}
    assert ask(web, app, "tools.vec:greet", {"name": "Ada"}) == expected
    assert ask(web, app.parent / "same", "tools.vec:greet", {"name": "Ada"}) == expected, "by its real path"
    assert ask(web, app, "loose:run")["result"] == "loose"
    assert ask(web, app, "tools.more:Made", {"a": 1})["result"] == {"a": 1}


@pytest.mark.parametrize(
    "entry",
    [
        "tools.more:Made",
        "tools.more:instance",
        "tools.more:bound",
        "tools.more:shortly",
        "tools.more:prepared",
        "tools.more:wrapped",
        "tools.more:late",
        "package:run",
        "package.tools.inner:run",
        "folder.alone:run",
    ],
)
def test_whatever_can_be_called_and_is_the_apps_own_is_served(web, app, entry):
    assert ask(web, app, entry, {"a": [1]})["result"] == {"a": [1]}


def test_a_cached_function_is_the_apps_own_too(web, app):
    assert ask(web, app, "tools.more:cached", "x")["result"] == "x"


def test_a_compiled_module_may_be_the_apps_own(web, app):
    assert "missing required argument" in ask(web, app, "_bisect:bisect_right", "x")["error"]["message"]


def test_it_has_a_name_of_its_own(web, app):
    ask(web, app, "tools.vec:greet", {"name": "Ada"})
    name = f"{app}#tools.vec:greet"
    assert name in [tool["name"] for tool in web.get("/v1/tools").json["tools"]]
    assert web.execute(name, {"name": "Ada"}).json["output"]["message"] == "Hello Ada"


def test_where_the_configuration_names_it_that_is_its_name(web, app):
    assert ask(web, app, "tools.vec:fail")["error"] == {"type": "ValueError", "message": "Missing input"}
    assert f"{app}#tools.vec:fail" not in [tool["name"] for tool in web.get("/v1/tools").json["tools"]]


@pytest.mark.parametrize("vector", LOCAL, ids=lambda vector: vector["id"])
def test_errors_are_those_of_namel3ss_own_runner(web, app, vector):
    asked, expected = json.loads(vector["stdin"]), vector["expect"]["stdout_json"]
    found = ask(web, app, asked["entry"], asked["payload"])
    assert found["ok"] is expected["ok"]
    assert found.get("error") == expected.get("error")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nowhere.at.all:run", "No module named 'nowhere'"),
        ("tools.nowhere.at:run", "No module named 'tools.nowhere'"),
        ("loose.more:run", "No module named 'loose.more'; 'loose' is not a package"),
    ],
)
def test_what_is_missing_is_said_in_pythons_words(web, app, entry, message):
    assert ask(web, app, entry)["error"] == {"type": "ModuleNotFoundError", "message": message}


def test_results_that_python_can_read_are_passed_on(web, app):
    assert ask(web, app, "tools.more:half")["result"] == "\ud800"
    found = ask(web, app, "tools.more:deep")["result"]
    for _ in range(200):
        (found,) = found
    assert found == []


@pytest.mark.parametrize(
    "entry",
    [
        "os:system",
        "posix:system",
        "builtins:eval",
        "subprocess:getoutput",
        "tools.vec:system",
        "tools.vec:os",
        "tools.more:dumps",
        "tools.more:indirect",
        "tools.more:borrowed",
        "tools.more:disguised",
        "tools.more:Popen",
        "tools.more:shouts",
        "tools.more:collects",
        "tools.more:late_system",
        "tools.more:__class__",
        "tools.more:__init__",
        "tools.more:__getattribute__",
        "tools.more:__reduce_ex__",
        "tools.more:__builtins__",
        "tools.more:__loader__",
        "package:system",
        "folder:alone",
        "tools.vec :greet",
        " tools.vec:greet",
        "tools.vec\n:greet",
        "__main__:load",
        "..other.tools.vec:run",
        "../other/tools/vec:run",
        "/etc/passwd:run",
        "link:run",
        "linked.vec:run",
        ".venv.lib.site-packages.tools.vec:run",
        "tools.vec",
        ":run",
        "tools.vec:",
        "tools..vec:greet",
        "tools.vec\u0000:greet",
        "x" * 2000 + ":run",
    ],
)
def test_nothing_but_the_apps_own_functions_is_run(web, app, entry):
    found = ask(web, app, entry, "touch /tmp/never")
    assert found["ok"] is False
    assert found["error"]["type"] in (
        "PermissionError",
        "ModuleNotFoundError",
        "ValueError",
        "TypeError",
        "ToolNotFound",
    )
    assert not os.path.exists("/tmp/never")


def test_apps_that_are_not_configured_are_not_served(web, app):
    for root in (app.parent / "other", app / "tools", app.parent, "/", "relative", ""):
        assert ask(web, root, "tools.vec:run")["error"] == {
            "type": "ToolNotFound",
            "message": "tool not found: whatever",
        }


def test_numbers_that_json_does_not_know_are_for_those_who_read_pythons(web, app):
    assert math.isnan(ask(web, app, "tools.vec:nan")["result"][0])
    found = web.execute("nan", {})
    assert found.status == 500
    assert found.json["metrics"]["error_code"] == "invalid_tool_output"


def test_the_number_of_such_tools_is_bounded(start_web, tmp_path):
    source = "".join(f"def f{n}(payload):\n    return {n}\n" for n in range(260))
    root = python_app(tmp_path / "app", source)
    _, web = start_web(config=python_config(root, reuse=True))
    answers = [ask(web, root, f"tools.vec:f{n}") for n in range(258)]
    assert [one.get("result") for one in answers[:256]] == list(range(256))
    assert [one["error"]["type"] for one in answers[256:]] == ["PermissionError"] * 2


def test_names_of_nothing_do_not_fill_the_table(start_web, tmp_path):
    root = python_app(tmp_path / "app")
    _, web = start_web(config=python_config(root, reuse=True))
    answers = [ask(web, root, f"tools.vec:f{n}") for n in range(258)]
    assert {one["error"]["type"] for one in answers} == {"AttributeError"}
    assert ask(web, root, "tools.vec:greet", {"name": "Ada"})["ok"]


def test_an_app_root_may_be_a_virtual_environment_itself(start_web, tmp_path):
    root = python_app(tmp_path / "app")
    (root / "pyvenv.cfg").write_text("home = /usr/bin\n")
    python_app(root / "inner", "def run(payload):\n    return 1\n")
    (root / "inner" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    _, web = start_web(config=python_config(root))
    assert ask(web, root, "tools.vec:greet", {"name": "Ada"})["ok"]
    assert ask(web, root, "inner.tools.vec:run")["error"]["type"] == "PermissionError"


def test_a_reload_keeps_them(start_web, tmp_path):
    root = python_app(tmp_path / "app")
    served, web = start_web(config=python_config(root))
    assert ask(web, root, "tools.vec:greet", {"name": "Ada"})["ok"]
    with served.operator() as operator:
        assert operator.ask({"aid": "_reload"})["ok"]
    assert served.call(f"{root}#tools.vec:greet", name="Ada")["ok"]
