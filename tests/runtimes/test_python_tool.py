"""`broker python-tool` beside what namel3ss' own runner was seen to write: odd requests, odd results, odd tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.python_app import python_app

SOURCE = """
import os, sys, functools
from decimal import Decimal

def echo(payload):
    return payload

def decimals(payload):
    return [Decimal(text) for text in payload]

def decimal(payload):
    return Decimal(payload)

def keys(payload):
    return {1: "a", None: "b", True: "c", 1.5: "d"}

def pairs(payload):
    return {(1, 2): 3}

def circle(payload):
    found = []
    found.append(found)
    return found

def huge(payload):
    return 10 ** 5000

async def later(payload):
    return 1

class Speechless(Exception):
    def __str__(self):
        raise RuntimeError

def speechless(payload):
    raise Speechless

def borrows(payload):
    class Stream:
        def write(self, text):
            raise ZeroDivisionError
        flush = write
    sys.stdout = Stream()
    return "fine"

def forks(payload):
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return "once"

def closes(payload):
    os.close(1)
    return "fine"

def where(payload):
    return [os.getcwd(), sorted(name for name in os.environ if name.startswith("BROKER"))]
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    root = python_app(tmp_path_factory.mktemp("app"), SOURCE)
    python_app(root, "print('at import')\ndef run(payload):\n    return 1\n", "prints")
    python_app(root, "import sys\nsys.exit(5)\n", "leaves")
    python_app(root, "raise KeyboardInterrupt\n", "interrupts")
    python_app(root, "from . import vec\ndef run(payload):\n    return vec.echo(payload)\n", "relative")
    (root / "tools" / "deep").mkdir()
    (root / "tools" / "deep" / "__init__.py").write_text("from ..vec import echo as run\n")
    (root / "folder").mkdir()
    (root / "folder" / "alone.py").write_text("def run(payload):\n    return 'alone'\n")
    return root


def python_tool(root, request):
    data = request if isinstance(request, bytes) else json.dumps(request).encode()
    command = [sys.executable, "-m", "broker", "python-tool"]
    environment = {"HOME": str(root), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, input=data, capture_output=True, check=False, cwd=root, env=environment)


@pytest.mark.parametrize(
    ("function", "payload", "result"),
    [
        ("vec:decimals", ["1.50", "3.0", "1E+3", "-0", "1E-7", "NaN"], ["1.5", 3, 1000, 0, "0.0000001", "NaN"]),
        ("vec:keys", None, {"1": "c", "null": "b", "1.5": "d"}),
        ("vec:echo", "\ud800", "\ud800"),
        ("vec:borrows", None, "fine"),
        ("vec:forks", None, "once"),
        ("vec:closes", None, "fine"),
        ("prints:run", None, 1),
        ("relative:run", [1], [1]),
        ("deep:run", {"a": 1}, {"a": 1}),
    ],
)
def test_results(app, function, payload, result):
    done = python_tool(app, {"entry": f"tools.{function}", "payload": payload})
    assert (json.loads(done.stdout), done.returncode) == ({"ok": True, "result": result, "protocol_version": 1}, 0)


@pytest.mark.parametrize(
    ("function", "payload", "kind", "code"),
    [
        ("vec:decimal", "Infinity", "OverflowError", 1),
        ("vec:decimal", "sNaN", "InvalidOperation", 1),
        ("vec:pairs", None, "TypeError", 1),
        ("vec:circle", None, "ValueError", 1),
        ("vec:huge", None, "ValueError", 1),
        ("vec:later", None, "TypeError", 1),
        ("vec:", None, "AttributeError", 0),
        ("vec :echo", None, "ModuleNotFoundError", 0),
        ("nowhere:echo", None, "ModuleNotFoundError", 0),
    ],
)
def test_errors(app, function, payload, kind, code):
    done = python_tool(app, {"entry": f"tools.{function}", "payload": payload})
    said = json.loads(done.stdout)
    assert (said["ok"], said["error"]["type"], done.returncode) == (False, kind, code)


@pytest.mark.parametrize(
    ("request_bytes", "expected", "code"),
    [
        (b'{"entry": "tools.vec:echo"}', {"ok": True, "result": None, "protocol_version": 1}, 0),
        (b'{"entry": "folder.alone:run"}', {"ok": True, "result": "alone", "protocol_version": 1}, 0),
        (
            b'{"entry": "tools.vec:echo", "payload": 1, "payload": 2}',
            {"ok": True, "result": 2, "protocol_version": 1},
            0,
        ),
        (b'{"entry": "", "protocol_version": "x"}', ("ValueError", "Invalid entry", "x"), 1),
        (b'{"entry": null, "protocol_version": null}', ("ValueError", "Missing entry", None), 1),
        (b'{"entry": "\xff"}', ("UnicodeDecodeError", "'utf-8' codec can't decode byte 0xff", 1), 1),
        (b'\xef\xbb\xbf{"entry": "tools.vec:echo"}', ("JSONDecodeError", "Unexpected UTF-8 BOM", 1), 1),
        (b"", ("JSONDecodeError", "Expecting value", 1), 1),
    ],
)
def test_requests(app, request_bytes, expected, code):
    done = python_tool(app, request_bytes)
    said = json.loads(done.stdout)
    assert done.returncode == code
    if isinstance(expected, dict):
        assert said == expected
    else:
        kind, words, version = expected
        assert (said["error"]["type"], said["protocol_version"]) == (kind, version)
        assert said["error"]["message"].startswith(words)


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"[]", 1),
        (b"null", 1),
        (b'{"entry": "tools.vec:speechless"}', 1),
        (b'{"entry": "tools.leaves:run"}', 5),
        (b'{"entry": "tools.interrupts:run"}', -2),
    ],
)
def test_where_there_is_no_answer_there_are_words_for_the_caller(app, request_bytes, code):
    done = python_tool(app, request_bytes)
    assert (done.stdout, done.returncode) == (b"", code)
    assert (b"Traceback" in done.stderr) is (code != 5)


def test_an_interpreter_of_the_apps_own_may_lead_to_us(tmp_path):
    """So namel3ss' local runner is pointed at us: it starts <app>/.venv/bin/python."""
    root = python_app(tmp_path / "app", SOURCE)
    (root / ".venv" / "bin").mkdir(parents=True)
    python = root / ".venv" / "bin" / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -m broker python-tool\n")
    python.chmod(0o755)
    request = json.dumps({"entry": "tools.vec:where", "payload": {}}).encode()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BROKER")}
    done = subprocess.run(
        [python, "-c", "its own runner"],
        input=request,
        capture_output=True,
        cwd=root,
        env=environment,
        timeout=20,
        check=False,
    )
    assert json.loads(done.stdout)["result"] == [str(root), []], done.stderr
