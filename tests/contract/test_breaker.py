"""CONTRACT §8: the breaker, from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.support.config import toolhost
from tests.support.toolhosts import scripted

EXIT = "AID.FAULT.EXIT.v1"


@pytest.fixture
def touchy(start, where):
    return start(
        config="[breaker]\nopen_seconds = 0.5\nmax_open_seconds = 2\n"
        + toolhost("f", where["fault_plugin"], max=4)
        + toolhost("d", where["demo_plugin"], max=4),
    )


def fail(broker, times=5):
    with broker.wire() as wire:
        return [wire.ask({"aid": EXIT}) for _ in range(times)]


def breaker(broker):
    return next(tool for tool in broker.status()["tools"] if tool["aid"] == EXIT)


def test_five_crashes_in_a_row_open_it_and_calls_are_answered_at_once(touchy):
    assert [reply["type"] for reply in fail(touchy)] == ["crash"] * 5
    begin = time.monotonic()
    (reply,) = fail(touchy, 1)
    assert time.monotonic() - begin < 0.2
    assert (reply["ok"], reply["status"], reply["type"]) == (False, "BREAKER_TRIP", "breaker_open")
    assert 0 < reply["next_probe_ms"] <= 600
    assert "code" in reply["error"]
    assert breaker(touchy)["breaker"] == "open"
    assert touchy.call("AID.FAULT.STDERR.v1", bytes=1)["ok"], "other tools of the plugin go on"


def test_one_probe_at_a_time_and_the_pause_doubles(touchy):
    fail(touchy)
    time.sleep(0.6)
    with touchy.wire() as wire:
        wire.send(*({"aid": EXIT, "id": n} for n in range(10)))
        types = [reply["type"] for reply in wire.replies(10)]
    assert sorted(types) == ["breaker_open"] * 9 + ["crash"]
    assert 0.6 < breaker(touchy)["next_probe_seconds"] <= 1.1


def test_a_probe_that_passes_closes_it(start, tmp_path):
    """A toolhost that dies for as long as a file exists."""
    host, sick = tmp_path / "host", tmp_path / "sick"
    host.write_text(
        f"""#!/usr/bin/env python3
import json, os, sys
if sys.argv[1] == "--list":
    print('{{"ok":true,"tools":[{{"aid":"AID.X.v1"}}]}}', end="")
    sys.exit()
for line in sys.stdin:
    aid = json.loads(line)["aid"]
    if aid != "AID.X.v1":
        print(json.dumps({{"ok": False, "error": "tool not found: " + aid}}), flush=True)
    elif os.path.exists("{sick}"):
        sys.exit(1)
    else:
        print('{{"ok":true,"status":"OK","output_json":"1","error":""}}', flush=True)
"""
    )
    host.chmod(0o755)
    sick.touch()
    broker = start("--toolhost", str(host), env={"BROKER_BREAKER_OPEN_SECONDS": "0.5"})
    with broker.wire() as wire:
        for _ in range(5):
            wire.ask({"aid": "AID.X.v1"})
        assert wire.ask({"aid": "AID.X.v1"})["type"] == "breaker_open"
        sick.unlink()
        time.sleep(0.6)
        assert wire.ask({"aid": "AID.X.v1"})["ok"]
        assert all(wire.ask({"aid": "AID.X.v1"})["ok"] for _ in range(5))


def test_calls_that_wait_when_it_opens_are_answered_at_once(touchy):
    with touchy.wire() as wire:
        wire.send(*({"aid": EXIT, "id": n} for n in range(100)))
        types = [reply["type"] for reply in wire.replies(100)]
    assert types.count("breaker_open") >= 85
    assert types.count("crash") + types.count("breaker_open") == 100


def test_a_tools_own_errors_and_refusals_of_the_broker_do_not_count(touchy):
    with touchy.wire() as wire:
        for _ in range(30):
            assert wire.ask({"aid": "AID.DEMO.FAIL.v1", "input_json": '{"error":"x"}'})["error"] == "x"
            wire.ask({"aid": "AID.DEMO.FAIL.v1", "timeout_ms": 0})


def test_a_tools_own_errors_count_where_the_configuration_says_so(start, where):
    broker = start(config='[breaker]\ncount_tool_errors = ["AID.DEMO.F*"]\n' + toolhost("d", where["demo_plugin"]))
    with broker.wire() as wire:
        for _ in range(5):
            wire.ask({"aid": "AID.DEMO.FAIL.v1", "input_json": '{"error":"x"}'})
        assert wire.ask({"aid": "AID.DEMO.FAIL.v1"})["type"] == "breaker_open"


def test_half_of_ten_failing_opens_it(touchy):
    """Crashes and successes of one tool, never five crashes in a row."""
    with touchy.wire() as wire:
        types = []
        for n in range(12):
            inputs = {"bytes": 1_500_000} if n % 2 else {"bytes": 10}
            reply = wire.ask({"aid": "AID.DEMO.BLOB.v1", "input_json": json.dumps(inputs)})
            types.append(reply.get("type", "ok"))
    assert types[:10] == ["ok", "reply_too_large"] * 5
    assert types[10:] == ["breaker_open"] * 2


def test_the_operator_can_close_it(touchy):
    fail(touchy)
    done = subprocess.run(
        [sys.executable, "-m", "broker", "breaker", "reset", EXIT, "--socket", touchy.path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{EXIT}: was open, now closed\n"
    assert fail(touchy, 1)[0]["type"] == "crash"


def test_calls_that_move_away_from_the_crash_that_opens_it_are_answered_at_once(start, tmp_path):
    """They were pipelined behind the crash; they have not run, and must not run while the breaker is open."""
    log = tmp_path / "ran"
    body = f'open({str(log)!r}, "a").write("x")\nif "input_json" in request: os._exit(3)\nsay(output_json="1")'
    broker = start(
        config=f'[[toolhost]]\nname = "a"\nbinary = "{scripted(tmp_path, body)}"\nmin = 1\nmax = 1\n',
    )
    with broker.wire() as wire:
        for _ in range(8):
            assert wire.ask({"aid": "AID.A.v1"})["ok"]
        log.unlink()
        wire.send(*[{"aid": "AID.A.v1", "input_json": '"boom"'}] * 200)
        kinds = [reply["type"] for reply in wire.replies(200)]
    assert kinds == ["crash"] * 5 + ["breaker_open"] * 195
    assert len(log.read_text()) == 5


def test_calls_that_wait_for_their_session_ask_again_and_are_answered_at_once(touchy):
    line = {"aid": EXIT, "ds_state": {"slots": {}}}
    with touchy.wire() as wire:
        wire.send(*[line] * 12)
        assert [reply["type"] for reply in wire.replies(12)] == ["crash"] * 5 + ["breaker_open"] * 7


def test_counted_tool_errors_are_counted_once_and_a_probe_that_ends_in_one_has_failed(start, where):
    broker = start(
        config='[breaker]\nin_a_row = 3\nleast_calls = 100\nopen_seconds = 0.3\ncount_tool_errors = ["AID.DEMO.F*"]\n'
        + toolhost("d", where["demo_plugin"])
    )
    kinds = [broker.call("AID.DEMO.FAIL.v1", error="no").get("type", "own") for _ in range(5)]
    assert kinds == ["own"] * 3 + ["breaker_open"] * 2
    time.sleep(0.5)
    assert broker.call("AID.DEMO.FAIL.v1", error="no").get("type", "own") == "own", "the probe"
    assert broker.call("AID.DEMO.FAIL.v1", error="no")["type"] == "breaker_open"
