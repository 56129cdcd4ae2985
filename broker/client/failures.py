"""Exceptions for every row of the table of errors: catch one code, one party's fault, or all of them."""

from __future__ import annotations

from typing import Any, ClassVar

from broker import errors
from broker.errors import Kind, Refusal


class CallFailed(Exception):
    """A call without a result. `code` is the table's, `ran` says whether the tool may have run all the same."""

    kind: ClassVar[Kind] = errors.INTERNAL

    def __init__(self, aid: str, text: str, *, ran: bool | None = None, more: dict[str, Any] | None = None) -> None:
        super().__init__(f"{self.kind.code}: {text}" if text else self.kind.code)
        self.aid = aid
        self.text = text
        self.ran = self.kind.fault is errors.Fault.TOOL if ran is None else ran
        self.more = more or {}  # what else the reply said: reason, tier, retry_after, next_probe_ms …

    @property
    def code(self) -> str:
        return self.kind.code

    @property
    def retry(self) -> bool:
        """The same call may succeed later."""
        return self.kind.retry


class CallerFault(CallFailed):
    """The call itself was wrong, or not allowed."""


class BrokerFault(CallFailed):
    """The broker could not run it, or could not be reached."""


class ToolFault(CallFailed):
    """The tool, or its toolhost, failed."""


class BadRequest(CallerFault):
    kind = errors.BAD_REQUEST


class NotFound(CallerFault):
    kind = errors.NOT_FOUND


class TooLarge(CallerFault):
    kind = errors.TOO_LARGE


class Forbidden(CallerFault):
    kind = errors.FORBIDDEN


class LeaseRequired(CallerFault):
    kind = errors.LEASE_REQUIRED


class LeaseRejected(CallerFault):
    kind = errors.LEASE_REJECTED


class Overloaded(BrokerFault):
    kind = errors.OVERLOADED


class BreakerOpen(BrokerFault):
    kind = errors.BREAKER_OPEN


class Draining(BrokerFault):
    kind = errors.DRAINING


class Unavailable(BrokerFault):
    """Also: no broker answers, or the connection was lost; then `ran` says whether the call may have run."""

    kind = errors.UNAVAILABLE


class Internal(BrokerFault):
    kind = errors.INTERNAL


class Timeout(ToolFault):
    kind = errors.TIMEOUT


class Crash(ToolFault):
    kind = errors.CRASH


class BadReply(ToolFault):
    kind = errors.BAD_REPLY


class ReplyTooLarge(ToolFault):
    kind = errors.REPLY_TOO_LARGE


class ToolError(ToolFault):
    """The tool ran and says itself that it failed."""

    kind = errors.TOOL_ERROR


def _all(family: type[CallFailed]) -> list[type[CallFailed]]:
    return [family, *(one for child in family.__subclasses__() for one in _all(child))]


BY_CODE: dict[str, type[CallFailed]] = {one.kind.code: one for one in _all(CallFailed) if "kind" in vars(one)}
BY_CODE[errors.INTERNAL.code] = Internal


def failure(aid: str, refusal: Refusal) -> CallFailed:
    """What a caller gets to see of a refusal."""
    return BY_CODE[refusal.kind.code](aid, refusal.text, ran=refusal.ran, more=refusal.extra)
