"""`broker python-tool` with a trace: its interpreter is a child of ours then, so that its death is traced, too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from broker.observe import traces
from broker.pool.process import SpawnError, Spec
from broker.runtimes.oneshot import run_process
from broker.runtimes.python.entry import write_all

SECONDS = 86400.0  # its caller ends what takes too long
MOST = 1 << 40
CRASH = "crash"


def run(command: tuple[str, ...], environment: Mapping[str, str], file: str, kind: str) -> int:
    """What it writes and how it ends is ours, too; a trace that cannot be written changes nothing."""
    request = sys.stdin.buffer.read()
    began = time.monotonic()
    spec = Spec(command, environment, os.getcwd(), fenced=False)
    try:
        child, output, said, _ = run_process(spec, request, SECONDS, MOST)
    except SpawnError as error:
        print(f"broker python-tool: {error}", file=sys.stderr)
        return 1
    write_all(2, said)
    write_all(1, output)
    _trace(request, output or _crash(child.how_it_ended()), file, kind, command[0], began)
    status = child.status or 0
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


def _crash(how: str) -> bytes:
    return json.dumps({"ok": False, "error": {"type": CRASH, "message": f"its process {how}"}}).encode()


def _trace(request: bytes, output: bytes, file: str, kind: str, python: str, began: float) -> None:
    try:
        asked = _members(request)
        given = json.dumps(asked.get("payload")).encode()
        milliseconds = asked.get("timeout_ms")
        event = {
            **traces.event(asked.get("tool"), "python", asked.get("entry"), given, began, _said(output)),
            "runner": "local",
            "python_env": kind,
            "python_path": python,
            "deps_source": _deps_source(),
            "timeout_ms": milliseconds if isinstance(milliseconds, int | float) else None,
        }
        traces.append(file, msgspec.json.encode(event) + b"\n")
    except Exception as error:
        print(f"broker python-tool: the trace cannot be written to {file}: {error}", file=sys.stderr)


def _members(text: bytes) -> dict[str, Any]:
    """As the tool's interpreter reads them: with NaN, and halves of characters."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _said(output: bytes) -> traces.Said:
    said = _members(output)
    error = said.get("error") or {"type": "", "message": ""}
    result = json.dumps(said.get("result")).encode()
    return traces.Said(said.get("ok") is True, msgspec.Raw(result), traces.Error(error["type"], error["message"]))


def _deps_source() -> str:
    """Where the app says what it needs."""
    for source, file in (("pyproject", "pyproject.toml"), ("requirements", "requirements.txt")):
        if os.path.exists(file):
            return source
    return "none"
