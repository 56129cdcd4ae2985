"""A session's second document: what event tools' patches have made of it. Pure.

Only objects are taken apart: nested ones are merged, null removes, and every other value is kept as it was written.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

Tree = dict[str, Any]  # of trees and Raw values

EMPTY = b"{}"

_members = msgspec.json.Decoder(dict[str, Raw])
_encode = msgspec.json.Encoder().encode


def merged(tree: Tree, patch: bytes) -> Tree:
    """The tree with the patch (a JSON object) upon it. The old one stays as it was."""
    after = dict(tree)
    for key, raw in _members.decode(patch).items():
        value = bytes(raw).strip()
        if value == b"null":
            after.pop(key, None)
        elif value[:1] == b"{":
            before = after.get(key)
            after[key] = merged(before if isinstance(before, dict) else {}, value)
        else:
            after[key] = Raw(value)
    return after


def read(text: bytes) -> Tree:
    """A document as it was written; its nulls stay."""
    return {key: _value(bytes(raw).strip()) for key, raw in _members.decode(text).items()}


def _value(value: bytes) -> Any:
    return read(value) if value[:1] == b"{" else Raw(value)


def written(tree: Tree) -> bytes:
    return _encode(tree)


class Story:
    """The document of one session. `most` bytes is the largest that it may become."""

    __slots__ = ("_tree", "text")

    def __init__(self, text: bytes = EMPTY) -> None:
        self._tree = read(text)
        self.text = text

    def patch(self, patch: bytes, most: int) -> str:
        """Merges it, whole or not at all; why not, where not."""
        try:
            tree = merged(self._tree, patch)
        except (msgspec.DecodeError, RecursionError) as error:
            return f"the patch cannot be read: {error}"
        text = written(tree)
        if len(text) > most:
            return f"the session's state would be over {most} bytes (limits.state_bytes)"
        self._tree, self.text = tree, text
        return ""
