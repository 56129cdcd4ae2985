"""Tools and jobs as AutoSage's clients read them."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from broker.jobs import SUCCEEDED, Job
from broker.model import Tool


def descriptor(tool: Tool) -> dict[str, Any]:
    """A tool as AutoSage's clients read it."""
    info = tool.info
    text = info.description or f"{info.name or tool.name}: no description."
    shown: dict[str, Any] = {
        "name": tool.name,
        "version": info.version,
        "stability": info.stability,
        "description": text,
        "input_schema": info.schema
        or {"type": "object", "description": f"Input of {tool.name}; any object.", "additionalProperties": True},
    }
    if info.tags:
        shown["tags"] = info.tags
    if info.examples:
        shown["examples"] = info.examples
    return shown


def record(job: Job) -> dict[str, Any]:
    """A job as its clients read it."""
    shown: dict[str, Any] = {
        "id": job.id,
        "tool_name": job.tool,
        "status": job.status,
        "created_at": _clock(job.created),
    }
    for field, value in (("started_at", job.started), ("finished_at", job.finished)):
        if value:
            shown[field] = _clock(value)
    if job.summary is not None:
        shown["summary"] = job.summary
    if job.status == SUCCEEDED and job.response:
        shown["result"] = _result(job)
    if job.error:
        shown["error"] = Raw(job.error.encode())
    return shown


def papers(job: Job) -> dict[str, bytes]:
    """The files that every job has."""
    summary = {key: value for key, value in record(job).items() if key not in ("result", "error")}
    found = {"request.json": job.request.encode(), "summary.json": _pretty(summary)}
    if job.status == SUCCEEDED:
        found["result.json"] = _pretty(_result(job))
    elif job.error:
        found["error.json"] = _pretty(Raw(job.error.encode()))
    return found


def _result(job: Job) -> dict[str, Any]:
    """The ToolResult, with what the tool has put out beside it, where no member has its name."""
    result: dict[str, Any] = msgspec.json.decode(job.response)
    output = result.get("output")
    return {**output, **result} if isinstance(output, dict) else result


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2)


def keys_of(given: Raw | UnsetType) -> str | None:
    """What a job that has not begun says of itself."""
    if given is UNSET or bytes(given).strip() == b"null":
        return None
    try:
        return "Input keys: " + ", ".join(sorted(msgspec.json.decode(given, type=dict[str, Raw])))
    except msgspec.DecodeError:
        return "Input provided."


def _clock(when: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when)) + f".{int(when % 1 * 1000):03d}Z"
