"""The event protocol, version "0": what a tool's lines mean, and what became of the invocation. Pure.

The kind of an event is decided by its `type` alone; members that are not of its kind are ignored. The first violation
ends the stream, and so does `done`: nothing after it counts.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from broker.wire import is_json, is_too_deep

Object = dict[str, Raw]

MISSING_DONE = "Missing done event (protocol violation)"
REPORTED_FAILURE = "Tool reported failure"
MOST_ASSETS = 65536  # in one invocation
REPORT_DEPTH = 3  # levels that the report puts around what an event has in it


class Verdict(NamedTuple):
    """What became of an invocation, and why it is not a success."""

    name: Literal["success", "failed", "protocol_failure"]
    reason: str = ""
    died: bool = False  # it ended as no tool should, rather than having said what none may say


class Envelope(Struct, tag_field="type"):
    version: Literal["0"]
    request: str | UnsetType = msgspec.field(name="requestId", default=UNSET)
    timestamp: str | UnsetType = UNSET


class Log(Envelope, kw_only=True, tag="log"):
    level: Literal["debug", "info", "warn", "error"]
    message: str
    fields: Object | UnsetType = UNSET


class StatePatch(Envelope, kw_only=True, tag="state_patch"):
    patch: Raw

    def __post_init__(self) -> None:
        if bytes(self.patch)[:1] != b"{":
            raise ValueError("Expected `object` - at `$.patch`")


class Asset(Envelope, kw_only=True, tag="asset"):
    id: str = msgspec.field(name="assetId")
    kind: str
    media_type: str = msgspec.field(name="mediaType")
    path: str
    metadata: Object | UnsetType = UNSET


class UiEvent(Envelope, kw_only=True, tag="ui_event"):
    event: str
    payload: Object | UnsetType = UNSET


class Error(Envelope, kw_only=True, tag="error"):
    code: str = msgspec.field(name="errorCode")
    message: str = msgspec.field(name="errorMessage")
    details: Object | UnsetType = UNSET


class Done(Envelope, kw_only=True, tag="done"):
    ok: bool
    summary: str | UnsetType = UNSET


Body = Log | StatePatch | Asset | UiEvent | Error | Done
KINDS = ("log", "state_patch", "asset", "ui_event", "error", "done")


class Event(NamedTuple):
    """One line, as it came and as it is understood."""

    line: bytes
    body: Body


class Violation(Exception):
    """In words for the tool's author."""


class _Kind(Struct):
    type: Any = UNSET
    version: Any = UNSET


_body = msgspec.json.Decoder(Body)
_kind = msgspec.json.Decoder(_Kind)


def understood(line: bytes, depth: int) -> Event:
    if not is_json(line, depth):
        if is_too_deep(line, depth):
            raise Violation(f"an event is nested deeper than {depth} levels (limits.depth less {REPORT_DEPTH})")
        raise Violation(f"a line is not JSON: {_shown(line)}")
    if line[:1] != b"{":
        raise Violation(f"a line is not a JSON object: {_shown(line)}")
    try:
        return Event(line.replace(b"\r", b" "), _body.decode(line))  # between the parts of JSON they mean the same
    except (msgspec.DecodeError, RecursionError) as error:
        raise Violation(_words(line, str(error))) from None


def _words(line: bytes, error: str) -> str:
    try:
        kind = _kind.decode(line)
    except msgspec.DecodeError:
        return f"a line cannot be read: {_shown(line)}"
    if kind.version is UNSET:
        return f"an event has no version: {_shown(line)}"
    if kind.version != "0":
        return f'the version of an event must be "0", not {_shown(msgspec.json.encode(kind.version))}'
    if kind.type is UNSET:
        return f"an event has no type: {_shown(line)}"
    if kind.type in KINDS and "`$.type`" in error:
        return f"an event has more than one type: {_shown(line)}"
    if "`$.type`" in error or kind.type is None:
        return f"Unknown event type: {_shown(msgspec.json.encode(kind.type))}"
    return f"an event of type {kind.type} is wrong: {error[0].lower()}{error[1:]}: {_shown(line)}"


def _shown(text: bytes) -> str:
    shown = text.decode(errors="replace")
    return shown if len(shown) <= 160 else shown[:160] + " …"


class Stream:
    """One invocation's stdout, in whatever pieces it comes."""

    def __init__(self, most: int, depth: int) -> None:
        self.done: Done | None = None
        self.violation = ""
        self._most = most  # bytes of a line
        self._depth = max(depth - REPORT_DEPTH, 2)
        self._begun = bytearray()  # of a line that has not ended
        self._assets: set[bytes] = set()  # their ids may be long

    @property
    def over(self) -> bool:
        """What follows does not count."""
        return self.done is not None or bool(self.violation)

    def feed(self, data: bytes) -> list[Event]:
        """The events that end in this piece."""
        if self.over:
            return []
        first, *more = data.split(b"\n")
        self._begun += first
        if not more:
            self._check_length(self._begun)
            return []
        lines = [bytes(self._begun), *more[:-1]]
        self._begun = bytearray(more[-1])
        events = self._read(lines)
        if not self.over:
            self._check_length(self._begun)
        return events

    def end(self) -> list[Event]:
        """No more comes: an unterminated last line is a line."""
        last, self._begun = bytes(self._begun), bytearray()
        return [] if self.over else self._read([last])

    def _check_length(self, line: bytes | bytearray) -> None:
        if len(line) > self._most and len(line.rstrip(b"\r")) > self._most:
            self.violation = f"an event's line is over {self._most} bytes (limits.reply_bytes)"

    def _read(self, lines: list[bytes]) -> list[Event]:
        events: list[Event] = []
        for line in lines:
            if self.over:
                break
            self._check_length(line)
            text = line.strip(b" \t\r")
            if not text or self.violation:
                continue
            try:
                event = understood(text, self._depth)
                self._note(event.body)
            except Violation as violation:
                self.violation = str(violation)
                break
            events.append(event)
        return events

    def _note(self, body: Body) -> None:
        if isinstance(body, Done):
            self.done = body
        elif isinstance(body, Asset):
            name = blake2b(body.id.encode(), digest_size=16).digest()
            if name in self._assets:
                raise Violation(f"assetId {_shown(body.id.encode())} is used twice in one invocation")
            if len(self._assets) >= MOST_ASSETS:
                raise Violation(f"more than {MOST_ASSETS} assets in one invocation")
            self._assets.add(name)

    def verdict(self, ended: str, exit_code: int | None) -> Verdict:
        """When the process has ended; `ended` says how."""
        if self.violation:
            return Verdict("protocol_failure", f"{self.violation} (protocol violation)")
        if exit_code is None:
            return Verdict("protocol_failure", f"Process {ended}", died=True)
        if exit_code != 0:
            return Verdict("protocol_failure", f"Process exited with code {exit_code}", died=True)
        if self.done is None:
            return Verdict("protocol_failure", MISSING_DONE)
        if self.done.ok:
            return Verdict("success")
        return Verdict("failed", self.summary or REPORTED_FAILURE)

    @property
    def summary(self) -> str:
        return self.done.summary if self.done is not None and isinstance(self.done.summary, str) else ""
