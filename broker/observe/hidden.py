"""Values that nobody may read: they are lent to tools, and come back to nobody. Whoever writes something asks here."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

INSTEAD = "[hidden]"
SHORTEST = 4  # characters: hiding every "1" would hide nothing
MOST = 1024  # values; the one that was lent least recently is forgotten first


class Hidden:
    """Exact values, as they are and as JSON writes them. What a tool makes of one (its hash, say) is not known here."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, None] = OrderedDict()
        self._forms: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._forms)

    def add(self, value: str) -> None:
        if len(value) < SHORTEST:
            return
        known = value in self._values
        self._values[value] = None
        self._values.move_to_end(value)
        if known:
            return
        if len(self._values) > MOST:
            self._values.popitem(last=False)
        forms = {form for one in self._values for form in (one, _within(one, True), _within(one, False))}
        self._forms = tuple(sorted(forms, key=len, reverse=True))  # one may be a part of another

    def text(self, text: str) -> str:
        for form in self._forms:
            if form in text:
                text = text.replace(form, INSTEAD)
        return text

    def value(self, value: Any) -> Any:
        """Of anything that JSON can say; a new one where there is something to hide, else the same."""
        if not self._forms:
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
        if not self._forms:
            return text
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return self.text(text)
        shown = self.value(said)
        return text if shown is said and self.text(text) == text else self.text(json.dumps(shown, ensure_ascii=False))


def _within(value: str, ascii_only: bool) -> str:
    """As it stands between the quotes of a JSON string."""
    return json.dumps(value, ensure_ascii=ascii_only)[1:-1]
