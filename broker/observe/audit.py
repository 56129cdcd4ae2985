"""The audit log: who was given, used or was refused which permission. JSON lines; of a token only its fingerprint."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from broker.errors import ConfigError
from broker.policy.leases import fingerprint


class Audit:
    def __init__(self, path: str | None) -> None:
        """Appends to `path`; None writes nowhere."""
        self._fd = -1
        if path is None:
            return
        try:
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"the audit log {path} cannot be written: {error.strerror} (lease.audit)") from None

    def write(self, event: str, who: str, aid: str, tier: int, token: str, **more: object) -> None:
        if self._fd < 0:
            return
        record = {"time": time.time(), "who": who, "what": event, "aid": aid, "tier": tier, "token": fingerprint(token)}
        with contextlib.suppress(OSError):  # a full disk must not stop calls; the next line may fit
            os.write(self._fd, msgspec.json.encode({**record, **more}) + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def default_path() -> str:
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.environ.get("HOME", "/"), ".local", "state")
    return os.path.join(state, "toolhost-broker", "audit.jsonl")
