"""Every error once: its code, whose fault it is, what each face says for it, and whether a retry can help."""

from enum import Enum
from typing import Any, NamedTuple

import msgspec


class Fault(Enum):
    CALLER = "caller"
    BROKER = "broker"
    TOOL = "tool"


class Kind(NamedTuple):
    """One row of the table of CONTRACT §12."""

    code: str
    http: int
    fault: Fault
    status: str  # what a Machina caller reads in `status`
    retry: bool  # the same call may succeed later
    meaning: str
    utp: str  # CommonGround's code


UTP = {  # CommonGround's codes, and the HTTP status that it says with each
    "bad_request": 400,
    "auth_failed": 403,
    "not_found": 404,
    "conflict": 409,
    "internal_error": 500,
    "upstream_unavailable": 503,
    "tool_timeout": 504,
}
_USUAL = {Fault.CALLER: "bad_request", Fault.BROKER: "upstream_unavailable", Fault.TOOL: "internal_error"}


def _kind(
    code: str, http: int, fault: Fault, retry: bool, meaning: str, status: str = "TOOL_ERROR", utp: str = ""
) -> Kind:
    return Kind(code, http, fault, status, retry, meaning, utp or _USUAL[fault])


BAD_REQUEST = _kind("bad_request", 400, Fault.CALLER, False, "the request cannot be understood", "INVALID_PICK")
NOT_FOUND = _kind("not_found", 404, Fault.CALLER, False, "there is no such tool", "INVALID_PICK", "not_found")
TOO_LARGE = _kind("too_large", 413, Fault.CALLER, False, "the request is over a limit")
FORBIDDEN = _kind("forbidden", 403, Fault.CALLER, False, "the caller has no right to this", utp="auth_failed")
LEASE_REQUIRED = _kind("lease_required", 403, Fault.CALLER, False, "the tool needs a lease token", utp="auth_failed")
LEASE_REJECTED = _kind(
    "lease_rejected", 403, Fault.CALLER, False, "the lease does not open this tool", utp="auth_failed"
)
OVERLOADED = _kind("overloaded", 429, Fault.BROKER, True, "the call waited too long for a toolhost")
BREAKER_OPEN = _kind("breaker_open", 503, Fault.BROKER, True, "the tool failed too often", "BREAKER_TRIP")
DRAINING = _kind("draining", 503, Fault.BROKER, True, "the broker is shutting down")
UNAVAILABLE = _kind("unavailable", 503, Fault.BROKER, True, "the toolhost cannot be started")
INTERNAL = _kind("internal", 500, Fault.BROKER, False, "the broker made a mistake", utp="internal_error")
TIMEOUT = _kind("timeout", 504, Fault.TOOL, True, "the tool was late; it may have run", utp="tool_timeout")
CRASH = _kind("crash", 500, Fault.TOOL, True, "the toolhost died during the call; it may have run")
BAD_REPLY = _kind("bad_reply", 500, Fault.TOOL, False, "the toolhost's reply is not JSON; the call may have run")
REPLY_TOO_LARGE = _kind("reply_too_large", 500, Fault.TOOL, False, "the toolhost's reply is over the limit")
TOOL_ERROR = _kind("tool_error", 500, Fault.TOOL, False, "the tool ran and failed")

KINDS = {kind.code: kind for kind in list(globals().values()) if isinstance(kind, Kind)}

_encode = msgspec.json.Encoder().encode


class Refusal:
    """A final answer that is not a tool's result: of which kind, in which words, with what beside them."""

    __slots__ = ("extra", "kind", "ran", "text")

    def __init__(self, kind: Kind, text: str, *, ran: bool | None = None, **extra: Any) -> None:
        self.kind = kind
        self.text = text
        self.ran = kind.fault is Fault.TOOL if ran is None else ran  # the call may have run
        self.extra = extra

    def line(self, aid: str | None, ids: bytes | None = None) -> bytes:
        """The Machina reply line; `ids` is the raw JSON of the caller's id, with its line end."""
        body: dict[str, Any] = {
            "ok": False,
            "status": self.kind.status,
            "error": self.text,
            "type": self.kind.code,
        }
        if aid is not None:
            body["aid"] = aid
        body.update(self.extra)
        encoded = _encode(body)
        if ids:
            return b'{"id":' + ids[:-1] + b"," + encoded[1:] + b"\n"
        return encoded + b"\n"


class ConfigError(Exception):
    """The configuration cannot be used; the message names the file, the setting and what to do."""


class MissingFile(ConfigError):
    """It names a toolhost or a plugin that is not there."""
