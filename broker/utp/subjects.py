"""What CommonGround calls its subjects, streams and consumers, in the version that we speak."""

from __future__ import annotations

import re
from typing import NamedTuple

VERSION = "v1r3"
COMMANDS = f"cg_cmd_{VERSION}"
EVENTS = f"cg_evt_{VERSION}"
DAY_SECONDS = 86400
STREAMS = {  # and the subjects and seconds that they keep, where we have to make them
    COMMANDS: (f"cg.{VERSION}.*.*.cmd.*.*.>", DAY_SECONDS),
    EVENTS: (f"cg.{VERSION}.*.*.evt.*.*.>", 7 * DAY_SECONDS),
}
_TOKENS = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")  # what may be published


class Place(NamedTuple):
    """Where a command has been said."""

    project_id: str
    channel_id: str
    target: str


def pattern(target: str) -> str:
    return f"cg.{VERSION}.*.*.cmd.tool.{target}.*"


def consumer(target: str) -> str:
    return f"tool_{target}_cmd_{VERSION}"


def place(subject: str) -> Place | None:
    """None: it is no command to a tool."""
    tokens = subject.split(".")
    if len(tokens) < 8 or tokens[:2] != ["cg", VERSION] or tokens[4:6] != ["cmd", "tool"]:
        return None
    return Place(tokens[2], tokens[3], tokens[6])


def wakeup(place: Place, worker_target: str) -> str | None:
    """None: nobody can be called that."""
    if not _TOKENS.fullmatch(worker_target):
        return None
    return f"cg.{VERSION}.{place.project_id}.{place.channel_id}.cmd.agent.{worker_target}.wakeup"
