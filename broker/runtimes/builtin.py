"""The tools that the broker brings itself, `echo_json` and `write_text_artifact`: AutoSage's stable ones.

Their output is a ToolResult, as that of a tool written for AutoSage is.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from broker import errors
from broker.errors import Refusal
from broker.jobs import LARGEST_ARTIFACT, Jobs, is_plain, route
from broker.model import Judge, Place, ToolInfo, Work
from broker.policy.admission import is_ready
from broker.policy.schema import Schema
from broker.pool.core import Core

Built = dict[str, Any]
MOST_REPEATS = 64

ECHOES = "Echoes a message deterministically and optionally repeats it n times."
WRITES = "Writes a small UTF-8 text file into the per-job artifact directory and returns its metadata."

ECHO = ToolInfo(
    aid="echo_json",
    name="echo_json",
    tags=("deterministic", "util"),
    side_effects=("none",),
    description=ECHOES,
    stability="stable",
    examples=(
        {
            "title": "Echo message twice",
            "input": {"message": "hello", "n": 2},
            "notes": "Copy input into POST /v1/tools/execute with tool=echo_json.",
        },
    ),
    schema={
        "type": "object",
        "description": f"Input parameters for echo_json. {ECHOES}",
        "properties": {
            "message": {"type": "string", "description": "Message to echo."},
            "n": {
                "type": "integer",
                "minimum": 1,
                "maximum": MOST_REPEATS,
                "description": "Optional repeat count. Defaults to 1.",
            },
        },
        "required": ["message"],
        "additionalProperties": False,
    },
    checks=True,  # more leniently than the schema says: integrations depend on that
)
WRITE = ToolInfo(
    aid="write_text_artifact",
    name="write_text_artifact",
    tags=("artifact", "deterministic", "io"),
    side_effects=("artifact_write",),
    description=WRITES,
    stability="stable",
    examples=(
        {
            "title": "Write note artifact",
            "input": {"filename": "note.txt", "text": "artifact demo"},
            "notes": "Produces a text artifact under the current job directory.",
        },
    ),
    schema={
        "type": "object",
        "description": f"Input parameters for write_text_artifact. {WRITES}",
        "properties": {
            "text": {"type": "string", "description": "Text content to persist as an artifact."},
            "filename": {"type": "string", "description": "Optional artifact filename. Defaults to note.txt."},
        },
        "required": ["text"],
        "additionalProperties": False,
    },
    files=True,
    checks=True,
)


UNCHANGED = b',"ds_state":{"delta":true,"slots":{},"removed_slots":[]}}\n'

_encode = msgspec.json.Encoder().encode


class BadInput(Exception):
    """In words for the caller."""


class TooMuch(Exception):
    """The output would be over the limit."""


class Builtin:
    """Runs them in the broker's own process: they only shape text, and write one small file."""

    source = "the broker's own tools"
    timeout = 30.0

    def __init__(self, core: Core, jobs: Jobs, most_bytes: int) -> None:
        self.tools = (ECHO, WRITE)
        self._core = core
        self._coming: list[Work] = []
        self._waiting: list[Work] = []  # until the cluster knows of them
        self._most_bytes = most_bytes  # of an output, as of any toolhost's
        self._jobs = jobs
        assert WRITE.schema is not None
        self._schema = Schema(WRITE.schema, WRITE.aid)
        self._functions: dict[str, Callable[[Any, Work], Built]] = {ECHO.aid: self._echo, WRITE.aid: self._write}

    def submit(self, work: Work, now: float) -> None:  # noqa: ARG002
        """In the loop's next turn: all that came in this one then go out together."""
        if not self._coming:
            self._core.loop.call_soon(self._run_all)
        self._coming.append(work)

    def _run_all(self) -> None:
        coming, self._coming = self._coming, []
        for work in coming:
            if not is_ready(work):
                self._waiting.append(work)
                continue
            while work.count > 1:
                self._run(work.take(1))
            self._run(work)
        self._core.flush()

    def pump(self) -> None:
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            self.submit(work, 0.0)

    def revise(self, judge: Judge, index: int | None = None) -> None:
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            refusal = judge(work) if index is None or work.tool.index == index else None
            if refusal is None:
                self._waiting.append(work)
            else:
                work.sink.refuse(work, refusal)

    def _run(self, work: Work) -> None:
        begun = time.monotonic()
        if work.ticket is not None:
            work.ticket.handed_over()
        tool = work.tool
        try:
            given = msgspec.json.decode(work.lines, type=_Line).input_json
            built = self._functions[tool.name](_decoded(given, tool.name), work)
            outcome = b'"ok":true,"status":"OK","error":"","output_json":' + _encode(_encode(built).decode())
        except TooMuch:
            text = f"{tool.name}: its output would be over {self._most_bytes} bytes (limits.reply_bytes)"
            work.sink.refuse(work, Refusal(errors.REPLY_TOO_LARGE, text))
            return
        except BadInput as error:
            outcome = _failed("INVALID_PICK", str(error))
        except OSError as error:
            outcome = _failed("TOOL_ERROR", f"the artifact cannot be written: {error.strerror}")
        except Exception as error:  # the others of this turn must not wait for ever
            outcome = _failed("TOOL_ERROR", f"the broker made a mistake: {error!r}")
        now = time.monotonic()
        tool.took(work.caller.face, now - begun)
        if outcome.startswith(b'"ok":true') and work.ticket is None:  # told of when something else happens
            tool.untold += 1
            tool.used = now
        else:
            self._core.policy.answered(tool, 1, int(outcome.startswith(b'"ok":true')), now)
        ids = b"" if work.ids is None else b'"id":' + work.ids[:-1] + b","
        work.sink.deliver(work, b"{" + ids + outcome + UNCHANGED, 1)

    def _echo(self, given: Any, work: Work) -> Built:  # noqa: ARG002
        built = echo_json(given)
        output = built["output"]
        if 2 * len(output["message"].encode()) * (1 + len(output["repeat"])) > self._most_bytes:  # before it is written
            raise TooMuch
        return built

    def _write(self, given: Any, work: Work) -> Built:
        problem = self._schema.problem(_encode(given).decode())
        if problem:
            raise BadInput(problem)
        if work.job is not None:
            return write_text_artifact(given, work.job)
        job = self._jobs.new(WRITE.aid, _encode(given).decode(), None, work.caller.principal)
        try:
            built = write_text_artifact(given, self._jobs.place(job))
        except (BadInput, OSError) as error:
            self._jobs.fail(job, "invalid_input" if isinstance(error, BadInput) else "tool_error", str(error))
            raise
        self._jobs.succeed(job, _encode(built), built["summary"])
        return built


def write_text_artifact(given: Any, place: Place) -> Built:
    content = given["text"].encode()
    most = min(place.largest, LARGEST_ARTIFACT)
    if len(content) > most:
        raise BadInput(f"text exceeds max artifact size limit ({most} bytes).")
    name = given.get("filename", "").strip()
    if not is_plain(name):
        name = "note.txt"
    _write_whole(Path(place.folder), name, content)
    artifact = {
        "name": name,
        "path": route(place.job, name),
        "mime_type": "text/plain; charset=utf-8",
        "bytes": len(content),
    }
    return _result(
        WRITE.aid,
        f"Wrote text artifact {name} ({len(content)} bytes).",
        {"filename": name, "bytes": len(content)},
        {"artifact_bytes": len(content), "job_id": place.job},
        [artifact],
    )


def echo_json(given: Any) -> Built:
    message, count = given.get("message"), given.get("n", 1)
    if not isinstance(message, str):
        raise BadInput('input.message: must be a string; "message" is a required property')
    if not message.strip():
        raise BadInput("message must be a non-empty string.")
    if count is None:
        count = 1
    if isinstance(count, bool) or not isinstance(count, int | float) or count != count // 1:
        raise BadInput("input.n: must be a whole number")
    count = max(1, min(int(count), MOST_REPEATS))
    output = {"message": message.strip(), "repeat": [message.strip()] * count}
    return _result(ECHO.aid, f"Echoed message {count} time(s).", output, {"repeat_count": count}, [])


def _failed(status: str, error: str) -> bytes:
    return b'"ok":false,"status":"%b","output_json":"{}","error":%b' % (status.encode(), _encode(error))


class _Line(msgspec.Struct):
    input_json: str = "null"


def _decoded(text: str, tool: str) -> Any:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise BadInput(f"input is not JSON: {error}") from None
    if value is None:
        raise BadInput(f"{tool} requires an input object.")
    if not isinstance(value, dict):
        raise BadInput(f"{tool} input must be an object.")
    return value


def _result(tool: str, summary: str, output: Built, metrics: Built, artifacts: list[Built]) -> Built:
    """A ToolResult; what it puts out stands beside the other members, too, where no other has its name."""
    result = {
        "status": "ok",
        "solver": tool,
        "summary": summary,
        "stdout": "",
        "stderr": "",
        "exit_code": 0,
        "artifacts": artifacts,
        "metrics": metrics,
        "output": output,
    }
    return {**output, **result}


def _write_whole(folder: Path, name: str, content: bytes) -> None:
    """Whole or not at all."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft, path = tempfile.mkstemp(dir=folder, prefix=".")
    try:
        with os.fdopen(draft, "wb") as file:
            file.write(content)
        os.replace(path, folder / name)
    except OSError:
        os.unlink(path)
        raise
