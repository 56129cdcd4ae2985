"""Recorded exchanges of AutoSage's own server, replayed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.http import Web

VECTORS = Path(__file__).parent.parent / "vectors"
EXCHANGES = json.loads((VECTORS / "autosage.json").read_text())
LIMITS = json.loads((VECTORS / "autosage_limits.json").read_text())
JOB = re.compile(r"job_[0-9]{4,}")
CLOCK = re.compile(r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\.[0-9]{3}Z$")

# One-shot tools that put out what the recorded ones did. `artifacts` become files of the job.
SYNTHETIC = """
import json, os, sys
tool = json.load(open(sys.argv[1]))[sys.argv[2]]
reply = {"ok": True, "status": "OK", "error": ""}
if tool == 'returns {"hello":"x"} (not a ToolResult)':
    reply["output_json"] = "not JSON"
elif str(tool).startswith("throws"):
    code, message = tool[tool.index("(") + 1 : -1].split(",")
    reply |= {"ok": False, "status": "TOOL_ERROR", "output_json": "{}", "error": json.loads(message), "code": code}
else:
    for name, size in tool.get("artifacts", []):
        with open(os.path.join(os.environ["BROKER_JOB_DIR"], name), "wb") as file:
            file.write(b"x" * size)
    tool["artifacts"] = [{"name": name, "bytes": size} for name, size in tool.get("artifacts", [])]
    reply["output_json"] = json.dumps(tool)
print(json.dumps(reply))
"""


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.conftest import Brokers

    folder = tmp_path_factory.mktemp("http")
    (folder / "synthetic.py").write_text(SYNTHETIC)
    tools = {name: tool for name, tool in LIMITS["synthetic_tools"].items() if name != "slow.tool"}
    (folder / "tools.json").write_text(json.dumps(tools))
    command = json.dumps([sys.executable, str(folder / "synthetic.py"), str(folder / "tools.json")])
    config = "".join(f'[[oneshot]]\nname = "{name}"\ncommand = {command}\n' for name in tools)
    brokers = Brokers(folder)
    yield Web(brokers.start("--http", "127.0.0.1:0", config=config).ready)
    brokers.end()


def same(found: Any, expected: Any, path: str = "$") -> None:
    """As recorded, but for the numbers of jobs, clocks, and durations that ours adds."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), path
        extra = set(found) - set(expected)
        assert extra <= ({"duration_ms"} if path.endswith(".metrics") else set()), f"{path}: {extra}"
        for name, value in expected.items():
            assert name in found, f"{path}.{name}"
            same(found[name], value, f"{path}.{name}")
    elif isinstance(expected, list):
        assert isinstance(found, list), path
        assert len(found) == len(expected), path
        for at, value in enumerate(expected):
            same(found[at], value, f"{path}[{at}]")
    elif isinstance(expected, str) and CLOCK.match(expected):
        assert CLOCK.match(found), path
    elif isinstance(expected, str):
        assert JOB.sub("job", found) == JOB.sub("job", expected), path
    else:
        assert found == expected, path


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda one: one["id"])
def test_a_recorded_exchange_is_answered_as_autosage_answers_it(web, exchange):
    request, expected = exchange["request"], exchange["expect"]
    path = request["path"]
    if JOB.search(path):
        made = web.execute("write_text_artifact", {"text": "hello"}).json
        path = JOB.sub(made["metrics"]["job_id"], path)
    answer = web.ask(request["method"], path, request["body_text"], request["headers"])
    assert answer.status == expected["status"]
    for name, value in expected["headers"].items():
        assert answer.headers[name] == value
    if exchange["id"] == "health":  # the name and the version are ours
        assert answer.json["status"] == "ok"
        assert set(answer.json) == {"name", "status", "version"}
    elif "json" in expected:
        same(answer.json, expected["json"])
    else:
        assert JOB.sub("job", answer.body.decode()) == JOB.sub("job", expected["body_text"])


@pytest.mark.parametrize("vector", LIMITS["vectors"], ids=lambda one: one["id"])
def test_a_calls_limits_cut_what_autosage_cuts(web, vector):
    expected = vector["expect"]
    answer = web.ask("POST", "/v1/tools/execute", vector["request"]["body"], {"X-Request-Id": "req-vec"})
    assert answer.status == expected["status"]
    same(answer.json, expected["json"])


def limits(**own: int) -> dict[str, Any]:
    usual = {"timeout_ms": 2000, "max_stdout_bytes": 32, "max_stderr_bytes": 24, "max_artifact_bytes": 4096}
    return {"context": {"limits": {**usual, "max_artifacts": 4, "max_summary_characters": 96, **own}}}


def test_large_artifacts_go_first_then_those_over_the_count(web):
    answer = web.execute("manyart.tool", {}, **limits(max_artifacts=2))
    assert [one["name"] for one in answer.json["artifacts"]] == ["a.bin", "b.bin"]
    assert answer.json["metrics"]["artifacts_removed_oversize"] == 1
    assert answer.json["metrics"]["artifacts_removed_count_cap"] == 1
    assert answer.json["summary"] == "many artifacts [limits: oversize artifacts removed, artifact count capped]"


def test_a_summary_is_cut_before_its_note_and_the_whole_again(web):
    answer = web.execute("longsum.tool", {}, **limits(max_summary_characters=60))
    summary = answer.json["summary"]
    assert len(summary) == 60
    assert summary.endswith("...")
    assert answer.json["metrics"]["summary_truncated"] is True


def test_results_that_are_not_ok_and_tools_that_throw_are_told_apart(web):
    failing = web.execute("failing.tool", {})
    assert (failing.status, failing.json["exit_code"], failing.json["stderr"]) == (500, 3, "boom")
    assert "error_code" not in failing.json["metrics"]
    assert "output" not in failing.json
    assert web.execute("warnstatus.tool", {}).status == 200
    assert web.execute("blanksolver.tool", {}).json["solver"] == "blanksolver.tool"
    thrown = web.execute("throws.tool", {})
    assert (thrown.status, thrown.json["metrics"]["error_code"]) == (500, "ERR_CUSTOM")
    assert thrown.json["stderr"] == "custom failure"
    refused = web.execute("throwsinvalid.tool", {})
    assert (refused.status, refused.json["metrics"]["error_code"]) == (400, "invalid_input")
    shapeless = web.execute("badshape.tool", {})
    assert (shapeless.status, shapeless.json["metrics"]["error_code"]) == (500, "invalid_tool_output")


@pytest.mark.parametrize("pair", LIMITS["percent_encoding"]["pairs"], ids=lambda one: one["name"])
def test_an_artifacts_name_is_encoded_as_autosages_clients_expect(web, pair):
    answer = web.execute("write_text_artifact", {"text": "x", "filename": pair["name"]})
    (artifact,) = answer.json["artifacts"]
    if "\\" in pair["name"]:
        assert artifact["name"] == "note.txt"
        return
    assert artifact["path"].rpartition("/")[2] == pair["encoded"]
    assert web.get(artifact["path"]).body == b"x"
