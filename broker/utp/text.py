"""What a database can keep: text without U+0000 and halves of surrogate pairs, and JSON without them. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from broker.wire import is_json

REPLACEMENT, REPLACEMENT_ESCAPE = "\ufffd", rb"\ufffd"
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_NOT_STORABLE = re.compile(rb"\\u(0000|d[89a-f])", re.IGNORECASE)
_ESCAPE = re.compile(rb"\\(u[dD][89abAB]..\\u[dD][c-fC-F]..|u....|.)")


def storable(text: bytes) -> bytes:
    """JSON as it is, but for that."""
    return _ESCAPE.sub(_replaced, text) if _NOT_STORABLE.search(text) else text


def _replaced(found: re.Match[bytes]) -> bytes:
    return REPLACEMENT_ESCAPE if len(found[0]) == 6 and _NOT_STORABLE.match(found[0]) else found[0]


def parsed(text: bytes, depth: int) -> Any:
    """None where it is not JSON."""
    text = storable(text)
    return json.loads(text) if is_json(text, depth) else None


def told(text: str | None) -> Any:
    """Of a store; what cannot be read is as good as nothing."""
    try:
        return json.loads(storable(text.encode())) if text else None
    except (ValueError, RecursionError):
        return None


def clean(text: str) -> str:
    return _NO_TEXT.sub(REPLACEMENT, text)
