"""The audit log: who was given, used or was refused which permission. JSON lines; of a token only its fingerprint."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from broker.errors import ConfigError
from broker.observe.log import Log


class Audit:
    def __init__(self, path: str, log: Log) -> None:
        self._path = path
        self._log = log
        self._lost = 0  # lines that could not be written, since the last one that could
        self._fd = -1

    def open(self) -> None:
        """At the first line, or at the start where leases are enforced: then a broker that could not write is none."""
        try:
            Path(self._path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"the audit log {self._path} cannot be written: {error.strerror} (lease.audit)") from None

    def write(self, event: str, who: str, aid: str, tier: int, token: str, **more: object) -> None:
        """Of the token, its fingerprint."""
        record = {"time": time.time(), "who": who, "what": event, "aid": aid, "tier": tier, "token": token}
        line = msgspec.json.encode({**record, **more}) + b"\n"
        try:
            if self._fd < 0:
                self.open()
            os.write(self._fd, line)
        except (OSError, ConfigError) as error:  # a full disk must not stop calls; the next line may fit
            if not self._lost:
                self._log.error("the audit log cannot be written", file=self._path, reason=str(error))
            self._lost += 1
        else:
            if self._lost:
                self._log.warning("the audit log can be written again", file=self._path, lost=self._lost)
            self._lost = 0

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def default_state(environ: Mapping[str, str]) -> Path:
    """Where this user's broker keeps what outlives it."""
    state = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME", "/"), ".local", "state")
    return Path(state, "toolhost-broker")


def default_path(environ: Mapping[str, str]) -> str:
    return str(default_state(environ) / "audit.jsonl")
