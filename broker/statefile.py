"""The state of named sessions, on disk: read at the start, written behind, a whole file at a time."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import msgspec
from msgspec import Raw

from broker.errors import ConfigError
from broker.observe.log import Log
from broker.policy.sessions import Sessions

WRITE_SECONDS = 1.0  # between two writes: what a kill loses at most


class Row(msgspec.Struct, array_like=True):
    """One line: whose session, its name, its state."""

    principal: str
    name: str
    state: Raw


_row = msgspec.json.Decoder(Row)
_encode = msgspec.json.Encoder().encode


class StateFile:
    def __init__(self, path: str, sessions: Sessions, log: Log) -> None:
        self.path = Path(path)
        self._sessions = sessions
        self._log = log
        self._written = 0  # which of the sessions' changes is on disk
        self._next = 0.0
        self._writing: threading.Thread | None = None
        self._failed = ""  # the last problem that was logged

    def read(self) -> None:
        """What is there. A line that cannot be read is an error: nobody's state is lost silently."""
        now = time.monotonic()
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise ConfigError(f"server.state_file = {str(self.path)!r}: cannot be read: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            try:
                row = _row.decode(line)
                self._sessions.restore((row.principal, row.name), bytes(row.state), now)
            except msgspec.DecodeError as error:
                text = f"{self.path}: line {number} cannot be read: {error}; mend it, or move the file away"
                raise ConfigError(text) from None
        self._written = self._sessions.told
        try:
            self._write(self._rows())
        except OSError as error:
            raise ConfigError(f"server.state_file = {str(self.path)!r}: cannot be written: {error.strerror}") from None

    def expire(self, now: float) -> None:
        """Writes what has changed, in a thread, once a second."""
        if self._sessions.told == self._written or now < self._next:
            return
        if self._writing is not None and self._writing.is_alive():
            return
        self._next = now + WRITE_SECONDS
        told, rows = self._sessions.told, self._rows()
        self._writing = threading.Thread(target=self._try, args=(told, rows), name="broker-state")
        self._writing.start()

    def close(self) -> None:
        """The last word."""
        if self._writing is not None:
            self._writing.join()
        if self._sessions.told != self._written:
            self._try(self._sessions.told, self._rows())

    def _rows(self) -> list[Row]:
        """Of sessions that have a name; those of connections end with them."""
        return [Row(key[0], key[1], Raw(text)) for key, text in self._sessions.stories() if isinstance(key, tuple)]

    def _try(self, told: int, rows: list[Row]) -> None:
        try:
            self._write(rows)
            self._written, self._failed = told, ""
        except OSError as error:
            if self._failed != str(error):
                self._failed = str(error)
                self._log.error("state is not written", file=str(self.path), reason=error.strerror)

    def _write(self, rows: list[Row]) -> None:
        """Whole or not at all."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(draft, "wb") as file:
                file.writelines(_encode(row) + b"\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except OSError:
            os.unlink(name)
            raise
