"""One line an event: for people on a terminal, JSON otherwise. Never a payload, never a token."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from typing import Any, TextIO

import msgspec

from broker.observe.hidden import Hidden

LONGEST = 1000  # characters of one field: a pipe that can be written to has room for a few of them
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
COLOURS = {"debug": "\033[2m", "info": "", "warning": "\033[33m", "error": "\033[31m"}


class Log:
    def __init__(self, stream: TextIO | None = None, level: str = "info") -> None:
        self._stream = stream or sys.stderr
        self._least = LEVELS[level]
        self._terminal = self._stream.isatty()
        self._lost = 0
        self.hidden = Hidden()
        self._poller: select.poll | None = None
        with contextlib.suppress(OSError, ValueError):  # a stream that is no file
            poller = select.poll()
            poller.register(self._stream.fileno(), select.POLLOUT)
            self._poller = poller

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
        fields = self.hidden.value(fields)
        fields = {key: value[:LONGEST] if isinstance(value, str) else value for key, value in fields.items()}
        if self._terminal:
            clock = time.strftime("%H:%M:%S", time.localtime(now))
            rest = "".join(f"  {key}={value}" for key, value in fields.items())
            line = f"{COLOURS[level]}{clock} {event}{rest}\033[0m"
        else:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
            line = msgspec.json.encode({"time": stamp, "level": level, "event": event, **fields}).decode()
        self._put(line)

    def _put(self, line: str) -> None:
        """A log that nobody reads must not stop a broker: what does not fit is counted, and lost."""
        lost = f" ({self._lost} lines before this one were lost)" if self._lost and self._terminal else ""
        if self._lost and not self._terminal:
            line = f'{line[:-1]},"lost_before":{self._lost}}}'
        try:
            if self._poller is not None and not self._poller.poll(0):
                self._lost += 1
                return
            self._stream.write(line + lost + "\n")
            self._stream.flush()
            self._lost = 0
        except (OSError, ValueError):
            self._lost += 1
