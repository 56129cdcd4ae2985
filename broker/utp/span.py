"""Headers: to which trace a command belongs, how deep it is, and what goes on from there. Pure."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping

from broker.utp.model import Span
from broker.utp.subjects import VERSION

TRACEPARENT, TRACESTATE, DEPTH = "traceparent", "tracestate", "CG-Recursion-Depth"
MOST_DEPTH = 20  # calls of that depth, and deeper ones, are refused
SENDER = "cg-nats-client"  # CommonGround's own client, where nobody says another name

_WRITTEN = {name.lower(): name for name in (TRACEPARENT, TRACESTATE, DEPTH)}
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def known(headers: Mapping[str, str] | None) -> dict[str, str]:
    """By the names that we use: some clients write others' capitals."""
    return {_WRITTEN.get(name.lower(), name): value for name, value in (headers or {}).items()}


def child(headers: Mapping[str, str]) -> Span:
    """Of the span that the headers name; of a new trace where they name none that can be understood."""
    found = _TRACEPARENT.fullmatch(headers.get(TRACEPARENT, "").strip().lower())
    if found is None or (found[1] == "00" and found[3]):
        return Span(secrets.token_hex(16), secrets.token_hex(8), headers.get(TRACESTATE, ""))
    return Span(found[2], secrets.token_hex(8), headers.get(TRACESTATE, ""))


def depth(headers: Mapping[str, str]) -> int | None:
    """None: the headers do not say, or nothing that can be understood."""
    text = headers.get(DEPTH, "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def onwards(headers: Mapping[str, str], span: Span, depth: int) -> dict[str, str]:
    """What goes on with a wakeup: what came, in the new span."""
    said = {name: value for name, value in headers.items() if name == TRACESTATE or name.startswith("CG-")}
    said[TRACEPARENT] = span.traceparent
    said[DEPTH] = str(depth)
    said.setdefault("CG-Timestamp", str(int(time.time() * 1000)))
    said.setdefault("CG-Version", VERSION)
    said.setdefault("CG-Msg-Type", "dict")
    said.setdefault("CG-Sender", SENDER)
    return said
