"""A caller's line as the scanner found it: its known members, and words for what is wrong with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from broker import errors
from broker._native import ffi, lib
from broker.errors import Refusal
from broker.settings import Limits

MEMBERS = {
    lib.TB_ID: "id",
    lib.TB_AID: "aid",
    lib.TB_INPUT_JSON: "input_json",
    lib.TB_INPUTS: "inputs",
    lib.TB_DS_STATE: "ds_state",
    lib.TB_IDEMPOTENCY_KEY: "idempotency_key",
    lib.TB_LEASE_TOKEN: "_lease_token",
    lib.TB_TIMEOUT_MS: "timeout_ms",
    lib.TB_SESSION: "session",
    lib.TB_STREAM: "stream",
    lib.TB_TRACEPARENT: "traceparent",
    lib.TB_RUN_ID: "run_id",
    lib.TB_REQUEST_ID: "request_id",
}
EXPECTED = {
    lib.TB_INPUTS: "an object",
    lib.TB_DS_STATE: "an object",
    lib.TB_TIMEOUT_MS: "a whole number of milliseconds above 0",
    lib.TB_STREAM: "true or false",
}


AID = lib.TB_AID
IDEMPOTENCY_KEY, LEASE_TOKEN, DS_STATE = lib.TB_IDEMPOTENCY_KEY, lib.TB_LEASE_TOKEN, lib.TB_DS_STATE
TIMEOUT_MS, SESSION, STREAM = lib.TB_TIMEOUT_MS, lib.TB_SESSION, lib.TB_STREAM
REQUEST_ID = lib.TB_REQUEST_ID
SPANS = lib.TB_R_SPANS


class Asked(NamedTuple):
    """What a line asks for beside the tool's input."""

    timeout: bytes | None
    stream: bool
    key: str
    lease: str
    ds_state: bytes | None
    session: str
    request: str


class Members:
    """The known members of one line (a board's row, or an item of a scan), taken out when they are asked for."""

    __slots__ = ("_data", "_row", "_spans")

    def __init__(self, row: list[int], data: Any, spans: int = SPANS) -> None:
        self._row = row
        self._data = data
        self._spans = spans

    def raw(self, member: int) -> bytes | None:
        """Its JSON as it stands in the line."""
        at = self._spans + 2 * member
        start = self._row[at]
        if start < 0:
            return None
        value: bytes = ffi.buffer(self._data + start, self._row[at + 1])[:]
        return value

    def text(self, member: int) -> str:
        """A string; empty where it is absent."""
        value = self.raw(member)
        if value is None:
            return ""
        if b"\\" in value:
            decoded: str = msgspec.json.decode(value)
            return decoded
        return value[1:-1].decode()

    def asked(self) -> Asked:
        return Asked(
            self.raw(TIMEOUT_MS),
            self.raw(STREAM) == b"true",
            self.text(IDEMPOTENCY_KEY),
            self.text(LEASE_TOKEN),
            self.raw(DS_STATE),
            self.text(SESSION),
            self.text(REQUEST_ID),
        )


def problem_of(problem: int, member: int, limits: Limits) -> Refusal:
    """Why the scanner would not take a line, in words."""
    if problem == lib.TB_TOO_LONG:
        return Refusal(
            errors.TOO_LARGE, f"the request line is over {limits.request_bytes} bytes (limits.request_bytes)"
        )
    if problem == lib.TB_TOO_DEEP:
        return Refusal(
            errors.BAD_REQUEST, "invalid JSON", detail=f"nested deeper than {limits.depth} levels (limits.depth)"
        )
    if problem == lib.TB_NOT_AN_OBJECT:
        return Refusal(errors.BAD_REQUEST, "invalid JSON", detail="a request is one JSON object a line")
    if problem == lib.TB_TWICE:
        return Refusal(errors.BAD_REQUEST, f'the line has "{MEMBERS[member]}" twice')
    if problem == lib.TB_WRONG_TYPE:
        return wrong_type(member)
    if problem == lib.TB_BOTH_INPUTS:
        return Refusal(errors.BAD_REQUEST, 'the line has both "inputs" and "input_json"; send one of them')
    if problem == lib.TB_NO_AID:
        return Refusal(errors.BAD_REQUEST, "missing aid")
    if problem == lib.TB_NUL_NAME:
        return Refusal(errors.BAD_REQUEST, "a member's name contains a NUL character")
    return Refusal(errors.BAD_REQUEST, "invalid JSON")


def wrong_type(member: int) -> Refusal:
    return Refusal(errors.BAD_REQUEST, f'"{MEMBERS[member]}" must be {EXPECTED.get(member, "a string")}')
