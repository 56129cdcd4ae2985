"""Values that nobody may read: they are lent to tools, and come back to nobody. Whoever writes something asks here."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

INSTEAD = "[hidden]"
SHORTEST = 4  # characters: hiding every "1" would hide nothing
MOST = 256  # values; the one that was lent least recently is forgotten first


class Hidden:
    """Exact values, as they are and as JSON and Python write them; what a tool makes of one is not known here."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, tuple[str, ...]] = OrderedDict()  # and how they are written
        self._known: tuple[str, ...] | None = ()

    def add(self, value: str) -> None:
        if len(value) < SHORTEST:
            return
        if value not in self._values:
            self._values[value] = _forms(value)
            self._known = None
        self._values.move_to_end(value)
        if len(self._values) > MOST:
            self._values.popitem(last=False)

    def _all(self) -> tuple[str, ...]:
        """The longest first: one may be a part of another."""
        if self._known is None:
            self._known = tuple(sorted({form for one in self._values.values() for form in one}, key=len, reverse=True))
        return self._known

    def text(self, text: str) -> str:
        for form in self._all():
            if form in text:
                text = text.replace(form, INSTEAD)
        return text

    def value(self, value: Any) -> Any:
        """Of anything that JSON can say; a new one where there is something to hide, else the same."""
        if not self._values:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            changed = {self.value(name): self.value(one) for name, one in value.items()}
            return changed if changed != value else value
        if isinstance(value, list | tuple):
            items = [self.value(one) for one in value]
            return items if items != list(value) else value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return INSTEAD if self.text(repr(value)) != repr(value) else value
        return value

    def json(self, text: str) -> str:
        """JSON, however it writes its strings; unchanged where there is nothing to hide."""
        if not self._values:
            return text
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return self.text(text)
        shown = self.value(said)
        return text if shown is said and self.text(text) == text else self.text(json.dumps(shown, ensure_ascii=False))


def _forms(value: str) -> tuple[str, ...]:
    """As it is, as it stands between the quotes of a JSON string, and of what Python writes for people."""
    json_forms = (json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False))
    return (value, *json_forms, repr(value)[1:-1], repr(value.encode(errors="replace"))[2:-1])
