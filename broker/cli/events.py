"""What a tool tells while it runs, for people: a line an event, in colours on a terminal."""

from __future__ import annotations

import sys
from typing import Any, TextIO

import msgspec

from broker.cli.common import printable
from broker.client.streaming import Event

COLOURS = {"error": 31, "failed": 31, "skipped": 33, "warn": 33, "success": 32, "state": 36, "asset": 35, "debug": 90}


class Paper:
    """Where lines go."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._coloured = self._stream.isatty()

    def line(self, name: str, kind: str, text: str) -> None:
        """`name` tells calls apart; empty where there is only one."""
        head = printable(f"{name}  ") if name else ""
        shown = printable(f"{kind:7}  {text}")
        code = COLOURS.get(kind) if self._coloured else None
        print(head + (f"\033[{code}m{shown}\033[0m" if code else shown).rstrip(), file=self._stream, flush=True)


def told(event: Event) -> tuple[str, str]:
    """What kind it is, and what it says."""
    body = event.body
    if event.choice is not None:
        options = "  ".join(f"{i}) {one['label']}" for i, one in enumerate(event.choice["choices"], 1))
        return "choice", f"{event.choice.get('prompt') or ''} {options}".strip()
    if event.type == "log":
        return str(body["level"]), str(body["message"])
    if event.type == "state_patch":
        return "state", _json(body["patch"])
    if event.type == "asset":
        return "asset", _asset(event)
    if event.type == "error":
        return "error", f"{body['errorCode']}: {body['errorMessage']}"
    if event.type == "ui_event":
        return "ui", f"{body['event']} {_json(body.get('payload', {}))}"
    return "done", str(body.get("summary", ""))


def _asset(event: Event) -> str:
    body, asset = event.body, event.asset or {}
    what = f"{body['kind']} {body['assetId']} ({body['mediaType']})"
    return f"{what}: {asset['url']}" if asset.get("registered") else f"{what}: not registered: {asset.get('reason')}"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
