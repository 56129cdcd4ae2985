"""Lines of our own to a toolhost, between its calls: fences that prove its count, and leases that it asks for.

A fence is a line that no tool answers. Its reply quotes its name, and so shows that nothing stands between: a toolhost
that says too much or too little is found out here, before anybody gets an answer that is not his.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from broker.errors import Refusal
from broker.model import Tool, ToolInfo, Work
from broker.policy.breaker import Breaker, Settings
from broker.policy.idempotency import Entry

OURS = Tool(-1, ToolInfo("_broker"), None, 0.0, Breaker(Settings()))  # type: ignore[arg-type]

_secret = secrets.token_hex(8).encode()  # so that no tool can say a fence's name by chance
_numbers = itertools.count()


class Aside:
    """Both the caller of such a line and the sink of its reply."""

    principal = ""
    rights: Any = None
    face = ""
    number = 0
    turns = None
    line: Any = None
    held: Work | None = None  # a call that is not in the pipe before this is answered

    def __init__(self, line: bytes, seconds: float, answered: Callable[[bytes], None]) -> None:
        self._answered = answered
        self.work = Work(OURS, line, 1, None, self, self, seconds)

    def deliver(self, work: Work, lines: bytes, count: int) -> None:  # noqa: ARG002
        self._answered(lines)

    def tell(self, work: Work, members: bytes) -> None:
        """Toolhosts do not tell of calls under way."""

    def repeat(self, work: Work, entry: Entry) -> None:
        """Nobody asks for the same twice."""

    def refuse(self, work: Work, refusal: Refusal) -> None:
        """The toolhost is dead, and says so itself."""

    def gone(self) -> bool:
        return False

    def took(self, ticket: Any) -> None:
        """Nothing is lent to us."""

    def full(self, work: Work) -> bool:  # noqa: ARG002
        return False

    def behind(self) -> bool:
        return False


def fence_name() -> bytes:
    return b"_fence.%b.%d" % (_secret, next(_numbers))


def fence_line(name: bytes) -> bytes:
    return b'{"aid":"%b"}\n' % name


class Fence(Aside):
    """A fence that stands alone. (Those between two callers are a part of the second one's work.)"""

    def __init__(self, seconds: float, suspect: Tool, passed: Callable[[Fence, bool], None]) -> None:
        name = fence_name()
        super().__init__(fence_line(name), seconds, lambda lines: passed(self, name in lines))
        self.work.suspect = suspect


class _Issued(msgspec.Struct):
    token_id: str = ""
    error: str = ""


def issue_line(tool: Tool) -> bytes:
    return msgspec.json.encode({"aid": "_lease.issue", "tool_aid": tool.name, "tier": tool.tier}) + b"\n"


def issued(line: bytes) -> tuple[str, str]:
    """The token in a toolhost's answer to that, or else its error."""
    try:
        reply = msgspec.json.decode(line, type=_Issued)
    except msgspec.ValidationError as error:
        return "", str(error)
    return reply.token_id, reply.error


class Permit(Aside):
    """Asks a toolhost that enforces leases on its own for the one that a call needs. Our gates have let it pass."""

    def __init__(self, call: Work, seconds: float, passed: Callable[[Work, str, str], None]) -> None:
        self.held = call
        super().__init__(issue_line(call.tool), seconds, lambda lines: passed(call, *issued(lines)))
        self.work.suspect = call.tool


def with_token(line: bytes, token: str) -> bytes:
    """A call's line as this toolhost wants it. (Another toolhost has other tokens.)"""
    return b'{"_lease_token":' + msgspec.json.encode(token) + b"," + line[1:]


class _Refused(msgspec.Struct):
    error: str = ""
    status: str | None = None


def asks_for_a_lease(line: bytes) -> bool:
    """A toolhost's own refusal says that it wants a lease. (A tool that says so has run: its reply has a status.)"""
    if b"lease_required" not in line:
        return False
    try:
        refused = msgspec.json.decode(line, type=_Refused)
    except msgspec.ValidationError:
        return False
    return refused.error == "lease_required" and refused.status is None
