"""What went wrong with a call, in words: the same ones wherever it was run."""

from __future__ import annotations

from broker import errors
from broker.errors import Refusal
from broker.pool.process import Process

STDERR_KEPT = 8192
MORE_THAN_ONCE = "answered one request more than once"
MORE_THAN_ASKED = "said more than it was asked"


def obituary(process: Process, reason: str, stderr: bytes) -> str:
    """Why it stopped, how it ended, and its last words."""
    ended = process.how_it_ended()
    why = ended if ended == reason else f"{reason} and {ended}"
    lines = stderr.decode(errors="replace").strip().splitlines()
    words = " | ".join(lines[-3:])[-400:]
    return f"its toolhost {why}" + (f"; it said: {words}" if words else "")


def crash(aid: str, reason: str) -> Refusal:
    return Refusal(errors.CRASH, f"{aid}: {reason}")


def timeout(aid: str, seconds: float) -> Refusal:
    return Refusal(errors.TIMEOUT, f"{aid} gave no answer within {seconds:g} s; it may have run")


def oversize(aid: str, limit: int) -> Refusal:
    return Refusal(errors.REPLY_TOO_LARGE, f"{aid}: its reply is over {limit} bytes (limits.reply_bytes)")


def bad_reply(aid: str, what: str) -> Refusal:
    return Refusal(errors.BAD_REPLY, f"{aid}: its toolhost {what}")


def junk(line: bytes) -> str:
    return f"replied with a line that is not a JSON object: {line.decode(errors='replace')!r}"


def overloaded(aid: str, seconds: float) -> Refusal:
    return Refusal(
        errors.OVERLOADED, f"{aid} waited {seconds:g} s for a toolhost (limits.queue_seconds)", retry_after=1
    )


def no_lease(aid: str, error: str) -> Refusal:
    return Refusal(errors.UNAVAILABLE, f"{aid}: its toolhost enforces leases and gave none: {error}")
