"""Names of the queue on NATS: its streams, the subject of a call, and what stands in the headers of its message."""

from __future__ import annotations

import hashlib
import re
from urllib.parse import quote, unquote

ID = "Broker-Call-Id"
PRINCIPAL = "Broker-Principal"  # who has enqueued it
DIGEST = "Broker-Digest"  # of what it asks for: the same id is the same call
TOOL = "Broker-Tool"
CODE, REASON = "Broker-Dead-Code", "Broker-Dead-Reason"
DELIVERIES = "Broker-Deliveries"
ENQUEUED = "Broker-Enqueued"  # wall clock
ONCE = "Nats-Msg-Id"  # the server drops a second message that has the same

LONGEST_ID = 128
_ID = re.compile(rf"[^\x00-\x1f\x7f]{{1,{LONGEST_ID}}}")
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")


class Names:
    """Of one cluster."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.calls = f"broker_{cluster}_queue"  # a stream: what waits or runs
        self.marks = f"broker_{cluster}_queue_marks"  # a stream: what has been begun, or put off
        self.dead = f"broker_{cluster}_queue_dead"  # a stream: what did not end well
        self.results = f"broker_{cluster}_queue_results"  # a bucket
        self.requests = f"broker_{cluster}_queue_requests"  # objects: requests that are larger than a message
        self.replies = f"broker_{cluster}_queue_replies"  # objects: results that are
        self.news = f"broker_queue_news.{cluster}"  # a subject: there is something for a tool that had nothing before
        self.all_calls = f"broker_queue.{cluster}.>"
        self.all_marks = f"broker_queue_marks.{cluster}.>"
        self.all_dead = f"broker_queue_dead.{cluster}.>"

    def call(self, tool: str, name: str) -> str:
        return f"broker_queue.{self.cluster}.{token_of(tool)}.{name}"

    def call_by(self, name: str) -> str:
        """Of whichever tool."""
        return f"broker_queue.{self.cluster}.*.{name}"

    def calls_of(self, tool: str) -> str:
        return self.call(tool, "*")

    def mark(self, name: str) -> str:
        return f"broker_queue_marks.{self.cluster}.{name}"

    def dead_call(self, name: str) -> str:
        return f"broker_queue_dead.{self.cluster}.{name}"


def token_of(tool: str) -> str:
    """One token of a subject: %2E for a dot, and so on."""
    return _UNFIT.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), tool) or "%"


def consumer_of(tool: str) -> str:
    return "tool_" + hashlib.sha256(tool.encode()).hexdigest()[:32]


def name_of(call_id: str) -> str:
    """What an id is called on NATS."""
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def in_header(text: str) -> str:
    return quote(text, safe=" :/@#,;+=()", errors="replace")


def from_header(text: str) -> str:
    return unquote(text)
