"""namel3ss' traces: a JSON line for each of its calls. Of what goes in and comes out only a summary, never a value.

A thread writes them, so that a slow disk holds no call; the file is opened anew for each batch, so that it may be
rotated. What cannot be written is counted, said once in the log, and lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from broker.observe.log import Log

MOST_WAITING = 4096  # lines
LONGEST = 400  # characters of what somebody else has named or said
LARGEST = 1 << 16  # bytes that are read for their summary
MOST_KEYS = 10
LONGEST_KEY = 80
LAST_SECONDS = 1.0  # for what waits, at the end
PROTOCOL = 1  # version of namel3ss' protocol

_encode = msgspec.json.Encoder().encode


class Traces:
    """One file."""

    def __init__(self, path: str, log: Log) -> None:
        self._path = path
        self._log = log
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._lost = 0  # since the last line that could be written
        self._torn = False  # the last line has no end
        self._thread = threading.Thread(target=self._run, name="broker-traces", daemon=True)
        self._thread.start()

    def write(self, event: dict[str, Any]) -> None:
        try:
            self._waiting.put_nowait(_encode(event) + b"\n")
        except queue.Full:  # the disk is slower than the calls
            self._lost += 1

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=LAST_SECONDS)
        self._thread.join(LAST_SECONDS)

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            lines, ended = [line], False
            while not self._waiting.empty() and not ended:
                more = self._waiting.get()
                ended = more is None
                lines += [more] if more is not None else []
            self._append(lines)
            if ended:
                return

    def _append(self, lines: list[bytes]) -> None:
        data = (b"\n" if self._torn else b"") + b"".join(lines)
        try:
            append(self._path, data)
        except OSError as error:
            self._torn = isinstance(error, _Torn)
            if not self._lost:
                self._log.error("traces cannot be written", file=self._path, reason=error.strerror or str(error))
            self._lost += len(lines)
        else:
            self._torn = False
            if self._lost:
                self._log.warning("traces can be written again", file=self._path, lost=self._lost)
            self._lost = 0


class _Torn(OSError):
    """Only a part could be written."""


def append(path: str, data: bytes) -> None:
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe that nobody reads is no file
    fd = os.open(path, flags, 0o600)
    try:
        written = os.write(fd, data)
        if written < len(data):
            raise _Torn(f"only {written} of {len(data)} bytes could be written")
    finally:
        os.close(fd)


# --- a line ----------------------------------------------------------------------------------------------------------


class Error(msgspec.Struct):
    type: str = ""
    message: str = ""


class Said(msgspec.Struct):
    """An answer, as the protocol has it."""

    ok: bool
    result: Raw = Raw(b"null")
    error: Error = msgspec.field(default_factory=Error)


def event(tool: object, kind: object, entry: object, given: bytes, began: float, said: Said) -> dict[str, Any]:
    """What is the same for all runners."""
    found: dict[str, Any] = {"type": "tool_call", "time": round(time.time(), 3), "tool": short(tool)}
    found |= {"kind": short(kind) or "python", "entry": short(entry), "input_summary": summary(given)}
    if said.ok:
        found |= {"status": "ok", "output_summary": summary(bytes(said.result))}
    else:
        error = said.error
        found |= {"status": "error", "error_type": short(error.type), "error_message": short(error.message)}
    found["duration_ms"] = round((time.monotonic() - began) * 1000)
    return found | {"protocol_version": PROTOCOL, "resolved_source": "binding"}


def short(text: object) -> str:
    if not isinstance(text, str):
        return ""
    text = text if len(text) <= LONGEST else text[:LONGEST] + "..."
    return text.encode(errors="replace").decode()  # halves of characters are none


def summary(text: bytes) -> dict[str, Any]:
    """Of a value that is JSON: what it is, and how large."""
    text = text.strip()
    if len(text) > LARGEST:
        return {"type": {b"{": "object", b"[": "list", b'"': "text"}.get(text[:1], "int"), "bytes": len(text)}
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:  # Python's own JSON has NaN, and halves of characters
        value = json.loads(text)
    if isinstance(value, dict):
        keys = [key[:LONGEST_KEY].encode(errors="replace").decode() for key in sorted(value)[:MOST_KEYS]]
        return {"type": "object", "keys": keys, "count": len(value)}
    if isinstance(value, list):
        return {"type": "list", "count": len(value)}
    if isinstance(value, str):
        return {"type": "text", "chars": len(value)}
    return {"type": type(value).__name__}
