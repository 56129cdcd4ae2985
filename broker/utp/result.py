"""The result card of a call, and the callback that says where it lies. Pure."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from broker.utp.model import RESULT_CARD, RESULT_CONTENT, AfterExecution, Callback, Card, Command, Status
from broker.utp.outcome import Outcome

LINEAGE = ("step_id", "trace_id", "parent_step_id")  # copied from the call's card as they are, or absent as there
STATUSES: tuple[Status, ...] = ("success", "failed", "canceled", "timeout", "partial")


def card(command: Command, call: Card | None, outcome: Outcome, author: str) -> Card:
    about = call.metadata if call is not None else {}
    metadata: dict[str, Any] = {
        "type": RESULT_CARD,
        "role": "tool",
        "author_id": author,
        "project_id": command.project_id,
        "created_at": datetime.now(UTC).isoformat(),
        "agent_turn_id": command.agent_turn_id,
        "tool_call_id": command.tool_call_id,
        "function_name": command.tool_name or command.target,
    }
    metadata |= {name: about[name] for name in LINEAGE if about.get(name) not in (None, "")}
    content = {
        "__type__": RESULT_CONTENT,
        "status": outcome.status,
        "after_execution": after_execution(command),
        "result": outcome.result,
        "error": outcome.error,
    }
    return Card(uuid.uuid4().hex, command.project_id, content, metadata, command.tool_call_id)


def callback(command: Command, call: Card | None, result: Card) -> Callback:
    """A card that somebody else has written may be anything."""
    status = result.content.get("status") if isinstance(result.content, dict) else None
    step = call.metadata.get("step_id") if call is not None else None
    return Callback(
        command.tool_call_id,
        command.agent_turn_id,
        command.turn_epoch,
        after_execution(command),
        status if status in STATUSES else "failed",
        result.card_id,
        command.agent_id,
        str(step) if step not in (None, "") else None,
    )


def after_execution(command: Command) -> AfterExecution:
    """The command's, whatever a result's __cg_control says: readers of the card look there first."""
    return "terminate" if command.after_execution == "terminate" else "suspend"
