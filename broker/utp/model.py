"""CommonGround's shapes, as far as an executor of tools meets them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from msgspec import Struct

AfterExecution = Literal["suspend", "terminate"]
Status = Literal["success", "failed", "canceled", "timeout", "partial"]

CALL_CONTENT = "ToolCallContent"
RESULT_CONTENT = "ToolResultContent"
RESULT_CARD = "tool.result"


class ToolDefinition(Struct):
    """A row of resource.tools: what the agents of a project know of a tool."""

    project_id: str
    tool_name: str
    description: str | None
    parameters: dict[str, Any]
    target_subject: str | None
    after_execution: str | None
    options: dict[str, Any]


class Card(Struct):
    """A row of cards. What it is about, and in whose turn, stands in its metadata."""

    card_id: str
    project_id: str  # tenant_id in the table
    content: Any  # {"__type__": …}
    metadata: dict[str, Any]
    tool_call_id: str | None = None


class Span(NamedTuple):
    """Where a piece of work belongs, as W3C Trace Context has it."""

    trace_id: str
    span_id: str
    tracestate: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


class Command(Struct):
    """What a message on cmd.tool.* asks for. A turn that it belongs to is known, the rest may be missing."""

    project_id: str
    channel_id: str
    target: str
    tool_call_id: str
    agent_turn_id: str
    agent_id: str
    turn_epoch: int
    tool_call_card_id: str | None = None
    tool_name: str | None = None
    after_execution: str | None = None
    context_box_id: str | None = None


class Callback(Struct):
    """What the agent is told of a call that has ended: never the result itself, only where it lies."""

    tool_call_id: str
    agent_turn_id: str
    turn_epoch: int
    after_execution: str | None
    status: Status
    tool_result_card_id: str
    agent_id: str
    step_id: str | None


class Report(NamedTuple):
    """A callback on its way to the agent's inbox."""

    project_id: str
    channel_id: str
    callback: Callback
    span: Span
    source: str  # tool.<target>
    depth: int | None  # None: that of the request's edge, else 0
