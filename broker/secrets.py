"""Values of environment variables that calls are given, and that are shown to nobody else (see observe/hidden.py)."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from urllib.parse import quote, quote_plus

import msgspec

from broker.errors import Refusal
from broker.observe.hidden import Hidden

OURS = ("BROKER_*", "PG*", "MACHINA_*")  # where NATS and Postgres are, and how to get in: nobody's but the broker's
LONG_LINE = 16  # characters
KEPT = frozenset(("id", "aid", "ok", "status", "type"))  # members of a reply that are no tool's words


class Secrets:
    def __init__(self, environ: Mapping[str, str], hidden: Hidden) -> None:
        self.hidden = hidden
        self._environ = environ

    def get(self, name: str) -> str | None:
        """A variable's value. From now on it is hidden wherever it appears."""
        value = self._environ.get(name)
        if not value or any(fnmatch.fnmatchcase(name, pattern) for pattern in OURS) or not _is_text(value):
            return None
        lines = (line for line in value.splitlines() if len(line) >= LONG_LINE)  # they may be seen one by one
        for form in dict.fromkeys((value, quote(value), quote(value, safe=""), quote_plus(value), *lines)):
            self.hidden.add(form)
        return value

    def line(self, line: bytes) -> bytes:
        """A reply's line without them, in its output neither."""
        if not self.hidden:
            return line
        try:
            members = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            shown = {name: value if name in KEPT else self._member(bytes(value)) for name, value in members.items()}
            return line if shown == members else msgspec.json.encode(shown) + b"\n"
        except (msgspec.DecodeError, RecursionError):
            return self.hidden.text(line.decode(errors="replace")).encode()

    def _member(self, raw: bytes) -> msgspec.Raw:
        text = raw.decode()
        if text[:1] != '"':
            return msgspec.Raw(self.hidden.json(text).encode())
        said = msgspec.json.decode(raw, type=str)
        shown = self.hidden.json(said)  # a tool's output is JSON in a string; all else is text
        return msgspec.Raw(raw if shown == said else msgspec.json.encode(shown))

    def refusal(self, refusal: Refusal) -> Refusal:
        text, extra = self.hidden.text(refusal.text), self.hidden.value(refusal.extra)
        if text == refusal.text and extra == refusal.extra:
            return refusal
        return Refusal(refusal.kind, text, ran=refusal.ran, **extra)


class Lent:
    """The variables that those may name who define tools."""

    def __init__(self, secrets: Secrets, names: Iterable[str]) -> None:
        self._secrets = secrets
        self._names = tuple(names)  # globs

    def get(self, name: str) -> str | None:
        allowed = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._names)
        return self._secrets.get(name) if allowed else None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # its bytes are no UTF-8
        return False
    return True
