"""What reviewers found, each with a test that failed first."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.conftest import Wire
from tests.support.config import toolhost
from tests.support.toolhosts import scripted

ECHO = "AID.DEMO.ECHO.v1"
SLEEP = "AID.DEMO.SLEEP.v1"


def sleep(ms, **more):
    return {"aid": SLEEP, "input_json": json.dumps({"ms": ms}), **more}


def test_callers_that_vanish_do_not_wedge_those_who_share_a_round_with_them(demo):
    """Both are answered in one read of one toolhost; writing to the first one fails."""
    for _ in range(10):
        gone, here = demo.wire(), demo.wire()
        gone.send(*({"aid": ECHO, "input_json": json.dumps("x" * 4000)} for _ in range(200)))
        here.send(*({"aid": ECHO, "id": n} for n in range(200)))
        gone.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.socket.close()
        assert len(here.replies(200)) == 200
        here.socket.close()
    assert demo.call(ECHO)["ok"]


def test_unanswered_calls_of_one_connection_are_bounded_however_small_their_lines(start, where):
    broker = start(
        config="[limits]\nconnection_calls = 500\n" + toolhost("d", where["demo_plugin"], min=1, max=1),
    )
    with broker.wire(timeout=1) as wire:
        wire.send(sleep(3000))
        line = json.dumps({"aid": ECHO}).encode() + b"\n"
        sent = 0
        try:
            while sent < 20_000_000:
                sent += wire.socket.send(line * 5000)
        except TimeoutError:
            pass
        assert sent < 20_000_000
        assert broker.status()["waiting"] < 10_000


def test_a_session_chain_is_answered_when_the_broker_stops(start, where):
    broker = start(config=toolhost("d", where["demo_plugin"], min=1, max=1))
    with broker.wire() as wire:
        wire.send(*(sleep(400, id=n, ds_state={"delta": True}) for n in range(5)))
        time.sleep(0.2)
        broker.process.send_signal(signal.SIGTERM)
        replies = {reply["id"]: reply for reply in wire.replies(5)}
    assert replies[0]["status"] == "OK"
    assert {replies[n]["type"] for n in range(1, 5)} == {"draining"}


def test_a_session_chain_is_answered_when_its_toolhost_cannot_be_started(start, tmp_path):
    host = scripted(tmp_path, "sys.exit(1)", before="sys.exit('broken')")
    broker = start("--toolhost", host)
    with broker.wire() as wire:
        wire.send(*({"aid": "AID.A.v1", "id": n, "ds_state": {"delta": True}} for n in range(400)))
        assert {reply["type"] for reply in wire.replies(400)} == {"unavailable"}


def test_a_reload_that_changes_a_pool_hands_its_waiting_calls_on_and_the_running_finish(start, where, tmp_path):
    broker = start(config=toolhost("d", where["demo_plugin"], min=1, max=1))
    with broker.wire() as wire:
        wire.send(*(sleep(500, id=n) for n in range(4)))
        time.sleep(0.2)
        (tmp_path / "broker0.toml").write_text(toolhost("d", where["demo_plugin"], min=1, max=4))
        command = [sys.executable, "-m", "broker", "reload", "--socket", broker.path]
        assert subprocess.run(command, capture_output=True, check=True).stdout
        assert [reply["status"] for reply in wire.replies(4)] == ["OK"] * 4


def test_a_call_that_runs_in_a_removed_pool_is_answered_though_the_broker_stops(start, where, tmp_path):
    demo = toolhost("d", where["demo_plugin"])
    broker = start(config=demo + toolhost("f", where["fault_plugin"]))
    with broker.wire() as wire:
        wire.send({"aid": "AID.FAULT.HANG.v1", "timeout_ms": 1000})
        time.sleep(0.2)
        (tmp_path / "broker0.toml").write_text(demo)
        subprocess.run([sys.executable, "-m", "broker", "reload", "--socket", broker.path], check=True)
        broker.process.send_signal(signal.SIGTERM)
        assert wire.reply()["type"] == "timeout"


def test_states_of_callers_that_left_are_not_counted_and_padding_is_not_kept(start, where):
    broker = start("--plugin", where["demo_plugin"], env={"BROKER_LIMITS_SESSION_BYTES": "2000000"})
    slots = {"1": {"type": "json", "content_json": json.dumps("x" * 500_000), "provenance": "", "size_bytes": 1}}

    def put(wire, **more):
        inputs = json.dumps({"op": "get", "slot": 1})
        wire.send({"aid": "AID.DEMO.STATE.v1", "input_json": inputs, "ds_state": {"slots": slots}, **more})

    with broker.wire() as keeper:
        put(keeper, session="kept")
        assert keeper.reply()["ok"]
        for _ in range(10):
            with broker.wire() as wire:
                put(wire)
        put(keeper, session="other")
        assert keeper.reply()["ok"]
        reply = keeper.ask(
            {
                "aid": "AID.DEMO.STATE.v1",
                "input_json": '{"op":"get","slot":1}',
                "ds_state": {"delta": True},
                "session": "kept",
            }
        )
        assert json.loads(reply["output_json"])["found"], "a session was pushed out by states that are gone"
        before = psutil.Process(broker.process.pid).memory_info().rss
        for n in range(50):
            small = {"delta": False, "slots": {"1": {"type": "t"}}, "padding": "x" * 2_000_000}
            keeper.ask({"aid": ECHO, "ds_state": small, "session": f"p{n}"})
        assert psutil.Process(broker.process.pid).memory_info().rss < before + 40_000_000


def test_a_toolhost_without_pipelining_is_fenced_at_every_call(start, tmp_path):
    """It behaves nine times, then answers twice, the second time a little later."""
    body = """say(output_json=json.dumps(request["input_json"]))
if n % 10 == 0:
    time.sleep(0.002)
    say(output_json='"again"')"""
    host = scripted(tmp_path, body)
    broker = start(config=f'[[toolhost]]\nname = "h"\nbinary = "{host}"\nmin = 1\nmax = 1\npipeline = false\n')
    with broker.wire() as wire:
        for n in range(60):
            reply = wire.ask({"aid": "AID.A.v1", "input_json": str(n)})
            assert reply.get("output_json") == f'"{n}"' or reply.get("type"), reply
    assert broker.counts()["violation"] >= 3


def test_slow_calls_leave_a_toolhost_to_the_fast_ones(demo):
    with demo.wire() as slow, demo.wire() as fast:
        for _ in range(5):
            fast.ask({"aid": ECHO})
        slow.send(*(sleep(1500) for _ in range(20)))
        time.sleep(0.7)
        for _ in range(5):
            begin = time.monotonic()
            assert fast.ask({"aid": ECHO})["ok"]
            assert time.monotonic() - begin < 0.3


def test_a_caller_that_does_not_read_does_not_slow_others_on_the_same_tool(demo):
    blob = {"aid": "AID.DEMO.BLOB.v1", "input_json": '{"bytes":100000}'}
    with demo.wire() as rude, demo.wire() as polite:
        for _ in range(5):
            polite.ask(blob)
        rude.send(*(blob for _ in range(300)))
        time.sleep(0.5)
        begin = time.monotonic()
        for _ in range(20):
            assert polite.ask(blob)["ok"]
        assert time.monotonic() - begin < 1


def test_a_toolhost_that_answers_the_first_fence_and_dies_is_not_respawned_in_a_loop(start, tmp_path):
    broker = start("--toolhost", scripted(tmp_path, "pass", fenced="sys.exit(0)"))
    time.sleep(2)
    assert broker.counts()["started"] <= 20
    assert broker.ask({"aid": "AID.A.v1"})["type"] in ("unavailable", "crash"), "it dies before, or with, the call"


def test_an_enormous_answer_to_a_fence_is_a_start_that_failed(start, tmp_path):
    broker = start("--toolhost", scripted(tmp_path, "pass", before="print('x' * 2_000_000, flush=True)"))
    broker.eventually(lambda: broker.status()["pools"][0]["state"] == "broken", 20)
    assert broker.ask({"aid": "AID.A.v1"})["type"] == "unavailable"


def test_a_file_in_the_sockets_place_is_not_deleted(tmp_path, where):
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    command = [sys.executable, "-m", "broker", "serve", "--socket", str(precious), "--plugin", where["demo_plugin"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "not a socket" in done.stderr
    assert precious.read_text() == "keep me"


def test_calls_behind_a_crash_are_refused_at_once_while_the_broker_drains(start, tmp_path):
    body = """if aid == "AID.B.v1":
    time.sleep(0.5)
    sys.exit(3)
say(output_json="1")"""
    broker = start(
        config=f'[[toolhost]]\nname = "h"\nbinary = "{scripted(tmp_path, body)}"\nmin = 1\nmax = 1\n',
    )
    with broker.wire() as wire:
        for _ in range(4):
            wire.ask({"aid": "AID.A.v1"})
        wire.send({"aid": "AID.B.v1", "id": "b"}, *({"aid": "AID.A.v1", "id": n} for n in range(3)))
        time.sleep(0.1)
        begin = time.monotonic()
        broker.process.send_signal(signal.SIGTERM)
        types = sorted(reply["type"] for reply in wire.replies(4))
        assert types == ["crash", "draining", "draining", "draining"]
        assert time.monotonic() - begin < 3


def test_a_toolhost_that_closes_its_input_is_noticed_at_the_next_call(start, tmp_path):
    body = """if n == 3:
    os.close(0)
say(output_json="1")
if n == 3:
    time.sleep(60)"""
    broker = start(
        config=f'[[toolhost]]\nname = "h"\nbinary = "{scripted(tmp_path, body)}"\nmin = 1\nmax = 1\npipeline = true\n'
    )
    with broker.wire() as wire:
        begin = time.monotonic()
        types = [wire.ask({"aid": "AID.A.v1"}).get("type", "ok") for _ in range(6)]
        assert time.monotonic() - begin < 5
    assert "timeout" not in types


def test_tcp_callers_get_their_last_replies_though_they_sent_more_than_was_taken(start, where):
    broker = start("--plugin", where["demo_plugin"], "--tcp", "127.0.0.1:0")
    address = ("127.0.0.1", int(broker.ready.split("tcp:127.0.0.1:")[1].split()[0]))
    for _ in range(10):
        with Wire(address) as wire:
            wire.send({"aid": ECHO}, b"\n", *({"aid": ECHO} for _ in range(500)))
            assert wire.reply()["ok"]
            assert wire.ended()


def test_an_oversize_lines_id_that_was_cut_is_not_told(shared):
    with shared.wire() as wire:
        pad = 10 * 1024 * 1024 - len('{"aid":"x","pad":"","id":12')
        wire.send(b'{"aid":"x","pad":"' + b"x" * pad + b'","id":123456789}\n')
        reply = wire.reply()
    assert reply["type"] == "too_large"
    assert "id" not in reply


def test_a_broker_out_of_descriptors_recovers_and_still_enforces_its_limits(tmp_path, where):
    """The janitor used to die at the first file that it could not open."""
    path = str(tmp_path / "b.sock")
    serve = f"exec {sys.executable} -m broker serve --socket {path} --plugin {where['demo_plugin']}"
    environment = {**os.environ, "HOME": str(tmp_path), "BROKER_LIMITS_QUEUE_SECONDS": "1"}
    environment |= {"MACHINA_TOOLHOST_POOL_SIZE": "1", "BROKER_LIMITS_PROCESSES": "1"}
    command = ["bash", "-c", f"ulimit -n 80; {serve}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"broker ready")
            crowd = [Wire(path) for _ in range(90)]
            time.sleep(1)
            for wire in crowd:
                wire.socket.close()
            time.sleep(1.5)
            with Wire(path) as wire:
                wire.send(sleep(3000, id="runs"), sleep(3000, id="waits"))
                assert [wire.reply()["type"]] == ["overloaded"]
        finally:
            process.terminate()
        assert process.wait(20) == 0


def test_reloads_while_a_plugin_is_being_replaced_hold_nobody(start, where, tmp_path):
    live = tmp_path / "live.so"
    padding = b"\0" * 30_000_000  # behind the ELF image: it only takes longer to copy
    live.write_bytes(Path(where["demo_plugin"]).read_bytes() + padding)
    broker = start("--plugin", str(live))
    for _ in range(5):
        os.utime(live)
        with broker.wire() as caller, broker.operator() as operator:
            caller.send({"aid": ECHO})
            operator.send({"aid": "_reload"}, {"aid": "_reload"})
            assert caller.reply()["ok"]
            assert all(reply["ok"] for reply in operator.replies(2))


def test_an_absurd_timeout_is_bounded(shared):
    with shared.wire() as wire:
        assert wire.ask(b'{"aid":"AID.DEMO.ECHO.v1","timeout_ms":' + b"9" * 400 + b"}\n")["ok"]


def test_a_plugin_that_cannot_be_copied_leaves_the_old_one_and_calls_go_on(start, where, tmp_path):
    live = tmp_path / "live.so"
    shutil.copy(where["demo_plugin"], live)
    broker = start("--plugin", str(live))
    name = f"toolhost-plugins-{broker.process.pid}-*"
    (private,) = [*Path(tempfile.gettempdir()).glob(name), *tmp_path.glob(f"*/{name}")]
    moved = private.with_name(private.name + "-moved")
    private.rename(moved)
    private.write_text("in the way")
    os.utime(live)
    for _ in range(3):
        assert broker.call(ECHO)["ok"]
    assert "cannot be copied" in broker.status()["pools"][0]["reason"]
    private.unlink()
    moved.rename(private)
    os.utime(live)
    assert broker.call(ECHO)["ok"]
