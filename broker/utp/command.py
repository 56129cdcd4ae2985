"""Reads a command. Who is to be told of it comes first: with that, whatever else is wrong can be reported. Pure."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from broker.utp.model import Command
from broker.utp.subjects import Place
from broker.utp.text import clean

AFTER_EXECUTION = ("suspend", "terminate")
FORBIDDEN = ("args", "arguments", "result")  # an executor reads cards
_REQUIRED = ("tool_call_id", "agent_turn_id", "agent_id")
_OPTIONAL = ("tool_call_card_id", "tool_name", "after_execution")


class Flaw(NamedTuple):
    """What is wrong with a command, as CommonGround's executors word it."""

    message: str
    detail: dict[str, Any] | None = None


class Read(NamedTuple):
    command: Command
    flaw: Flaw | None


class Nameless(Exception):
    """Nobody can be told: the message says why."""


def read(data: bytes, place: Place) -> Read:
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        raise Nameless("it is not JSON") from None
    if not isinstance(said, dict):
        raise Nameless("it is not a JSON object")
    given = {name: _text(said.get(name)) for name in (*_REQUIRED, *_OPTIONAL, "context_box_id")}
    epoch = _epoch(said.get("turn_epoch"))
    missing = [name for name in _REQUIRED if not given[name]]
    if epoch is None or missing:
        raise Nameless(f"it has no {', '.join(missing if epoch is not None else [*missing, 'turn_epoch'])}")
    command = Command(
        *place,
        given["tool_call_id"],
        given["agent_turn_id"],
        given["agent_id"],
        epoch,
        given["tool_call_card_id"] or None,
        given["tool_name"] or None,
        given["after_execution"] or None,
        given["context_box_id"] or None,
    )
    return Read(command, _flaw(said, command))


def _flaw(said: dict[str, Any], command: Command) -> Flaw | None:
    """Wrong types first, then what is missing, then what may not be there."""
    wrong = [name for name in _REQUIRED if not isinstance(said[name], str)]
    if not _whole(said["turn_epoch"]):
        wrong.append("turn_epoch")
    if wrong:
        return Flaw(f"missing required fields {wrong}")
    if any(not isinstance(said.get(name), str | None) for name in _OPTIONAL):
        return Flaw("missing required fields ['unknown']")
    absent = [name for name in _OPTIONAL if getattr(command, name) is None]
    if absent:
        return Flaw(f"missing required fields {absent}")
    if command.after_execution not in AFTER_EXECUTION:
        return Flaw(f"invalid after_execution={command.after_execution!r}")
    for name in FORBIDDEN:
        if name in said:
            return Flaw(f"Protocol violation: payload.{name} is forbidden (use tool_call_card_id).")
    return None


def _text(value: Any) -> str:
    """Numbers can be told back, though they are wrong here. What no database can keep is none."""
    if isinstance(value, str):
        return value.strip() if clean(value) == value else ""
    return str(value) if isinstance(value, int | float) else ""


def _epoch(value: Any) -> int | None:
    """As near as possible."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                return None
    if isinstance(value, float):
        return int(value) if math.isfinite(value) else None
    return value if isinstance(value, int) else None


def _whole(value: Any) -> bool:
    """7, "7" and 7.0 are; 7.5 is not."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return False
    return not isinstance(value, float) or value.is_integer()
