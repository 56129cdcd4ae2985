"""Queued calls for tests: put in, asked about, looked after."""

from __future__ import annotations

from typing import Any

from tests.conftest import Served
from tests.support.load import LEDGER

SOON = "[queue]\nredeliver_seconds = 1\n[nats]\nwait_seconds = 3\n"  # another broker need not wait for long


def enqueue(broker: Served, text: str, call_id: str = "", aid: str = LEDGER, **more: Any) -> dict[str, Any]:
    """`text` is the input's JSON, or what the ledger's tool is told: "<effect> <ms> ok"."""
    call = {"aid": aid, "input_json": text, **({"id": call_id} if call_id else {}), **more}
    return broker.ask({"aid": "_enqueue", "call": call})


def queued(broker: Served, text: str, call_id: str = "", aid: str = LEDGER, **more: Any) -> str:
    answer = enqueue(broker, text, call_id, aid, **more)
    assert answer["ok"], answer
    return answer["call_id"]


def result(broker: Served, call_id: str, seconds: float = 0.0) -> dict[str, Any]:
    with broker.wire(seconds + 20) as wire:
        return wire.ask({"aid": "_result", "call_id": call_id, "wait_ms": seconds * 1000})


def operate(broker: Served, word: str, **members: Any) -> dict[str, Any]:
    with broker.operator() as wire:
        return wire.ask({"aid": f"_queue.{word}", **members})


def dead(broker: Served, call_id: str) -> dict[str, Any]:
    """One of the dead; empty where it is not among them."""
    found = [one for one in operate(broker, "dead", limit=1000)["dead"] if one["call_id"] == call_id]
    assert len(found) < 2, found
    return found[0] if found else {}
