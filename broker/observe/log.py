"""One line an event: for people on a terminal, JSON otherwise. Never a payload, never a token."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

import msgspec

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
COLOURS = {"debug": "\033[2m", "info": "", "warning": "\033[33m", "error": "\033[31m"}


class Log:
    def __init__(self, stream: TextIO | None = None, level: str = "info") -> None:
        self._stream = stream or sys.stderr
        self._least = LEVELS[level]
        self._terminal = self._stream.isatty()

    def debug(self, event: str, **fields: Any) -> None:
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if LEVELS[level] < self._least:
            return
        now = time.time()
        if self._terminal:
            clock = time.strftime("%H:%M:%S", time.localtime(now))
            rest = "".join(f"  {key}={value}" for key, value in fields.items())
            line = f"{COLOURS[level]}{clock} {event}{rest}\033[0m"
        else:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
            line = msgspec.json.encode({"time": stamp, "level": level, "event": event, **fields}).decode()
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # a log that cannot be written must not stop a broker
            pass
