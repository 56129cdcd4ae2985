"""CONTRACT §6 across brokers: a lease that one has issued opens its tool on any, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Crowd
from tests.support.load import LEASED
from tests.support.nats import NatsServer

ENFORCE = {"MACHINA_LEASE_ENFORCE": "1"}


@pytest.fixture
def pair(tmp_path: Path, where: dict[str, str], nats: NatsServer) -> Iterator[tuple[Crowd, Any, Any]]:
    crowd = Crowd(tmp_path / "brokers", where["include"], nats)
    yield crowd, crowd.start(env=ENFORCE), crowd.start(env=ENFORCE, config="[limits]\nqueue_seconds = 0.5", most=1)
    crowd.end()


def issue(broker, **more):
    with broker.operator() as wire:
        return wire.ask({"aid": "_lease.issue", "tool_aid": LEASED, **more})


def leased(word, token, ms=0, **more):
    return {"aid": LEASED, "input_json": f"{word} {ms} ok", "_lease_token": token, **more}


def test_a_lease_is_used_once_whichever_brokers_are_asked(pair):
    crowd, one, other = pair
    token = issue(one)["token_id"]
    with one.wire() as here, other.wire() as there:
        for wire in (here, there):
            wire.send(*[leased(f"r{n}", token, id=n) for n in range(5)])
        replies = here.replies(5) + there.replies(5)
    assert sum(reply["ok"] for reply in replies) == 1
    assert {reply.get("reason") for reply in replies} == {None, "lease already consumed"}
    assert sum(crowd.runs().values()) == 1


def test_what_is_wrong_with_a_lease_is_said_by_every_broker(pair):
    _, one, other = pair
    assert other.ask({"aid": LEASED, "input_json": "x 0 ok"})["type"] == "lease_required"
    assert other.ask(leased("x", "lease_" + "0" * 32))["reason"] == "lease not found"
    elsewhere = issue(one, tool_aid="AID.OTHER.v1")["token_id"]
    assert "lease tool mismatch" in other.ask(leased("x", elsewhere))["reason"]
    assert other.ask(leased("x", issue(one, tier=0)["token_id"]))["reason"] == "lease tier too low"


def test_a_lease_that_was_not_used_comes_back(pair):
    crowd, one, other = pair
    token = issue(one)["token_id"]
    with other.wire() as busy, other.wire() as late:
        busy.send(leased("busy", issue(one)["token_id"], 1500))
        other.eventually(lambda: crowd.runs()["busy"] == 1)
        assert late.ask(leased("late", token))["type"] == "overloaded"
        one.eventually(lambda: one.ask(leased("now", token))["ok"])
        assert busy.reply()["ok"]
    assert crowd.runs() == {"busy": 1, "now": 1}


def test_leases_are_listed_and_revoked_by_any_operator(pair):
    _, one, other = pair
    token = issue(one, ttl_ms=60_000)["token_id"]
    with other.operator() as wire:
        listed = wire.ask({"aid": "_lease.list"})["leases"]
        assert [lease["tool_aid"] for lease in listed] == [LEASED]
        assert wire.ask({"aid": "_lease.revoke", "name": listed[0]["fingerprint"]})["ok"]
        assert wire.ask({"aid": "_lease.list"})["leases"] == []
        assert wire.ask({"aid": "_lease.revoke", "name": token})["type"] == "not_found"
    assert one.ask(leased("x", token))["reason"] == "lease not found"


def test_without_nats_a_lease_is_neither_given_nor_taken_and_safe_tools_go_on(pair, nats):
    crowd, one, _ = pair
    token = issue(one)["token_id"]
    nats.kill()
    assert one.ask(leased("x", token))["type"] == "unavailable"
    assert issue(one)["type"] == "unavailable"
    assert one.ask({"aid": "AID.TEST.LEDGER.v1", "input_json": "safe 0 ok"})["ok"]
    nats.start()
    one.eventually(lambda: one.status()["cluster"]["connected"])
    token = issue(one)["token_id"]
    assert one.ask(leased("y", token))["ok"]
    assert crowd.runs() == {"safe": 1, "y": 1}
