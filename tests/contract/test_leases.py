"""CONTRACT §6: leases, from outside."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.support.command import broker_command
from tests.support.config import toolhost

WRITE = "AID.FILE.WRITE.v1"


@pytest.fixture
def leased(start, where, tmp_path):
    return start(
        "--plugin",
        where["demo_plugin"],
        env={"MACHINA_LEASE_ENFORCE": "1", "MACHINA_WORK_DIR": str(tmp_path / "work")},
    )


def write(name="a.txt", **more):
    return {"aid": WRITE, "input_json": json.dumps({"path": name, "text": "hi"}), **more}


def issue(broker, **more):
    with broker.operator() as operator:
        return operator.ask({"aid": "_lease.issue", "tool_aid": WRITE, **more})


def test_a_tool_above_tier_0_needs_a_token_and_a_safe_one_does_not(leased):
    reply = leased.ask(write(id=7))
    assert reply["error"] == "lease_required"
    assert (reply["id"], reply["ok"], reply["tier"], reply["aid"], reply["type"]) == (
        7,
        False,
        1,
        WRITE,
        "lease_required",
    )
    assert leased.call("AID.DEMO.ECHO.v1")["ok"]


def test_a_token_opens_once(leased):
    reply = issue(leased, tier=1, ttl_ms=5000)
    assert reply["ok"] is True
    assert (reply["tool_aid"], reply["tier"]) == (WRITE, 1)
    assert reply["token_id"].startswith("lease_")
    assert len(reply["token_id"]) == len("lease_") + 32
    with leased.wire() as wire:
        assert wire.ask(write(_lease_token=reply["token_id"]))["status"] == "OK"
        again = wire.ask(write(_lease_token=reply["token_id"]))
    assert (again["error"], again["reason"]) == ("lease_rejected", "lease already consumed")
    with leased.operator() as operator:
        counts = operator.ask({"aid": "_lease.gc"})
    assert [counts[name] for name in ("ok", "active", "issued", "consumed", "rejected")] == [True, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (None, "lease not found"),
        ({"tool_aid": "AID.OTHER.v1", "tier": 1}, f"lease tool mismatch: expected=AID.OTHER.v1 got={WRITE}"),
        ({"tier": 0}, "lease tier too low"),
    ],
)
def test_reasons(leased, asked, reason):
    token = issue(leased, **asked)["token_id"] if asked else "lease_" + "0" * 32
    assert leased.ask(write(_lease_token=token))["reason"] == reason


def test_it_expires_and_its_life_is_clamped(leased):
    reply = issue(leased, ttl_ms=1)
    assert reply["ttl_ms"] == 1000
    assert issue(leased, ttl_ms=10_000_000)["ttl_ms"] == 300_000
    assert issue(leased)["ttl_ms"] == 10_000
    time.sleep(1.1)
    assert leased.ask(write(_lease_token=reply["token_id"]))["reason"] in ("lease expired", "lease not found")


def test_a_star_opens_any_tool_within_its_tier(leased):
    assert leased.ask(write(_lease_token=issue(leased, tool_aid="*", tier=1)["token_id"]))["ok"]
    assert issue(leased, tool_aid="*")["type"] == "bad_request"


def test_sixty_four_callers_race_with_one_token_and_exactly_one_runs(leased):
    token = issue(leased)["token_id"]
    replies = []

    def ask():
        with leased.wire() as wire:
            replies.append(wire.ask(write(_lease_token=token)))

    threads = [threading.Thread(target=ask) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(reply["ok"] for reply in replies) == 1
    assert {reply["reason"] for reply in replies if not reply["ok"]} == {"lease already consumed"}


def test_the_cache_answers_before_a_lease_is_asked_for(leased):
    token = issue(leased)["token_id"]
    with leased.wire() as wire:
        assert wire.ask(write(_lease_token=token, idempotency_key="k"))["ok"]
        assert wire.ask(write(_lease_token=token, idempotency_key="k"))["idempotent_hit"]
        assert wire.ask(write(idempotency_key="k"))["idempotent_hit"]
        assert wire.ask(write(idempotency_key="other"))["error"] == "lease_required"


def test_a_token_is_given_back_when_the_call_never_ran(start, where, tmp_path):
    broker = start(
        config="[limits]\nqueue_seconds = 0.2\n[lease]\nenforce = true\n"
        + toolhost("one", where["demo_plugin"], min=1, max=1),
        env={"MACHINA_WORK_DIR": str(tmp_path / "work")},
    )
    token = issue(broker, ttl_ms=60000)["token_id"]
    with broker.wire() as blocker, broker.wire() as wire:
        blocker.send({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":800}'})
        time.sleep(0.1)
        assert wire.ask(write(_lease_token=token))["type"] == "overloaded"
        blocker.reply()
        assert wire.ask(write(_lease_token=token))["ok"]


def test_issuing_is_the_operators_right(leased):
    for aid in ("_lease.issue", "_lease.gc", "_lease.list", "_lease.revoke"):
        assert leased.ask({"aid": aid, "tool_aid": WRITE})["type"] == "forbidden"


def test_everything_is_written_down_but_never_a_token(leased, tmp_path):
    token = issue(leased)["token_id"]
    leased.ask(write(_lease_token=token))
    leased.ask(write(_lease_token=token))
    text = next(tmp_path.rglob("audit.jsonl")).read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert [record["what"] for record in records] == ["lease_issued", "lease_used", "lease_rejected"]
    assert {"time", "who", "what", "aid", "tier", "token"} <= set(records[0])
    assert len({record["token"] for record in records}) == 1
    assert token not in text
    assert token.removeprefix("lease_") not in text
    assert token not in leased.log.read_text()


def test_without_enforcement_no_token_is_asked_for(shared):
    assert shared.ask(write("b.txt")).get("error") != "lease_required"


def test_the_command_line_issues_lists_and_revokes(leased, tmp_path):
    at = ("--socket", leased.path)
    token = broker_command(tmp_path, "lease", "issue", WRITE, "--ttl", "60", *at).stdout.strip()
    shown = broker_command(tmp_path, "lease", "list", *at).stdout
    assert WRITE in shown
    assert token not in shown
    assert broker_command(tmp_path, "lease", "revoke", token, *at).stdout.startswith("revoked")
    assert leased.ask(write(_lease_token=token))["reason"] == "lease not found"
    assert "1 issued" in broker_command(tmp_path, "lease", "gc", *at).stdout
    assert broker_command(tmp_path, "lease", "revoke", "nope", *at).returncode == 1


@pytest.fixture(params=["the broker enforces, too", "only the toolhost enforces"])
def enforcing(start, where, tmp_path, request):
    """A toolhost that asks for leases itself."""
    work = tmp_path / "work"
    env = {"MACHINA_LEASE_ENFORCE": "1", "MACHINA_WORK_DIR": str(work)}
    config = f"[lease]\nenforce = {str(request.param.startswith('the')).lower()}\n" + toolhost(
        "d", where["demo_plugin"], max=2
    )
    return start(config=config + f"env = {{ {', '.join(f'{k} = {json.dumps(v)}' for k, v in env.items())} }}\n")


def test_a_toolhost_that_enforces_leases_on_its_own_is_given_the_tokens_that_it_needs(enforcing, tmp_path):
    def lease():
        return {"_lease_token": issue(enforcing)["token_id"]}

    for n in range(5):
        assert enforcing.ask(write(f"{n}.txt", id=n, **lease()))["ok"]
    with enforcing.wire() as wire:
        wire.send(*(write(f"{n}.txt", id=n, **lease()) for n in range(5, 40)))
        assert all(reply["ok"] for reply in wire.replies(35))
    assert len(list((tmp_path / "work").iterdir())) == 40
    assert "token" not in json.dumps(enforcing.ask(write("x.txt", **lease())))


DIES_WHEN_ASKED_FOR_A_LEASE = """#!/usr/bin/env python3
import json, os, sys
if sys.argv[1] == "--list":
    print('{"ok":true,"tools":[{"aid":"AID.FILE.WRITE.v1"}]}')
    sys.exit()
for line in sys.stdin:
    request = json.loads(line)
    reply = {"ok": False, "error": "tool not found: " + request["aid"]}
    if request["aid"] == "_lease.issue":
        if not os.path.exists("died"):
            open("died", "w")
            os._exit(1)
        reply = {"ok": True, "token_id": "t"}
    elif request["aid"] == "AID.FILE.WRITE.v1":
        reply = {"ok": False, "error": "lease_required", "tier": 1}
        if request.get("_lease_token") == "t":
            reply = {"ok": True, "status": "OK", "output_json": "1", "error": ""}
    print(json.dumps(reply), flush=True)
"""


def test_a_call_that_waits_for_its_toolhosts_lease_moves_when_the_toolhost_dies(start, tmp_path):
    """It has not run: the toolhost dies while it is asked for the lease."""
    binary = tmp_path / "host"
    binary.write_text(DIES_WHEN_ASKED_FOR_A_LEASE)
    binary.chmod(0o755)
    broker = start(config=f'[[toolhost]]\nname = "a"\nbinary = "{binary}"\ncwd = "{tmp_path}"\nmin = 1\nmax = 1\n')
    assert broker.call(WRITE)["ok"]
    assert broker.counts()["moved"] == 1
    assert (tmp_path / "died").exists()
