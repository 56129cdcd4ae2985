"""Names on NATS: the subject of a tool, and what stands in headers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nats.aio.msg import Msg

ROOT = "tools"

RAN = "Broker-Ran"  # beside a refusal: 0, the call has not run, 1, it may have
PROOF = "Broker-Lease-Proof"  # the sender has taken the call's lease
ERROR, ERROR_CODE = "Nats-Service-Error", "Nats-Service-Error-Code"
ACCEPTS = "Broker-Accept-Object"  # 1: a reply may come by reference
OBJECT = "Broker-Object"  # the payload is this object in the cluster's store
CALL = "Broker-Call"  # of another broker: its own name for the call,
AGAIN = "Broker-Again"  # what has become of it? It was sent so many milliseconds ago
HOLD = "Broker-Hold"  # 1: its events come faster than its caller reads them; 0: go on
TOOLS = "Broker-Tools"  # of another broker: which tools are there?

_KNOWN = {one.lower(): one for one in (PROOF, ACCEPTS, OBJECT, CALL, AGAIN, HOLD, TOOLS)}

_UNFIT = re.compile(r"[\s\x00-\x1f\x7f*>%]")


def subject_of(cluster: str, tool: str) -> str:
    """tools.<cluster>.<the tool's name>; what cannot stand in a subject, as in an URL."""
    name = _UNFIT.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), tool)
    parts = [part or "%" for part in name.split(".")]
    return f"{ROOT}.{cluster}.{'.'.join(parts)}"


def endpoint_of(tool: str) -> str:
    """As ADR-32 wants an endpoint's name: letters, digits, - and _."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_") else "_" for letter in tool)


def direct_subject(cluster: str, member: str) -> str:
    """Calls of one broker for another."""
    return f"broker_calls.{cluster}.{member}"


def objects_of(cluster: str) -> str:
    """The bucket of what is larger than a message."""
    return f"broker_{cluster}_objects"


def headers_of(message: Msg) -> dict[str, str]:
    """Ours, however their names are written."""
    return {_KNOWN.get(name.lower(), name): text for name, text in (message.headers or {}).items()}


def one_line(text: str) -> str:
    """As a header can have it."""
    return " ".join(text.encode("ascii", "replace").decode().split())[:512]
