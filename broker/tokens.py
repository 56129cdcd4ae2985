"""The tokens of callers on TCP and HTTP: shown once, kept only as their SHA-256."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from broker.errors import ConfigError
from broker.observe.log import Log

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Token(msgspec.Struct, frozen=True):
    name: str
    sha256: str
    created: float


class Tokens:
    """A file that `broker token` writes and the broker reads whenever it has changed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stamp: tuple[int, int] = (0, 0)
        self._tokens: list[Token] = []

    def all(self) -> list[Token]:
        try:
            found = self.path.stat()
        except OSError:
            self._tokens, self._stamp = [], (0, 0)
            return []
        if (found.st_mtime_ns, found.st_ino) != self._stamp:
            try:
                self._tokens = msgspec.json.decode(self.path.read_bytes(), type=list[Token])
            except (OSError, msgspec.DecodeError) as error:
                raise ConfigError(f"the tokens in {self.path} cannot be read: {error}") from None
            self._stamp = (found.st_mtime_ns, found.st_ino)
        return self._tokens

    def new(self, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name for a token: letters, digits, `_`, `.` and `-`, 64 at most")
        with self._locked():
            tokens = self.all()
            if any(token.name == name for token in tokens):
                raise ConfigError(
                    f"there is a token called {name} already; revoke it first: broker token revoke {name}"
                )
            secret = f"tbk_{secrets.token_hex(16)}"
            self._write([*tokens, Token(name, _digest(secret), time.time())])
        return secret

    def revoke(self, name: str) -> None:
        with self._locked():
            tokens = self.all()
            if not any(token.name == name for token in tokens):
                raise ConfigError(f"there is no token called {name}; `broker token list` shows them")
            self._write([token for token in tokens if token.name != name])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self.path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from None

    def _write(self, tokens: list[Token]) -> None:
        fd, draft = tempfile.mkstemp(dir=self.path.parent, prefix=".tokens")  # mode 0600
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(tokens))
        os.replace(draft, self.path)


class Door:
    """The broker's own look at the tokens. Once there has been one, callers need one until the broker starts anew:
    revoking the last token opens nothing."""

    def __init__(self, tokens: Tokens, log: Log) -> None:
        self._tokens = tokens
        self._log = log
        self._known: list[Token] = tokens.all()
        self._locked = bool(self._known)

    def locked(self) -> bool:
        """Callers have to show a token."""
        return bool(self._look()) or self._locked

    def find(self, secret: str) -> Token | None:
        """The token that was shown. Takes as long for a wrong one as for a right one."""
        digest = _digest(secret)
        found = None
        for known in self._look():
            if hmac.compare_digest(known.sha256, digest):
                found = known
        return found

    def takes(self, token: Token) -> bool:
        """It has not been revoked since it was shown."""
        return token in self._look()

    def _look(self) -> list[Token]:
        """A file that cannot be read changes nothing: neither who may come in, nor who may not."""
        try:
            self._known = self._tokens.all()
        except ConfigError as error:
            self._log.warning("tokens are as they were", reason=str(error))
        self._locked = self._locked or bool(self._known)
        return self._known


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def default_path() -> str:
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.environ.get("HOME", "/"), ".config")
    return os.path.join(home, "toolhost-broker", "tokens.json")
