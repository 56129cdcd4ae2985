"""How the tests talk to a toolhost: a process that serves, a process that runs once, a plugin that is compiled."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

EMPTY_DELTA = {"delta": True, "slots": {}, "removed_slots": []}
Json = dict[str, Any]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without any MACHINA_ setting, so that a test sees only what it sets."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MACHINA_")}
    return clean | dict(extra or {})


def line(aid: str, input_json: object = None, **members: object) -> bytes:
    request: Json = {"aid": aid}
    if input_json is not None:
        request["input_json"] = input_json if isinstance(input_json, str) else json.dumps(input_json)
    return json.dumps(request | members).encode() + b"\n"


def demo(tool: str, input_json: object = None, **members: object) -> bytes:
    return line(f"AID.DEMO.{tool}.v1", input_json, **members)


def fault(tool: str, input_json: object = None, **members: object) -> bytes:
    return line(f"AID.FAULT.{tool}.v1", input_json, **members)


class Host:
    """A toolhost that serves, in a process group of its own."""

    def __init__(self, command: list[str], env: Mapping[str, str] | None = None, **popen: Any) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(env),
            start_new_session=True,
            **popen,
        )
        self._read = b""

    def send(self, data: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def raw_line(self, timeout: float = 10.0) -> bytes:
        """The next line of stdout, with its line end; what there is, if it ends or nothing more comes in time."""
        assert self.process.stdout
        until = time.monotonic() + timeout
        while b"\n" not in self._read:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, until - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 1 << 20) if ready else b""
            if not data:
                rest, self._read = self._read, b""
                return rest
            self._read += data
        first, _, self._read = self._read.partition(b"\n")
        return first + b"\n"

    def reply(self, timeout: float = 10.0) -> Json:
        raw = self.raw_line(timeout)
        assert raw.endswith(b"\n"), f"no whole line: {raw!r}"
        reply: Json = json.loads(raw)
        return reply

    def ask(self, request: bytes, timeout: float = 10.0) -> Json:
        self.send(request)
        return self.reply(timeout)

    def finish(self, data: bytes = b"", timeout: float = 30.0) -> tuple[int, bytes, bytes]:
        """Sends the last bytes, closes stdin, and returns exit code, the rest of stdout, and stderr."""
        out, err = self.process.communicate(data, timeout)
        out, self._read = self._read + out, b""
        return self.process.returncode, out, err

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(ValueError, OSError):
            self.process.communicate(timeout=10)


@contextlib.contextmanager
def serving(command: list[str], env: Mapping[str, str] | None = None, **popen: Any) -> Iterator[Host]:
    host = Host(command, env, **popen)
    try:
        yield host
    finally:
        host.kill()


def replies(data: bytes) -> list[Json]:
    assert data == b"" or data.endswith(b"\n"), f"no whole line at the end: {data[-200:]!r}"
    return [json.loads(each) for each in data.splitlines()]


def compile_plugin(source: str, to: Path, include: Path | None, *flags: str) -> Path:
    """Builds a plugin as a user would."""
    cpp = to.with_suffix(".cpp")
    cpp.write_text(source)
    includes = ["-I", str(include)] if include else []
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-std=c++17", *includes, str(cpp), *flags, "-o", str(to)], check=True, timeout=120
    )
    return to
