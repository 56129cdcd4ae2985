"""Durable calls as lines: put into the queue under an id, asked about by it."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from broker.client.reply import Reply, decode, failed, read
from broker.client.request import encode, request_line

LONGEST_WAIT = 60.0  # of one question; longer waits are several


class _Enqueued(Struct):
    call_id: str


class _Result(Struct):
    tool: str = ""
    result: Raw | UnsetType = UNSET


_enqueued = msgspec.json.Decoder(_Enqueued).decode
_result = msgspec.json.Decoder(_Result).decode


def new_id() -> str:
    """The client chooses it, so that it may say the same thing twice."""
    return secrets.token_hex(16)


def enqueue_line(call_id: str, aid: str, text: str, number: int | None = None, **more: Any) -> bytes:
    call = request_line(aid, text, **more)
    members: dict[str, Any] = {} if number is None else {"id": number}
    members |= {"aid": "_enqueue", "call": Raw(b'{"id":' + encode(call_id) + b"," + call[1:-1])}
    return encode(members) + b"\n"


def result_line(call_id: str, seconds: float, number: int | None = None) -> bytes:
    members: dict[str, Any] = {} if number is None else {"id": number}
    members |= {"aid": "_result", "call_id": call_id, "wait_ms": seconds * 1000}
    return encode(members) + b"\n"


def enqueued(aid: str, line: bytes) -> str:
    wire = decode(line)
    if not wire.succeeded():
        raise failed(aid, wire, line)
    return _enqueued(line).call_id


def result(line: bytes) -> Reply | None:
    """The tool's reply, or raises its failure; none: it waits, or runs."""
    wire = decode(line)
    if not wire.succeeded():
        raise failed("_result", wire, line)
    said = _result(line)
    return read(said.tool, bytes(said.result)) if not isinstance(said.result, UnsetType) else None
