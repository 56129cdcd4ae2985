"""The state of named sessions, on disk: read at the start, written behind, a whole file at a time."""

from __future__ import annotations

import contextlib
import fcntl
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
        self._lock = -1

    def read(self) -> None:
        """What is there. A line that cannot be read is an error: nobody's state is lost silently."""
        now = time.monotonic()
        self._take()
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise self._cannot("be read", error) from None
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    row = _row.decode(line)
                    self._sessions.restore((row.principal, row.name), bytes(row.state), now)
            except (msgspec.DecodeError, RecursionError) as error:
                text = f"{self.path}: line {number} cannot be read: {error}; mend it, or move the file away"
                raise ConfigError(text) from None
        self._written = self._sessions.told
        try:
            self._write(self._rows())
        except OSError as error:
            raise self._cannot("be written", error) from None

    def _take(self) -> None:
        """Two brokers would write over each other's. What one that was killed had begun to write goes."""
        lock = self.path.with_name(f"{self.path.name}.lock")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"server.state_file = {str(self.path)!r}: another broker is using it; choose another file"
            raise ConfigError(text) from None
        except OSError as error:
            raise self._cannot("be written", error) from None
        for draft in self.path.parent.glob(f".{self.path.name}.*"):
            with contextlib.suppress(OSError):
                draft.unlink()

    def _cannot(self, what: str, error: OSError) -> ConfigError:
        return ConfigError(f"server.state_file = {str(self.path)!r}: cannot {what}: {error.strerror}")

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
