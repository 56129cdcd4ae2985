"""Values of environment variables that calls are given: where they come from, and that they are read by nobody else.

Whatever the broker writes, keeps or says of such a call is searched for them; the variable's name takes their place.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec

from broker.errors import Refusal

WITHHELD = ("BROKER_*", "PG*", "MACHINA_*")  # they are the broker's own: NATS, Postgres
SHORTEST = 4  # characters: anything may contain a shorter one
LONG_LINE = 16
KEPT = frozenset(("id", "aid", "ok", "status", "type"))  # members of a reply that are no tool's words


class Secrets:
    def __init__(self, environ: Mapping[str, str], lent: Iterable[str] = ("*",)) -> None:
        """`lent` are globs: the variables that those may name who are no operators."""
        self._environ = environ
        self._lent = tuple(lent)
        self._names: dict[str, str] = {}  # what must not be seen → what is shown instead
        self._any: re.Pattern[str] | None = None

    def get(self, name: str) -> str | None:
        """A variable's value. From now on it is hidden."""
        value = self._environ.get(name)
        if not value or any(fnmatch.fnmatchcase(name, pattern) for pattern in WITHHELD):
            return None
        if not _is_text(value):
            return None
        self._learn(name, value)
        return value

    @property
    def lent(self) -> Lent:
        return Lent(self)

    def may_lend(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._lent)

    def _learn(self, name: str, value: str) -> None:
        if value in self._names or len(value) < SHORTEST:
            return
        shown = f"[{re.sub('[^A-Za-z0-9_]', '_', name)}]"
        lines = [line for line in value.splitlines() if len(line) >= LONG_LINE]  # they may be seen one by one
        for form in {form for text in (value, *lines) for form in _forms(text)}:
            self._names.setdefault(form, shown)
        longest_first = sorted(self._names, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)))

    # --- hiding -----------------------------------------------------------------------------------------------------

    def hide(self, text: str) -> str:
        return text if self._any is None else self._any.sub(lambda found: self._names[found[0]], text)

    def hide_json(self, text: str) -> str:
        """The same for JSON, which stays JSON. Where there is nothing to hide, nothing changes."""
        if self._any is None or not self._any.search(text):
            return text
        try:
            return json.dumps(self._hidden(json.loads(text)), ensure_ascii=False, separators=(",", ":"))
        except (ValueError, RecursionError):
            return self.hide(text)

    def hide_line(self, line: bytes) -> bytes:
        """The same for a reply's line, and the output in it."""
        if self._any is None or not self._any.search(line.decode(errors="replace")):
            return line
        try:
            members = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            hidden = {name: value if name in KEPT else self._member(bytes(value)) for name, value in members.items()}
            return msgspec.json.encode(hidden) + b"\n"
        except (msgspec.DecodeError, ValueError, RecursionError):
            return self.hide(line.decode(errors="replace")).encode()

    def hide_refusal(self, refusal: Refusal) -> Refusal:
        extra = {name: self._hidden(value) for name, value in refusal.extra.items()}
        if extra == refusal.extra and self.hide(refusal.text) == refusal.text:
            return refusal
        return Refusal(refusal.kind, self.hide(refusal.text), ran=refusal.ran, **extra)

    def _member(self, raw: bytes) -> msgspec.Raw:
        text = raw.decode()
        if text.startswith('"'):
            said = json.loads(text)
            return msgspec.Raw(msgspec.json.encode(self._hidden(said)))
        return msgspec.Raw(self.hide_json(text).encode())

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.hide_json(value) if value[:1] in ("{", "[", '"') else self.hide(value)
        if isinstance(value, dict):
            return {self.hide(name): self._hidden(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self._hidden(one) for one in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._names.get(str(value), value)
        return value


class Lent:
    """The variables that those may name who define tools."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets

    def get(self, name: str) -> str | None:
        return self._secrets.get(name) if self._secrets.may_lend(name) else None


NONE = Secrets({}, ())


def _forms(value: str) -> list[str]:
    """As it may stand in text, in JSON, in JSON in JSON, and in an address."""
    writers: list[Callable[[str], str]] = [
        lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
        lambda text: json.dumps(text)[1:-1],
        lambda text: json.dumps(text)[1:-1].replace("/", "\\/"),
    ]
    forms = {value, quote(value), quote(value, safe=""), quote_plus(value)}
    for _ in range(3):
        forms |= {write(form) for form in tuple(forms) for write in writers}
    return [form for form in forms if len(form) >= SHORTEST]


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # its bytes are no UTF-8
        return False
    return True
