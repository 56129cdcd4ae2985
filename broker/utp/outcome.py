"""What has come of a tool's call, as CommonGround says it: a status, a result, an error of its kinds. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Raw

from broker import errors
from broker.errors import Fault, Refusal
from broker.faces.caller import Said
from broker.utp.command import Flaw
from broker.utp.model import Status
from broker.utp.text import clean, parsed, storable
from broker.wire import is_json

SOURCE = "tool"
MAY_HAVE_RUN = "may have run"
CLASSES = {  # exceptions of Python tools: CommonGround's own, and those that it takes for them
    "BadRequestError": "bad_request",
    "ProtocolViolationError": "bad_request",
    "ValueError": "bad_request",
    "NotFoundError": "not_found",
    "KeyError": "not_found",
    "ConflictError": "conflict",
    "PolicyDeniedError": "auth_failed",
    "UpstreamUnavailableError": "upstream_unavailable",
    "ToolTimeoutError": "tool_timeout",
}
STATUSES = {"INVALID_PICK": "bad_request", "BREAKER_TRIP": "upstream_unavailable"}  # of a toolhost's reply


class Outcome(NamedTuple):
    status: Status
    result: Any  # or its JSON
    error: dict[str, Any] | None = None


def of_reply(said: Said, depth: int) -> Outcome:
    """A tool has run: its result, or its own error."""
    output = storable(said.output_json.encode(errors="replace"))
    if not said.failed():
        if not output.strip():
            return Outcome("success", None)
        if not is_json(output, depth):
            return failed("internal_error", "the tool put out what is not JSON")
        return Outcome("success", Raw(output))
    put_out = parsed(output, depth)
    spoken = _spoken(put_out) or _spoken(parsed((said.error or "").encode(), depth))
    if spoken is not None:
        return _failed(_error(**spoken))
    code = CLASSES.get(said.code or "") or STATUSES.get(said.status or "") or "internal_error"
    return failed(code, said.error or "the tool failed", more=put_out)


def of_refusal(refusal: Refusal, depth: int) -> Outcome:
    """The broker has no result of it."""
    kind = refusal.kind
    code = errors.INTERNAL.utp if refusal.ran and kind.fault is Fault.BROKER else kind.utp
    retryable = True if kind.retry and not refusal.ran else None
    status: Status = "timeout" if kind is errors.TIMEOUT else "failed"
    output = str(refusal.extra.get("output_json", ""))
    text = refusal.text
    if refusal.ran and MAY_HAVE_RUN not in text:
        text = f"{text}; it {MAY_HAVE_RUN}"
    error = _error(code, text, retryable=retryable)
    return _failed(error, status, parsed(output.encode(errors="replace"), depth))


def flawed(flaw: Flaw, code: str = "bad_request") -> Outcome:
    return failed(code, flaw.message, flaw.detail)


def failed(code: str, message: str, detail: Any = None, more: Any = None) -> Outcome:
    return _failed(_error(code, message, detail), more=more)


def _failed(error: dict[str, Any], status: Status = "failed", more: Any = None) -> Outcome:
    """`more` is what a tool has put out although it failed."""
    result = {"error_code": error["code"], "error_message": error["message"], "error": error}
    if "detail" in error:
        result["error_detail"] = error["detail"]
    if isinstance(more, dict) and more:
        result["output"] = more
    return Outcome(status, result, error)


def _error(
    code: str,
    message: str,
    detail: Any = None,
    retryable: bool | None = None,
    http_status: int | None = None,
    source: str = SOURCE,
) -> dict[str, Any]:
    error: dict[str, Any] = {"code": code, "message": clean(message), "source": source}
    if detail is not None:
        error["detail"] = detail
    if retryable is not None:
        error["retryable"] = retryable
    if (http_status := http_status or errors.UTP.get(code)) is not None:
        error["http_status"] = http_status
    return error


def _spoken(said: Any) -> dict[str, Any] | None:
    """An error in CommonGround's own words, wherever a tool puts it."""
    if not isinstance(said, dict):
        return None
    for one in (said.get("error"), said):
        if isinstance(one, dict) and isinstance(one.get("code"), str) and isinstance(one.get("message"), str):
            return _members(one, one["code"], one["message"], one.get("detail"))
    code, message = said.get("error_code"), said.get("error_message")
    if isinstance(code, str) or isinstance(message, str):
        words = message if isinstance(message, str) else "unknown error"
        return _members(
            said,
            code if isinstance(code, str) else "internal_error",
            words,
            said.get("error_detail", said.get("detail")),
        )
    return None


def _members(one: dict[str, Any], code: str, message: str, detail: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"code": code, "message": message, "detail": detail}
    for name, kind in (("retryable", bool), ("http_status", int), ("source", str)):
        if isinstance(one.get(name), kind):
            said[name] = one[name]
    return said
