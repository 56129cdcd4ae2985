"""Rows in every store: those of a report (inbox, edges of the call), and what rows say of cards and tools. Pure."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from broker.utp.model import Card, Report, ToolDefinition
from broker.utp.span import MOST_DEPTH
from broker.utp.stores.base import ReportRefused
from broker.utp.text import told

MESSAGE = "tool_result"
BACKFILLED = "tool_runner_backfill"  # CommonGround's mark of an edge that the executor had to fill in

INBOX = (
    "inbox_id",
    "project_id",
    "agent_id",
    "message_type",
    "correlation_id",
    "recursion_depth",
    "traceparent",
    "tracestate",
    "trace_id",
    "parent_step_id",
    "source_agent_id",
    "payload",
    "status",
)
EDGE = (
    "edge_id",
    "project_id",
    "channel_id",
    "primitive",
    "edge_phase",
    "source_agent_id",
    "source_agent_turn_id",
    "source_step_id",
    "target_agent_id",
    "target_agent_turn_id",
    "correlation_id",
    "recursion_depth",
    "trace_id",
    "parent_step_id",
    "metadata",
)


def depth_of(report: Report, requested: int | None) -> int:
    """`requested` is what the request's edge says, where there is one."""
    depth = report.depth if report.depth is not None else requested or 0
    if depth >= MOST_DEPTH:
        raise ReportRefused(f"its recursion depth is {depth}, and from {MOST_DEPTH} on calls are refused")
    if requested is not None and depth != requested:
        raise ReportRefused(f"its recursion depth is {depth}, and that of its request {requested}")
    return depth


def request_edge(report: Report, depth: int) -> dict[str, Any]:
    """Of a call whose caller has written none."""
    callback, target = report.callback, report.source.removeprefix("tool.")
    mark = {"tool_call_id": callback.tool_call_id, "source": BACKFILLED, "service": target, "recursion_depth": depth}
    return _edge(report, depth) | {
        "primitive": "tool_call",
        "edge_phase": "request",
        "source_agent_id": callback.agent_id,
        "source_agent_turn_id": callback.agent_turn_id,
        "source_step_id": callback.step_id,
        "target_agent_turn_id": callback.agent_turn_id,
        "parent_step_id": callback.step_id,
        "metadata": _json(mark),
    }


def inbox_row(report: Report, depth: int) -> dict[str, Any]:
    callback, span = report.callback, report.span
    return {
        "inbox_id": f"inbox_{uuid.uuid4().hex}",
        "project_id": report.project_id,
        "agent_id": callback.agent_id,
        "message_type": MESSAGE,
        "correlation_id": callback.tool_call_id,
        "recursion_depth": depth,
        "traceparent": span.traceparent,
        "tracestate": span.tracestate or None,
        "trace_id": span.trace_id,
        "parent_step_id": callback.step_id or "",
        "source_agent_id": report.source,
        "payload": _json(callback),
        "status": "pending",
    }


def response_edge(report: Report, depth: int, inbox_id: str) -> dict[str, Any]:
    about = {"inbox_id": inbox_id, "message_type": MESSAGE, "recursion_depth": depth}
    return _edge(report, depth) | {
        "primitive": "report",
        "edge_phase": "response",
        "source_agent_id": report.source,
        "parent_step_id": report.callback.step_id or "",
        "metadata": _json(about),
    }


def _edge(report: Report, depth: int) -> dict[str, Any]:
    return {
        **dict.fromkeys(EDGE),
        "edge_id": f"edge_{uuid.uuid4().hex}",
        "project_id": report.project_id,
        "channel_id": report.channel_id,
        "target_agent_id": report.callback.agent_id,
        "correlation_id": report.callback.tool_call_id,
        "recursion_depth": depth,
        "trace_id": report.span.trace_id,
    }


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# --- and back ---------------------------------------------------------------------------------------------------------


def card(row: Any) -> Card | None:
    if row is None:
        return None
    return Card(row["card_id"], row["tenant_id"], told(row["content"]), _object(row["metadata"]), row["tool_call_id"])


def definition(row: Any) -> ToolDefinition:
    return ToolDefinition(**dict(row) | {name: _object(row[name]) for name in ("parameters", "options")})


def _object(text: str | None) -> dict[str, Any]:
    said = told(text)
    return said if isinstance(said, dict) else {}
