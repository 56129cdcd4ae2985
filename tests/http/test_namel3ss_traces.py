"""namel3ss' traces: a line for each call, with the seed's fields, and no payload; a broken file breaks no call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from tests.support.python_app import python_app, python_config

SECRET = "hunter2-hunter2"


def ask(web, root, entry, payload, **more):
    project = {"app_root": str(root), "flow": "demo"}
    body = {"protocol_version": 1, "tool_name": "greeter", "kind": "python", "entry": entry, "payload": payload}
    answer = web.ask("POST", "/tools", {**body, "timeout_ms": 3000, "trace_id": "t-1", "project": project, **more})
    assert answer.status == 200
    return answer.json


def lines(file, count):
    """Written behind the answers."""
    deadline = time.monotonic() + 5
    while True:
        found = file.read_text().splitlines() if file.exists() else []
        if len(found) >= count:
            return [json.loads(line) for line in found]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_call_of_the_service_is_a_line(start_web, tmp_path):
    root, file = python_app(tmp_path / "app"), tmp_path / "log" / "traces.jsonl"
    config = python_config(root, "greet") + f'[http]\ntraces = "{file}"\n'
    _, web = start_web(config=config)
    assert ask(web, root, "tools.vec:greet", {"name": SECRET, "b": 1})["ok"]
    ask(web, root, "tools.vec:fail", {})
    ask(web, root, "tools.vec:exits", [1, 2, 3])
    ask(web, root, "tools.vec:sleeps", {"seconds": 30}, timeout_ms=400)
    ask(web, root, "tools.vec:system", SECRET)
    ask(web, "/elsewhere", "a:b", {}, tool_name="x" * 5000)
    ok, failed, crashed, late, refused, unknown = lines(file, 6)
    assert ok["type"] == "tool_call"
    expected = {
        "runner": "service",
        "resolved_source": "binding",
        "tool": "greeter",
        "kind": "python",
        "entry": "tools.vec:greet",
        "service_url": f"http://{web.host}:{web.port}/tools",
        "timeout_ms": 3000,
        "protocol_version": 1,
        "trace_id": "t-1",
        "status": "ok",
        "input_summary": {"type": "object", "keys": ["b", "name"], "count": 2},
        "output_summary": {"type": "object", "keys": ["message", "ok"], "count": 2},
    }
    assert expected.items() <= ok.items()
    assert 0 <= ok["duration_ms"] < 3000
    assert (failed["status"], failed["error_type"], failed["error_message"]) == ("error", "ValueError", "Missing input")
    assert "output_summary" not in failed
    assert (crashed["error_type"], crashed["input_summary"]) == ("crash", {"type": "list", "count": 3})
    assert (late["error_type"], late["timeout_ms"], late["duration_ms"] >= 300) == ("TimeoutError", 400, True)
    assert (refused["error_type"], refused["input_summary"]) == ("PermissionError", {"type": "text", "chars": 15})
    assert unknown["error_type"] == "ToolNotFound"
    assert max(map(len, file.read_text().splitlines())) < 4096
    assert SECRET not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_file_may_be_moved_away(start_web, tmp_path):
    root, file = python_app(tmp_path / "app"), tmp_path / "traces.jsonl"
    _, web = start_web(config=python_config(root, "greet") + f'[http]\ntraces = "{file}"\n')
    ask(web, root, "tools.vec:greet", {"name": "Ada"})
    lines(file, 1)
    file.rename(tmp_path / "old.jsonl")
    ask(web, root, "tools.vec:greet", {"name": "Ada"})
    assert len(lines(file, 1)) == 1


@pytest.mark.parametrize("place", ["full", "folder", "pipe", "below a file"])
def test_a_file_that_cannot_be_written_breaks_no_call(start_web, tmp_path, place):
    root = python_app(tmp_path / "app")
    file = {"full": "/dev/full", "below a file": str(root / "tools" / "vec.py" / "traces")}.get(place)
    if place == "folder":
        file = str(root)
    if place == "pipe":
        file = str(tmp_path / "pipe")
        os.mkfifo(file)
    broker, web = start_web(config=python_config(root, "greet") + f'[http]\ntraces = "{file}"\n')
    for _ in range(3):
        assert ask(web, root, "tools.vec:greet", {"name": "Ada"})["ok"]
    broker.eventually(lambda: "traces cannot be written" in broker.log.read_text())
    assert broker.log.read_text().count("traces cannot be written") == 1


def python_tool(root, request, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "broker", "python-tool", *arguments],
        input=request,
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={"HOME": str(root), "PATH": "/usr/bin:/bin", **environment},
    )


def test_the_local_runner_writes_them_where_it_is_asked_to(tmp_path):
    root, file = python_app(tmp_path / "app"), tmp_path / "traces.jsonl"
    (root / "requirements.txt").touch()
    for function, payload, code in (
        ("greet", {"name": SECRET}, 0),
        ("nan", {}, 0),
        ("a_set", {}, 1),
        ("leaves", {}, 3),
    ):
        request = json.dumps({"tool": "t", "entry": f"tools.vec:{function}", "payload": payload})
        traced = python_tool(root, request, "--traces", str(file))
        plain = python_tool(root, request)
        assert (traced.stdout, traced.returncode) == (plain.stdout, plain.returncode)
        assert plain.returncode == code
    assert python_tool(root, '{"entry": "tools.vec:dies"}', BROKER_HTTP_TRACES=str(file)).returncode == -9
    assert python_tool(root, "[]", BROKER_HTTP_TRACES=str(file)).returncode == 1
    ok, nan, unsaid, left, died, none = lines(file, 6)
    expected = {
        "type": "tool_call",
        "runner": "local",
        "tool": "t",
        "python_env": "system",
        "python_path": sys.executable,
        "deps_source": "requirements",
        "status": "ok",
        "input_summary": {"type": "object", "keys": ["name"], "count": 1},
        "timeout_ms": None,
        "protocol_version": 1,
    }
    assert expected.items() <= ok.items()
    assert nan["output_summary"] == {"type": "list", "count": 1}
    assert (unsaid["status"], unsaid["error_type"]) == ("error", "TypeError")
    assert (left["error_type"], left["error_message"]) == ("crash", "its process exited with code 3")
    assert died["error_message"] == "its process was killed by SIGKILL"
    assert none["status"] == "error"
    assert SECRET not in file.read_text()


def test_a_local_trace_that_cannot_be_written_changes_nothing(tmp_path):
    root = python_app(tmp_path / "app")
    done = python_tool(root, '{"entry": "tools.vec:prints"}', "--traces", "/dev/full")
    assert (done.returncode, json.loads(done.stdout)["result"]) == (0, "fine")
    assert "trace cannot be written to /dev/full" in done.stderr
    assert "printed words" in done.stderr
