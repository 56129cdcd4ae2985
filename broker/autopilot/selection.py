"""What a selector says (seed 004 §1, §2): one block, or it is INVALID."""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from enum import Enum
from typing import Any

import msgspec

LONGEST = 1024 * 1024  # of what a selector says; a longer text is no selection


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Which run this is."""

    spec_version: str = "1.4.2"
    profile_id: str = "A"
    run_id: str = msgspec.field(default_factory=lambda: str(uuid.uuid4()))
    request_id: str | None = None


class Kind(Enum):
    PICK = "PICK"  # this tool
    ASK_SUP = "ASK_SUP"  # a supervisor has to decide
    NOOP = "NOOP"  # nothing is to be done
    INVALID = "INVALID"


class Selection(msgspec.Struct, frozen=True):
    """A selector's choice; `raw` is what it said, to the letter."""

    kind: Kind
    sid: str | None = None  # of a PICK
    input_patch_json: str | None = None  # a JSON object to be merged into the run's inputs
    raw: str = ""

    def patch(self) -> dict[str, Any]:
        return msgspec.json.decode(self.input_patch_json, type=dict[str, Any]) if self.input_patch_json else {}


_PICK = re.compile(r"<PICK><(SID[0-9]{4})>(?:<INP>(.*)</INP>|<INP64>(.*)</INP64>)?<END>", re.DOTALL)
_WORDS = {"<ASK_SUP><END>": Kind.ASK_SUP, "<NOOP><END>": Kind.NOOP}


def parse(raw: str) -> Selection:
    """Reads one block; white space around it does not matter.

    >>> parse('<PICK><SID0007><INP>{"path":"a.txt"}</INP><END>').patch()
    {'path': 'a.txt'}
    >>> parse("<PICK><SID0007><END> and a word more").kind
    <Kind.INVALID: 'INVALID'>
    """
    text = raw.strip()
    if text in _WORDS:
        return Selection(_WORDS[text], raw=raw)
    found = _PICK.fullmatch(text) if len(text) <= LONGEST else None
    if found is None:
        return Selection(Kind.INVALID, raw=raw)
    sid, plain, encoded = found.groups()
    patch = plain if encoded is None else _decoded(encoded)
    if (plain is not None or encoded is not None) and not _is_object(patch):
        return Selection(Kind.INVALID, raw=raw)
    return Selection(Kind.PICK, sid, patch, raw)


def _decoded(text: str) -> str | None:
    try:
        return base64.b64decode("".join(text.split()), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _is_object(text: str | None) -> bool:
    try:
        return text is not None and isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
