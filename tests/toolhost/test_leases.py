"""Leases in the toolhost itself: with MACHINA_LEASE_ENFORCE a tool above tier 0 needs a token, once."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .talk import Host, demo, line

Serve = Callable[..., Host]
WRITE = "AID.FILE.WRITE.v1"


@pytest.fixture
def host(serve: Serve, tmp_path: Path) -> Host:
    return serve(MACHINA_LEASE_ENFORCE="1", MACHINA_WORK_DIR=str(tmp_path))


def issue(host: Host, tool_aid: str = WRITE, **members: object) -> str:
    token: str = host.ask(line("_lease.issue", tool_aid=tool_aid, **members))["token_id"]
    return token


def write(**members: object) -> bytes:
    return line(WRITE, {"path": "a", "text": "b"}, **members)


def rejection(host: Host, token: str) -> str:
    reply = host.ask(write(_lease_token=token))
    assert reply["error"] == "lease_rejected"
    assert set(reply) == {"ok", "error", "reason"}
    reason: str = reply["reason"]
    return reason


def test_a_token_opens_its_tool_once(host: Host) -> None:
    token = issue(host, tier=1)
    assert host.ask(write(_lease_token=token))["ok"] is True
    assert rejection(host, token) == "lease already consumed"


def test_issuing_answers_in_exactly_this_shape(host: Host) -> None:
    host.send(line("_lease.issue", tool_aid=WRITE, tier=2, ttl_ms=5000))
    assert re.fullmatch(
        rb'\{"ok":true,"token_id":"lease_[0-9a-f]{32}","tool_aid":"AID\.FILE\.WRITE\.v1","tier":2\}\n', host.raw_line()
    )
    host.send(line("_lease.gc"))
    assert host.raw_line() == b'{"ok":true,"active":1,"issued":1,"consumed":0,"rejected":0}\n'


def test_without_a_token_the_refusal_names_tier_and_tool(host: Host) -> None:
    for request in [write(), write(_lease_token=""), write(_lease_token=7)]:
        host.send(request)
        assert host.raw_line() == b'{"ok":false,"error":"lease_required","tier":1,"aid":"AID.FILE.WRITE.v1"}\n'


def test_each_rejection_says_why(host: Host) -> None:
    assert rejection(host, "lease_" + "0" * 32) == "lease not found"
    assert rejection(host, "nonsense") == "lease not found"
    assert rejection(host, issue(host, "AID.DEMO.ECHO.v1", tier=3)) == (
        "lease tool mismatch: expected=AID.DEMO.ECHO.v1 got=AID.FILE.WRITE.v1"
    )
    assert rejection(host, issue(host, tier=0)) == "lease tier too low"
    assert rejection(host, issue(host, "*", tier=0)) == "lease tier too low"
    expired = issue(host, tier=1, ttl_ms=1)
    time.sleep(1.1)
    assert rejection(host, expired) == "lease expired"
    assert host.ask(line("_lease.gc"))["rejected"] == 6


def test_a_rejected_token_is_not_spent(host: Host) -> None:
    token = issue(host, "*", tier=1)
    host.ask(demo("ECHO", _lease_token=token))  # tier 0: the token is not even looked at
    assert host.ask(write(_lease_token=token))["ok"] is True


def test_a_star_opens_any_tool_within_its_tier(host: Host) -> None:
    assert host.ask(write(_lease_token=issue(host, "*", tier=2)))["ok"] is True


def test_without_a_tier_the_lease_has_the_tools_own(host: Host) -> None:
    assert host.ask(line("_lease.issue", tool_aid=WRITE))["tier"] == 1
    assert host.ask(line("_lease.issue", tool_aid="*"))["tier"] == 0


def test_a_lease_lives_at_least_a_second(host: Host) -> None:
    token = issue(host, tier=1, ttl_ms=-5)
    time.sleep(0.5)
    assert host.ask(write(_lease_token=token))["ok"] is True


@pytest.mark.parametrize(
    "wrong", [{"tool_aid": ""}, {"tool_aid": 7}, {"tier": 4}, {"tier": -1}, {"tier": "1"}, {"tier": 1.0}]
)
def test_a_wrong_request_for_a_lease_is_refused(host: Host, wrong: dict[str, object]) -> None:
    reply = host.ask(line("_lease.issue", **({"tool_aid": WRITE, "tier": 1} | wrong)))
    assert reply["ok"] is False
    assert "tier must be" in reply["error"] or "missing tool_aid" in reply["error"]


def test_the_cache_answers_before_a_lease_is_asked_for(host: Host) -> None:
    host.ask(write(_lease_token=issue(host, tier=1), idempotency_key="k"))
    assert host.ask(write(idempotency_key="k"))["idempotent_hit"] is True


def test_the_table_of_leases_is_bounded(host: Host) -> None:
    for _ in range(1024):
        issue(host, tier=1)
    assert host.ask(line("_lease.issue", tool_aid=WRITE))["error"] == "too many leases: 1024 are active"


@pytest.mark.parametrize(
    ("setting", "enforced"), [("1", True), ("true", True), ("0", False), ("", False), ("yes", False)]
)
def test_enforcement_is_on_for_1_and_true(serve: Serve, tmp_path: Path, setting: str, enforced: bool) -> None:
    host = serve(MACHINA_LEASE_ENFORCE=setting, MACHINA_WORK_DIR=str(tmp_path))
    assert host.ask(write())["ok"] is not enforced
