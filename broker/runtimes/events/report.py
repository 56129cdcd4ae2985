"""The final reply of an event tool: its events (as many as fit), the session's state, and what became of it. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from msgspec import Raw

from broker.runtimes.events.protocol import Asset, Event, Log, Verdict
from broker.runtimes.events.shown import shown

STDERR_TOLD = 4096
LONGEST_TEXT = 8192  # characters of a summary, or a reason

_encode = msgspec.json.Encoder().encode


class Report:
    """What there is to say of one invocation, as it grows. Logs may take a part of the room only: a flood of them
    leaves what matters in its place."""

    def __init__(self, most: int) -> None:
        self._most = most  # bytes of the reply
        self._room = most // 2
        self._log_room = most // 8
        self._events: list[tuple[str, Raw]] = []  # with their types
        self._cut: Counter[str] = Counter()
        self._assets: list[Any] = []
        self._shown: list[Any] = []
        self.unregistered = 0  # assets whose files cannot be served,
        self.why = ""  # and what was wrong with the first

    def add(self, event: Event, asset: Any = None) -> bytes:
        """Keeps it, if there is room; `asset` is what became of the file. As it is told to a caller that listens: an
        object's members."""
        line, body = event
        kind = str(body.__struct_config__.tag)
        members = b'"event":' + line
        notes = shown(body)
        if isinstance(body, Asset):
            notes["asset"] = asset
        if notes:
            members += b"," + _encode(notes)[1:-1]
        cost = len(_encode(line.decode())) + (2 * len(members) - 2 * len(line))
        if cost > self._room or (isinstance(body, Log) and cost > self._log_room):
            self._cut[kind] += 1
            return members
        self._room -= cost
        if isinstance(body, Log):
            self._log_room -= cost
        self._events.append((kind, Raw(line)))
        if isinstance(body, Asset):
            self._assets.append(asset)
        if "choice" in notes or "placeholder" in notes:
            self._shown.append({name: value for name, value in notes.items() if name != "asset"})
        return members

    def short(self, text: str) -> str:
        """A text of the tool's own, as long as it may be beside all else."""
        most = min(LONGEST_TEXT, self._most // 64)
        return text if len(text) <= most else f"{text[:most]} … ({len(text)} characters)"

    def output(self, verdict: Verdict, summary: str, state: bytes, said: bytes, room: int) -> str:
        """The `output_json`; without its events where it would be longer than `room` as a JSON string."""
        text = self._output(verdict, summary, state, said)
        if len(_encode(text)) > room:
            self._cut.update(kind for kind, _ in self._events)
            self._events, self._shown = [], []
            text = self._output(verdict, summary, state, b"")
        return text

    def _output(self, verdict: Verdict, summary: str, state: bytes, said: bytes) -> str:
        output: dict[str, Any] = {
            "verdict": verdict.name,
            "summary": self.short(summary),
            "events": [line for _, line in self._events],
        }
        output["state"] = Raw(state)
        if verdict.reason:
            output["reason"] = self.short(verdict.reason)
        if self._assets:
            output["assets"] = self._assets
        if self._shown:
            output["shown"] = self._shown
        if self._cut:
            output["cut"] = dict(self._cut)  # events that are not here, by type
        if said:
            output["stderr"] = said[-STDERR_TOLD:].decode(errors="replace")
        return _encode(output).decode()
