"""Calls that wait while something changes: their tool, their rights, their lease, their toolhost, their caller.

CONTRACT §5 to §9: whatever is true when a call is handed over decides, not what was true when it came.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from tests.conftest import Wire
from tests.support.command import broker_command
from tests.support.config import toolhost
from tests.support.toolhosts import listing, scripted

A, B = "AID.A.v1", "AID.B.v1"
US = f"uid:{os.getuid()}"
SLOW = """open("ran", "a").write("x")
time.sleep(float(json.loads(request["input_json"])) if "input_json" in request else 0)
say(output_json="1")"""
LEASED = "[lease]\nenforce = true\n"


def one(tmp_path, body=SLOW, *, effects=(), head="", **settings):
    """A configuration with a single toolhost, whose tools A and B have these side effects."""
    plugin = listing(tmp_path / "tools.json", A=list(effects), B=[])
    settings = {"min": 1, "max": 1, "cwd": str(tmp_path), **settings}
    return head + toolhost("h", plugin, binary=scripted(tmp_path, body), **settings)


def ran(tmp_path):
    path = tmp_path / "ran"
    return len(path.read_text()) if path.exists() else 0


def audit(tmp_path):
    files = list(tmp_path.rglob("audit.jsonl"))
    return [json.loads(line)["what"] for file in files for line in file.read_text().splitlines()]


def lease(broker, **more):
    with broker.operator() as operator:
        return operator.ask({"aid": "_lease.issue", "tool_aid": A, "tier": 1, "ttl_ms": 60000, **more})["token_id"]


def slow(seconds, **more):
    return {"aid": A, "input_json": str(seconds), **more}


# --- the tool changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "refused"),
    [(LEASED, "lease_required"), (f'[[principal]]\nname = "{US}"\ntiers = [0]\n', "forbidden")],
)
@pytest.mark.parametrize("more", [{}, {"idempotency_key": "k"}, {"ds_state": {"slots": {}}}])
def test_a_call_that_finds_its_tool_replaced_by_a_dangerous_one_is_asked_again(start, tmp_path, head, refused, more):
    broker = start(config=one(tmp_path, head=head))
    with broker.wire() as wire:
        assert wire.ask({"aid": A})["ok"]
        before = ran(tmp_path)
        listing(tmp_path / "tools.json", A=["file_write"], B=[])
        assert wire.ask({"aid": A, **more})["type"] == refused
    assert ran(tmp_path) == before


def test_a_lease_that_came_with_the_call_opens_the_tool_as_it_is_now(start, tmp_path):
    broker = start(config=one(tmp_path, head=LEASED))
    broker.ask({"aid": A})
    token, low = lease(broker), lease(broker, tier=1)
    listing(tmp_path / "tools.json", A=["file_write"], B=[])
    assert broker.ask({"aid": A, "_lease_token": token})["ok"]
    listing(tmp_path / "tools.json", A=["process"], B=[])
    assert broker.ask({"aid": A, "_lease_token": low})["reason"] == "lease tier too low"


@pytest.mark.parametrize("more", [{}, {"id": 1, "idempotency_key": "k"}, {"ds_state": {"slots": {}}}])
def test_a_tool_that_only_the_new_plugin_has_is_found_by_the_next_call(start, tmp_path, more):
    broker = start(config=one(tmp_path))
    with broker.wire() as wire:
        assert wire.ask({"aid": "AID.NEW.v1"})["type"] == "not_found"
        listing(tmp_path / "tools.json", A=[], NEW=[])
        wire.send({"aid": "AID.NEW.v1", **more}, {"aid": A})
        assert all(reply["ok"] for reply in wire.replies(2))
        assert wire.ask({"aid": B})["type"] == "not_found"


def test_a_plugin_that_brings_a_name_which_is_taken_changes_nothing(start, tmp_path, where):
    broker = start(config=one(tmp_path) + toolhost("d", where["demo_plugin"]))
    text = (tmp_path / "tools.json").read_text().replace(A, "AID.DEMO.ECHO.v1")
    (tmp_path / "tools.json").write_text(text)
    assert broker.ask({"aid": A})["ok"]
    assert broker.ask({"aid": B})["ok"]
    assert broker.ask({"aid": "AID.DEMO.ECHO.v1", "input_json": "7"})["output_json"] == "7"
    assert "two tools are called" in next(p for p in broker.status()["pools"] if p["name"] == "h")["reason"]


def test_rights_that_a_reload_narrows_hold_for_calls_that_wait(start, tmp_path):
    config = one(tmp_path)
    broker = start(config=config)
    with broker.wire() as wire:
        wire.send(slow(0.8, id="runs"), {"aid": A, "id": "waits"}, {"aid": B, "id": "may"})
        time.sleep(0.3)
        (tmp_path / "broker0.toml").write_text(config + f'[[principal]]\nname = "{US}"\ntools = ["AID.B.*"]\n')
        with broker.operator() as operator:
            assert operator.ask({"aid": "_reload"})["ok"]
        replies = {reply["id"]: reply for reply in wire.replies(3)}
    assert replies["waits"]["type"] == "forbidden"
    assert replies["runs"]["ok"]
    assert replies["may"]["ok"]


# --- its toolhost ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"ds_state": {"slots": {}}}, {"idempotency_key": "k"}])
def test_calls_behind_a_crash_in_a_pool_that_a_reload_replaced_run_in_the_new_one(start, tmp_path, more):
    body = """if aid == "AID.B.v1":
    time.sleep(0.8)
    sys.exit(3)
say(output_json="1")"""
    broker = start(config=one(tmp_path, body))
    with broker.wire() as wire:
        for _ in range(4):
            wire.ask({"aid": A})
        wire.send({"aid": B, "id": "b", **more}, *({"aid": A, "id": n, **more} for n in range(3)))
        time.sleep(0.3)
        (tmp_path / "broker0.toml").write_text(one(tmp_path, body, max=2))
        assert "1 added, 1 removed" in broker_command(tmp_path, "reload", "--socket", broker.path).stdout
        replies = {reply["id"]: reply for reply in wire.replies(4)}
    assert replies.pop("b")["type"] == "crash"
    assert all(reply["ok"] for reply in replies.values()), replies


def test_a_call_under_a_key_is_not_run_again_though_its_tool_is_safe_to_run_again(start, tmp_path):
    body = """open("ran", "a").write("x")
if len(open("ran").read()) % 2: sys.exit(3)
say(output_json="1")"""
    broker = start(config=one(tmp_path, body, rerun=["AID.A.*"], head="[breaker]\nin_a_row = 100\n"))
    assert broker.ask({"aid": A})["ok"]
    assert ran(tmp_path) == 2
    with broker.wire() as wire:
        assert wire.ask({"aid": A, "idempotency_key": "k"})["type"] == "crash"
        assert wire.ask({"aid": A, "idempotency_key": "k"})["idempotent_hit"]
    assert ran(tmp_path) == 3


def test_a_timeout_is_never_run_again(start, tmp_path):
    broker = start(config=one(tmp_path, rerun=["AID.A.*"]))
    assert broker.ask(slow(5, timeout_ms=300))["type"] == "timeout"
    assert ran(tmp_path) == 1


# --- its lease --------------------------------------------------------------------------------------------------------


def test_a_lease_is_spent_and_written_down_when_the_call_is_handed_over(start, tmp_path):
    broker = start(config=one(tmp_path, effects=["file_write"], head=LEASED))
    token = lease(broker)
    with broker.wire() as wire:
        wire.send(slow(30, _lease_token=token))
        broker.eventually(lambda: ran(tmp_path) == 1)
        assert audit(tmp_path) == ["lease_issued", "lease_used"]
        with broker.operator() as operator:
            assert operator.ask({"aid": "_lease.gc"})["consumed"] == 1
            assert operator.ask({"aid": "_lease.revoke", "name": token})["type"] == "not_found", "beyond recall"
        broker.process.send_signal(signal.SIGKILL)


def test_a_call_that_waits_with_a_revoked_lease_is_answered_at_once_and_does_not_run(start, tmp_path):
    broker = start(config=one(tmp_path, effects=["file_write"], head=LEASED))
    first, second = lease(broker), lease(broker)
    with broker.wire() as wire:
        wire.send(slow(2, id="runs", _lease_token=first), slow(0, id="waits", _lease_token=second))
        time.sleep(0.3)
        begin = time.monotonic()
        assert broker_command(tmp_path, "lease", "revoke", second, "--socket", broker.path).returncode == 0
        reply = wire.reply()
        assert (reply["id"], reply["reason"]) == ("waits", "lease not found")
        assert time.monotonic() - begin < 1.5
        assert wire.reply()["ok"]
    assert ran(tmp_path) == 1


def test_a_missing_lease_is_written_down_like_a_wrong_one(start, tmp_path):
    broker = start(config=one(tmp_path, effects=["file_write"], head=LEASED))
    broker.ask({"aid": A})
    broker.ask({"aid": A, "_lease_token": "lease_x"})
    assert audit(tmp_path) == ["lease_required", "lease_rejected"]


def test_an_expired_lease_is_called_so_also_after_a_collection(start, tmp_path):
    broker = start(config=one(tmp_path, effects=["file_write"], head=LEASED))
    token = lease(broker, ttl_ms=1000)
    time.sleep(1.1)
    assert broker.status()["leases"]["active"] == 0
    assert broker.ask({"aid": A, "_lease_token": token})["reason"] == "lease expired"


@pytest.mark.parametrize("name", ["", "é", "\ud800", "*"])
def test_revoking_what_is_no_lease_is_refused(shared, name):
    with shared.operator() as operator:
        assert operator.ask({"aid": "_lease.revoke", "name": name})["type"] in ("not_found", "bad_request")


# --- its caller -------------------------------------------------------------------------------------------------------


def test_a_caller_that_hangs_up_gives_back_what_its_calls_hold_while_they_wait_for_a_session(start, tmp_path):
    broker = start(config=one(tmp_path, effects=["file_write"], head=LEASED, max=2))
    first, second = lease(broker), lease(broker)
    state = {"ds_state": {"slots": {}}, "session": "s"}
    with broker.wire() as blocker:
        blocker.send(slow(1.5, _lease_token=first, **state))
        broker.eventually(lambda: ran(tmp_path) == 1)
        with broker.wire() as leaver:
            leaver.send(slow(0, _lease_token=second, **state))
            broker.eventually(lambda: broker.status()["waiting_for_sessions"] == 1)
            assert broker.status()["queued_bytes"] > 40
        broker.eventually(lambda: broker.status()["waiting_for_sessions"] == 0, 0.7)
        assert broker.ask({"aid": A, "_lease_token": second})["ok"]
        assert blocker.reply()["ok"]
    assert ran(tmp_path) == 2
    assert broker.status()["queued_bytes"] == 0


@pytest.mark.parametrize("state", [{}, {"ds_state": {"slots": {}}, "session": "s"}])
def test_a_duplicate_takes_over_from_a_caller_that_hangs_up_while_its_call_waits(start, tmp_path, state):
    broker = start(config=one(tmp_path))
    keyed = slow(0, idempotency_key="k", **state)
    with broker.wire() as blocker, broker.wire() as second, broker.wire() as third:
        blocker.send(slow(1, **state))
        broker.eventually(lambda: ran(tmp_path) == 1)
        with broker.wire() as first:
            first.send(keyed)
            broker.eventually(lambda: broker.status()["waiting"] == 1)
            second.send(keyed)
            third.send(keyed)
            time.sleep(0.2)
        replies = second.reply(), third.reply()
    assert [reply["ok"] for reply in replies] == [True, True]
    assert sorted(bool(reply.get("idempotent_hit")) for reply in replies) == [False, True]
    assert ran(tmp_path) == 2


def test_nobody_runs_a_key_that_everybody_has_hung_up_on(start, tmp_path):
    broker = start(config=one(tmp_path))
    with broker.wire() as blocker:
        blocker.send(slow(1))
        broker.eventually(lambda: ran(tmp_path) == 1)
        with broker.wire() as first:
            first.send(slow(0, idempotency_key="k"))
            broker.eventually(lambda: broker.status()["waiting"] == 1)
            with broker.wire() as second:
                second.send(slow(0, idempotency_key="k"))
                time.sleep(0.1)
            time.sleep(0.1)
        broker.eventually(lambda: broker.status()["waiting"] == 0, 0.6)
        assert blocker.reply()["ok"]
    assert ran(tmp_path) == 1


def test_a_caller_that_hangs_up_while_it_is_not_read_from_has_its_waiting_calls_dropped(start, tmp_path):
    broker = start(config=one(tmp_path, head="[limits]\nconnection_calls = 50\n"))
    with broker.wire() as blocker:
        blocker.send(slow(2))
        broker.eventually(lambda: ran(tmp_path) == 1)
        with broker.wire() as flood:
            flood.send(*({"aid": A, "id": n} for n in range(400)))
            broker.eventually(lambda: broker.status()["waiting"] >= 50)
        broker.eventually(lambda: broker.status()["waiting"] == 0, 1.0)
        assert blocker.reply()["ok"]
    assert ran(tmp_path) == 1


def test_long_ids_count_for_the_byte_limits(start, tmp_path):
    broker = start(config=one(tmp_path, head="[limits]\nconnection_bytes = 1000000\n"))
    with broker.wire(timeout=1) as wire:
        wire.send(slow(3, id=0))
        line = json.dumps({"id": "x" * 100_000, "aid": A}).encode() + b"\n"
        sent = 0
        try:
            while sent < 40_000_000:
                sent += wire.socket.send(line)
        except TimeoutError:
            pass
        assert sent < 4_000_000
        assert broker.status()["queued_bytes"] < 2_500_000


def test_calls_that_wait_for_a_session_follow_each_other_at_once(shared):
    with shared.wire() as wire:
        begin = time.monotonic()
        wire.send(*({"aid": "AID.DEMO.ECHO.v1", "id": n, "ds_state": {"delta": True}} for n in range(40)))
        assert [reply["id"] for reply in wire.replies(40)] == list(range(40))
        assert time.monotonic() - begin < 1.0


def test_a_connection_shows_one_token(start, where, tmp_path):
    tokens = [broker_command(tmp_path, "token", "new", name).stdout.strip() for name in ("wide", "narrow")]
    broker = start(
        "--tcp",
        "127.0.0.1:0",
        config='[[principal]]\nname = "token:narrow"\ntools = []\n' + toolhost("d", where["demo_plugin"]),
    )
    address = ("127.0.0.1", int(broker.ready.split("tcp:127.0.0.1:")[1].split()[0]))
    with Wire(address) as wire:
        wire.send(*({"aid": "_auth", "token": token} for token in tokens), {"aid": "AID.DEMO.ECHO.v1"})
        first, second, call = wire.replies(3)
    assert first["principal"] == "token:wide"
    assert second["type"] == "forbidden"
    assert "token:wide already" in second["error"]
    assert call["ok"], "and stays who it was"


def test_sixty_four_leased_calls_and_a_killed_toolhost_spend_each_lease_once(start, tmp_path):
    """Those that were only handed over, and had not run, move with their leases."""
    body = """open("ran", "a").write("x")
time.sleep(0.002)
say(output_json="1")"""
    broker = start(config=one(tmp_path, body, effects=["file_write"], head=LEASED, max=2))
    tokens = [lease(broker) for _ in range(64)]
    with broker.wire() as wire:
        killer = threading.Timer(0.05, lambda: [os.kill(pid, signal.SIGKILL) for pid in broker.toolhosts()])
        killer.start()
        wire.send(*({"aid": A, "id": n, "_lease_token": token} for n, token in enumerate(tokens)))
        replies = wire.replies(64)
        killer.join()
    crashed = [reply for reply in replies if reply.get("type") == "crash"]
    assert len(crashed) <= 2
    assert all(reply["ok"] for reply in replies if reply not in crashed)
    assert ran(tmp_path) <= 64
    assert audit(tmp_path).count("lease_used") == 64
    with broker.operator() as operator:
        assert operator.ask({"aid": "_lease.gc"})["consumed"] == 64
