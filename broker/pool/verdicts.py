"""What went wrong with a call, in words: the same ones wherever it was run."""

from __future__ import annotations

from broker import errors
from broker.errors import Refusal
from broker.model import Tool
from broker.pool.process import Process

STDERR_KEPT = 8192
DID_NOT_START = "did_not_start"  # the code of a toolhost's trouble that is no call's
SAID = "; it said: "
JUNK = "replied with a line that is not a JSON object"
MORE_THAN_ONCE = "answered one request more than once"
MORE_THAN_ASKED = "said more than it was asked"


def obituary(process: Process, reason: str, stderr: bytes) -> str:
    """Why it stopped, how it ended, and its last words."""
    ended = process.how_it_ended()
    why = ended if ended == reason else f"{reason} and {ended}"
    lines = stderr.decode(errors="replace").strip().splitlines()
    words = " | ".join(lines[-3:])[-400:]
    return f"its toolhost {why}" + (f"{SAID}{words}" if words else "")


def crash(aid: str, reason: str) -> Refusal:
    return Refusal(errors.CRASH, f"{aid}: {reason}")


def timeout(aid: str, seconds: float) -> Refusal:
    return Refusal(errors.TIMEOUT, f"{aid} gave no answer within {seconds:g} s; it may have run")


def oversize(aid: str, limit: int) -> Refusal:
    return Refusal(errors.REPLY_TOO_LARGE, f"{aid}: its reply is over {limit} bytes (limits.reply_bytes)")


def bad_reply(aid: str, what: str) -> Refusal:
    return Refusal(errors.BAD_REPLY, f"{aid}: its toolhost {what}")


def junk(line: bytes) -> str:
    return f"{JUNK}: {line.decode(errors='replace')!r}"


def unquoted(reason: str) -> str:
    """Without what a tool has said, which may be anything."""
    before, junk, _ = reason.partition(SAID)[0].partition(JUNK)
    return before + junk


def overloaded(tool: Tool, seconds: float) -> Refusal:
    what = f"is paused (`broker resume` lets it go) and has waited {seconds:g} s"
    what = what if tool.paused else f"waited {seconds:g} s for a toolhost"
    return Refusal(errors.OVERLOADED, f"{tool.name} {what} (limits.queue_seconds)", retry_after=1)


def no_lease(aid: str, error: str) -> Refusal:
    return Refusal(errors.UNAVAILABLE, f"{aid}: its toolhost enforces leases and gave none: {error}")
