"""A queued call as its message has it, and what came of one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Raw, Struct

from broker.cluster import names as usual
from broker.cluster.queue import names
from broker.cluster.queue.names import from_header, in_header, name_of
from broker.faces.nats.line import Line

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js.api import RawStreamMsg

_encode = msgspec.json.Encoder().encode


class Letter(Struct):
    """A call in the queue, or among the dead."""

    id: str
    tool: str
    principal: str  # who has enqueued it; empty: a program on NATS, without a broker
    digest: str
    data: bytes  # the request object,
    large: str = ""  # or where it lies
    sequence: int = 0
    deliveries: int = 1
    enqueued: float = 0.0  # wall clock

    @property
    def name(self) -> str:
        return name_of(self.id)

    def headers(self, once: str) -> dict[str, str]:
        return {
            names.ONCE: once,
            names.ID: in_header(self.id),
            names.TOOL: in_header(self.tool),
            names.PRINCIPAL: in_header(self.principal),
            names.DIGEST: self.digest,
            **({usual.OBJECT: self.large} if self.large else {}),
        }


class Outcome(Struct, omit_defaults=True):
    """What came of a call: a tool's reply, or why there is none."""

    id: str
    tool: str
    principal: str
    digest: str
    state: Literal["done", "dead"]
    at: float  # wall clock
    reply: Raw = Raw(b"null")  # the line,
    large: str = ""  # or where it lies


outcome_of = msgspec.json.Decoder(Outcome).decode


def written(outcome: Outcome) -> bytes:
    return _encode(outcome)


def arrived(message: Msg, tool: str) -> Letter:
    """What a broker has been given. Others may write into the stream, too: nothing of it is certain to be there."""
    about = message.metadata
    sequence = about.sequence.stream
    return _letter(
        message.headers or {}, message.data, tool, sequence, about.num_delivered or 1, about.timestamp.timestamp()
    )


def stored(message: RawStreamMsg) -> Letter:
    headers = message.headers or {}
    tool = from_header(headers.get(names.TOOL, ""))
    time = message.time.timestamp() if isinstance(message.time, datetime) else 0.0
    return _letter(headers, message.data or b"", tool, message.seq or 0, 1, time)


def _letter(
    headers: Mapping[str, str], data: bytes, tool: str, sequence: int, deliveries: int, enqueued: float
) -> Letter:
    call_id = from_header(headers.get(names.ID, "")) or id_in(data) or f"message-{sequence}"
    return Letter(
        call_id,
        tool,
        from_header(headers.get(names.PRINCIPAL, "")),
        headers.get(names.DIGEST, ""),
        data,
        headers.get(usual.OBJECT, ""),
        sequence,
        deliveries,
        enqueued,
    )


class _Named(Struct):
    id: Any = None


_named = msgspec.json.Decoder(_Named).decode


def id_in(data: bytes) -> str:
    """The request's own, where it has one that is an id of the queue's."""
    try:
        found = _named(data).id
    except (msgspec.DecodeError, RecursionError):
        return ""
    return found if isinstance(found, str) and names.is_id(found) else ""


def digest_of(line: Line) -> str:
    """Of what is asked for. The lease may be another one: whoever enqueues a call again may need a new one."""
    asked = line.asked
    beside = _encode((asked.key, asked.session, (asked.timeout or b"").decode(), (asked.ds_state or b"").decode()))
    return hashlib.sha256(line.text + b"\n" + beside).hexdigest()[:32]
