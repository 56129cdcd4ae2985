"""What one caller's habits cost another: unread replies, floods, long lines, hang-ups, logs that nobody reads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import Wire
from tests.support.command import broker_command
from tests.support.config import toolhost
from tests.support.toolhosts import listing, scripted

A, B = "AID.A.v1", "AID.B.v1"
ECHO, BLOB, SLEEP = "AID.DEMO.ECHO.v1", "AID.DEMO.BLOB.v1", "AID.DEMO.SLEEP.v1"
COUNTED = """open("ran", "a").write("x")
time.sleep(float(json.loads(request["input_json"])) if "input_json" in request else 0)
say(output_json="1")"""


def sleep(ms, **more):
    return {"aid": SLEEP, "input_json": json.dumps({"ms": ms}), **more}


def blob(size, **more):
    return {"aid": BLOB, "input_json": json.dumps({"bytes": size}), **more}


def hosted(folder, body, plugin=None, **settings):
    settings = {"min": 1, "max": 1, "cwd": str(folder), **settings}
    return toolhost("h", *([plugin] if plugin else []), binary=scripted(folder, body), **settings)


def ran(folder):
    return len((folder / "ran").read_text()) if (folder / "ran").exists() else 0


def rss(broker):
    return psutil.Process(broker.process.pid).memory_info().rss


@pytest.mark.parametrize("session", [{}, {"session": "named"}])
def test_a_call_that_comes_late_to_its_queue_is_not_behind_those_whose_replies_wait_for_it(start, where, session):
    """The second call waits for its session; the many behind it fill the buffer that only its reply can empty."""
    broker = start(config="[limits]\nqueue_seconds = 5\n" + toolhost("d", where["demo_plugin"], max=2))
    state = {"ds_state": {"slots": {}}, **session}
    with broker.wire() as wire:
        begin = time.monotonic()
        wire.send(sleep(300, **state), blob(10, **state), *(blob(10_000) for _ in range(600)))
        replies = wire.replies(602)
        assert all(reply["ok"] for reply in replies)
        assert time.monotonic() - begin < 4


def test_a_tool_that_speaks_of_leases_itself_has_run_and_is_not_run_again(start, tmp_path):
    body = 'open("ran", "a").write("x")\nsay(ok=False, status="TOOL_ERROR", error="lease_required", output_json="1")'
    plugin = listing(tmp_path / "tools.json", A=["file_write"])
    broker = start(config=hosted(tmp_path, body, plugin))
    for n in range(1, 4):
        assert broker.ask({"aid": A})["error"] == "lease_required"
        assert ran(tmp_path) == n


@pytest.mark.parametrize("first", ["has been answered", "still runs"])
def test_hits_wait_for_their_reader(start, where, first):
    broker = start(config=toolhost("d", where["demo_plugin"]))
    request = blob(1_000_000, idempotency_key="k")
    with broker.wire() as wire:
        wire.ask(blob(10))
        if first == "has been answered":
            wire.ask(request)
        before = rss(broker)
        wire.send(*[request] * 300)
        time.sleep(0.7)
        assert rss(broker) < before + 60_000_000
        replies = wire.replies(300)
    assert {reply["ok"] for reply in replies} == {True}
    assert sum("idempotent_hit" in reply for reply in replies) >= 299


def test_a_reply_that_came_in_time_is_no_timeout_though_the_broker_was_busy(start, where):
    broker = start(config=toolhost("d", where["demo_plugin"], min=1, max=1))
    with broker.wire() as wire:
        for _ in range(3):
            wire.send(sleep(100, timeout_ms=300))
            time.sleep(0.02)
            os.kill(broker.process.pid, signal.SIGSTOP)
            time.sleep(0.5)
            os.kill(broker.process.pid, signal.SIGCONT)
            assert wire.reply()["ok"]
    assert broker.counts()["timeout"] == 0


@pytest.mark.parametrize(
    "asked",
    [
        "print(json.dumps({'ok': False, 'error': 'no leases here'}), flush=True); continue",
        "os._exit(1)",
        "print('junk')",
    ],
)
def test_a_toolhost_that_wants_leases_and_gives_none_costs_only_its_own_calls(start, tmp_path, asked):
    plugin = listing(tmp_path / "tools.json", A=["file_write"], B=[])
    body = """if aid == "AID.A.v1":
    print('{"ok":false,"error":"lease_required","tier":1}', flush=True)
else:
    say(output_json="1")"""
    text = hosted(tmp_path, body, plugin, max=2)
    host = Path(tmp_path / "host")
    host.write_text(
        host.read_text().replace(
            'if aid.startswith("_"):', f'if aid == "_lease.issue": {asked}\n    if aid.startswith("_"):'
        )
    )
    broker = start(config="[limits]\nqueue_seconds = 3\n" + text)
    with broker.wire() as wire:
        for _ in range(4):
            begin = time.monotonic()
            assert wire.ask({"aid": A})["type"] in ("unavailable", "breaker_open")
            assert time.monotonic() - begin < 2
            assert wire.ask({"aid": B})["ok"]
    assert broker.counts()["started"] < 30


def test_a_plugin_that_is_being_read_when_a_reload_takes_it_out_does_not_come_back(start, tmp_path, where):
    demo = toolhost("d", where["demo_plugin"])
    slow = hosted(tmp_path, 'say(output_json="1")', listing(tmp_path / "tools.json", A=[]))
    host = tmp_path / "host"
    broker = start(config=demo + slow)
    assert broker.ask({"aid": A})["ok"]
    host.write_text(
        host.read_text().replace('if sys.argv[1] == "--list":', 'if sys.argv[1] == "--list":\n    time.sleep(1)')
    )
    listing(tmp_path / "tools.json", A=[], B=[])
    with broker.wire() as wire, broker.operator() as operator:
        wire.send({"aid": A})
        time.sleep(0.2)
        (tmp_path / "broker0.toml").write_text(demo)
        assert operator.ask({"aid": "_reload"})["ok"]
        assert wire.reply()["type"] == "not_found"
        time.sleep(1.2)
        assert broker.ask({"aid": A})["type"] == "not_found"
        (tmp_path / "broker0.toml").write_text(demo + slow)
        assert operator.ask({"aid": "_reload"})["ok"]
        assert broker.ask({"aid": A})["ok"]


def test_a_full_queue_stops_the_reading_of_those_who_fill_it(start, tmp_path):
    """B has a long call under way, and a short one now and then; A's calls fill the queue."""
    config = "[limits]\nqueue_bytes = 2000000\nconnection_bytes = 1500000\n"
    broker = start(config=config + hosted(tmp_path, COUNTED, max=3))
    with broker.wire() as a, broker.wire() as a2, broker.wire() as b:
        for _ in range(30):  # it is known to be fast, also where the machine is busy
            b.ask({"aid": B})
        b.send({"aid": A, "input_json": "4", "id": "long"})

        def flood(wire):
            with contextlib.suppress(OSError):  # nobody reads it to its end
                wire.send(*[{"aid": A, "input_json": "3", "pad": "x" * 50_000}] * 40)

        for wire in (a, a2):
            threading.Thread(target=flood, args=(wire,), daemon=True).start()
        broker.eventually(lambda: broker.status()["queued_bytes"] >= 1_900_000)
        for n in range(3):
            begin = time.monotonic()
            assert b.ask({"aid": B, "id": n})["id"] == n
            assert time.monotonic() - begin < 1.0


def test_an_idle_process_leaves_for_a_pool_that_has_none(start, where):
    config = "[limits]\nprocesses = 2\nqueue_seconds = 4\n"
    pools = toolhost("d", where["demo_plugin"], min=0, max=2) + toolhost("f", where["fault_plugin"], min=0, max=2)
    broker = start(config=config + pools)
    with broker.wire() as wire:
        wire.send(sleep(300, id=1), sleep(300, id=2))
        assert [reply["ok"] for reply in wire.replies(2)] == [True, True]
        begin = time.monotonic()
        assert wire.ask({"aid": "AID.FAULT.STDERR.v1", "input_json": '{"bytes":1}'})["ok"]
        assert time.monotonic() - begin < 2


def test_calls_of_a_caller_that_has_left_do_not_move_when_their_toolhost_dies(start, tmp_path):
    broker = start(config=hosted(tmp_path, COUNTED))
    with broker.wire() as wire:
        for _ in range(4):
            wire.ask({"aid": A})
    before = ran(tmp_path)
    with broker.wire() as wire:
        wire.send({"aid": B, "input_json": "5"}, *[{"aid": A}] * 20)
        broker.eventually(lambda: ran(tmp_path) == before + 1)
    time.sleep(0.1)
    for pid in broker.toolhosts():
        os.kill(pid, signal.SIGKILL)
    assert broker.ask({"aid": B})["ok"]
    assert ran(tmp_path) == before + 2


def test_lines_that_come_while_the_broker_drains_are_refused_not_dropped(start, where):
    broker = start(config=toolhost("d", where["demo_plugin"]))
    with broker.wire() as wire:
        wire.send(sleep(800, id=1))
        time.sleep(0.2)
        broker.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        wire.send({"aid": ECHO, "id": 2}, {"aid": "_tools", "id": 3}, {"aid": ECHO, "id": 4, "idempotency_key": "k"})
        replies = {reply["id"]: reply for reply in wire.replies(4)}
        assert replies[1]["ok"]
        assert replies[2]["type"] == replies[4]["type"] == "draining"
        assert wire.ended()


def test_a_log_that_nobody_reads_stops_nobody(tmp_path, where):
    path = str(tmp_path / "b.sock")
    command = [sys.executable, "-m", "broker", "serve", "--socket", path, "--plugin", where["fault_plugin"]]
    environment = {**os.environ, "HOME": str(tmp_path), "BROKER_BREAKER_IN_A_ROW": "100000"}
    environment["BROKER_BREAKER_LEAST_CALLS"] = "100000"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"broker ready")
            with Wire(path) as wire:
                wire.send(*({"aid": "AID.FAULT.EXIT.v1", "id": n} for n in range(500)))
                assert {reply["type"] for reply in wire.replies(500)} == {"crash"}
        finally:
            process.terminate()
        assert process.wait(15) == 0
        assert process.stderr is not None
        assert process.stderr.read(1) == b"{"


@pytest.mark.parametrize("what", ["a key", "a probe"])
def test_a_caller_that_does_not_read_holds_nobody_by_what_its_call_has_borrowed(start, tmp_path, what):
    body = """if request.get("input_json") == "die": os._exit(1)
time.sleep(0.01)
say(output_json=json.dumps("x" * 100_000))"""
    config = "[breaker]\nin_a_row = 2\nopen_seconds = 0.5\n[limits]\nqueue_seconds = 8\n"
    broker = start(config=config + hosted(tmp_path, body))
    with broker.wire() as deaf, broker.wire() as other:
        for _ in range(4):
            other.ask({"aid": A})
        deaf.send(*[{"aid": B}] * 60)
        time.sleep(1.5)
        if what == "a probe":
            for _ in range(2):
                assert other.ask({"aid": A, "input_json": "die"})["type"] == "crash"
            time.sleep(0.7)
        deaf.send({"aid": A, "idempotency_key": "k"})
        time.sleep(0.3)
        begin = time.monotonic()
        assert other.ask({"aid": A, "idempotency_key": "k"})["ok"]
        assert time.monotonic() - begin < 2


def test_of_the_lines_on_their_way_the_longest_has_to_come_again(start, where):
    broker = start(config="[limits]\nqueue_bytes = 1000000\n" + toolhost("d", where["demo_plugin"]))
    with broker.wire() as hog, broker.wire() as wire:
        hog.send(b'{"aid":"AID.DEMO.ECHO.v1","pad":"' + b"x" * 980_000)
        time.sleep(0.3)
        line = json.dumps({"aid": ECHO, "pad": "y" * 300_000}).encode() + b"\n"
        for _ in range(3):
            for at in range(0, len(line), 100_000):
                wire.send(line[at : at + 100_000])
                time.sleep(0.02)
            assert wire.reply()["ok"]
        assert hog.reply()["type"] == "overloaded"
        hog.send(b'"}\n')
        assert hog.ask({"aid": ECHO})["ok"]


def test_the_call_after_a_broken_plugin_is_mended_uses_it(start, tmp_path):
    plugin = listing(tmp_path / "tools.json", A=[])
    body = 'say(output_json="1")'
    before = 'if "broken" in open(sys.argv[2]).read(): sys.exit(9)'
    text = toolhost("h", plugin, binary=scripted(tmp_path, body, before=before), min=1, max=1)
    broker = start(config=text)
    assert broker.ask({"aid": A})["ok"]
    whole = Path(plugin).read_text()
    Path(plugin).write_text(whole[:-1] + ',"error":"broken"}')
    broker.eventually(lambda: broker.ask({"aid": A}).get("type") == "unavailable", 20)
    Path(plugin).write_text(whole)
    assert broker.ask({"aid": A})["ok"]


def test_no_tool_is_called_like_the_brokers_own_words(tmp_path):
    plugin = tmp_path / "tools.json"
    plugin.write_text('{"ok":true,"tools":[{"aid":"_auth"}]}')
    done = broker_command(tmp_path, "serve", "--check", "--toolhost", scripted(tmp_path, ""), "--plugin", str(plugin))
    assert done.returncode == 2
    assert "'_auth' is no name for a tool" in done.stderr


def test_rights_are_asked_first_and_refusals_name_the_tool(start, where):
    us = f'[[principal]]\nname = "uid:{os.getuid()}"\ntools = ["AID.DEMO.ECHO.v1"]\n'
    broker = start(config=us + toolhost("d", where["demo_plugin"]))
    for more in ({"timeout_ms": 0}, {"stream": True}, {"session": "x" * 300, "ds_state": {}}):
        assert broker.ask({"aid": SLEEP, **more})["type"] == "forbidden"
    for more in ({"timeout_ms": "x"}, {"inputs": {}, "input_json": "{}"}, {"inputs": 5}):
        reply = broker.ask({"aid": ECHO, **more})
        assert (reply["type"], reply["aid"]) == ("bad_request", ECHO)
    reply = broker.ask(b'{"aid":"AID.DEMO.ECHO.v1","id":1,"session":"a","session":"b"}\n')
    assert (reply["id"], reply["type"], reply["aid"]) == (1, "bad_request", ECHO)


def test_while_a_probe_is_on_its_way_nobody_is_told_to_come_at_once(start, tmp_path):
    body = 'if "input_json" in request: os._exit(1)\ntime.sleep(1)\nsay(output_json="1")'
    broker = start(config="[breaker]\nin_a_row = 1\nopen_seconds = 0.3\n" + hosted(tmp_path, body))
    assert broker.ask({"aid": A, "input_json": "1"})["type"] == "crash"
    time.sleep(0.5)
    with broker.wire() as probe:
        probe.send({"aid": A})
        time.sleep(0.3)
        assert broker.ask({"aid": A})["next_probe_ms"] >= 500
        assert probe.reply()["ok"]


def test_a_stop_does_not_wait_for_a_plugin_that_hangs_when_it_is_read(start, tmp_path):
    text = hosted(tmp_path, 'say(output_json="1")', listing(tmp_path / "tools.json", A=[]))
    broker = start(config=text)
    host = tmp_path / "host"
    host.write_text(
        host.read_text().replace('if sys.argv[1] == "--list":', 'if sys.argv[1] == "--list":\n    time.sleep(60)')
    )
    listing(tmp_path / "tools.json", A=[], B=[])
    with broker.wire() as wire:
        wire.send({"aid": A})
        time.sleep(0.3)
        begin = time.monotonic()
        broker.process.send_signal(signal.SIGTERM)
        assert wire.reply()["type"] == "draining"
    assert broker.process.wait(10) == 0
    assert time.monotonic() - begin < 5
