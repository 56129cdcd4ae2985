"""`broker serve` as its users run it: start, draining, replacement, reload, messages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from tests.support.config import toolhost

ECHO = "AID.DEMO.ECHO.v1"


def broker(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "broker", *arguments], capture_output=True, text=True, timeout=60, check=False, **kwargs
    )


def test_the_sockets_are_private(demo):
    for path in (demo.path, demo.path + ".operator"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_the_command_line_calls_lists_and_shows(demo):
    at = ("--socket", demo.path)
    assert broker("call", *at, ECHO, '{"hello":"world"}').stdout == '{"hello":"world"}\n'
    assert broker("call", *at, ECHO, "-", input="[1]").stdout == "[1]\n"
    failed = broker("call", *at, "AID.DEMO.FAIL.v1", '{"error":"no luck"}')
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "no luck" in failed.stderr
    missing = broker("call", *at, "AID.NO.SUCH.v1")
    assert missing.returncode == 1
    assert "broker tools" in missing.stderr
    assert broker("call", *at, ECHO, "{not json").returncode == 2
    late = broker("call", *at, "AID.DEMO.SLEEP.v1", '{"ms":2000}', "--timeout", "0.1")
    assert late.stderr.startswith("broker: timeout")
    tools = broker("tools", *at).stdout
    assert "AID.DEMO.WORD_COUNT.v1" in tools
    assert len(json.loads(broker("tools", *at, "--json").stdout)) == 8
    shown = broker("status", *at).stdout
    assert "pool " in shown
    assert "ready" in shown
    assert json.loads(broker("status", *at, "--json").stdout)["pid"] == demo.process.pid


def test_without_a_broker_the_message_says_what_to_do(tmp_path):
    result = broker("call", "--socket", str(tmp_path / "none.sock"), ECHO)
    assert result.returncode == 1
    assert "broker serve" in result.stderr


def test_where_prints_places_that_exist():
    places = json.loads(broker("where").stdout)
    for name in ("toolhost", "fault_toolhost", "demo_plugin", "fault_plugin"):
        assert os.path.exists(places[name]), name
    assert places["operator_socket"] == places["socket"] + ".operator"


def test_a_second_broker_on_the_same_socket_is_refused_and_a_stale_socket_is_not(demo, where):
    second = broker("serve", "--socket", demo.path, "--plugin", where["demo_plugin"])
    assert second.returncode == 2
    assert str(demo.process.pid) in second.stderr
    assert demo.call(ECHO)["ok"]
    demo.process.kill()
    demo.process.wait()
    assert os.path.exists(demo.path)
    again = subprocess.Popen(
        [sys.executable, "-m", "broker", "serve", "--socket", demo.path, "--plugin", where["demo_plugin"]],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert again.stdout is not None
    assert again.stdout.readline().startswith(b"broker ready")
    again.terminate()
    assert again.wait(20) == 0


def test_toolhosts_die_with_a_broker_that_is_killed(demo):
    toolhosts = [psutil.Process(pid) for pid in demo.toolhosts()]
    demo.process.kill()
    _, alive = psutil.wait_procs(toolhosts, timeout=3)
    assert not alive


def test_sigterm_finishes_what_runs_refuses_the_rest_and_exits_0(start, where):
    served = start(
        config=toolhost("d", where["demo_plugin"], min=1, max=1),
    )
    with served.wire() as wire:
        wire.send(*({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":400}', "id": n} for n in range(3)))
        time.sleep(0.2)
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        replies = {reply["id"]: reply for reply in wire.replies(3)}
        assert replies[0]["status"] == "OK"
        assert {replies[1]["type"], replies[2]["type"]} == {"draining"}
        assert wire.ended()
    assert served.stop() == 0
    assert not os.path.exists(served.path)


def test_sigterm_ends_calls_that_outlast_the_drain_time(start, where):
    served = start("--plugin", where["demo_plugin"], env={"BROKER_SERVER_DRAIN_SECONDS": "0.3"})
    with served.wire() as wire:
        wire.send({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":20000}'})
        time.sleep(0.2)
        begin = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        reply = wire.reply()
        assert reply["type"] == "draining"
        assert "may have run" in reply["error"]
    assert served.stop() == 0
    assert time.monotonic() - begin < 3


def test_every_line_is_answered_when_the_broker_stops_under_load(start, where):
    served = start("--plugin", where["demo_plugin"])
    answered = []
    with served.wire() as wire:
        sent = 5000
        wire.send(*({"aid": ECHO, "id": n} for n in range(sent)))
        served.process.send_signal(signal.SIGTERM)
        while line := wire.raw():
            answered.append(json.loads(line)["id"])
    assert sorted(answered) == list(range(sent))


PLUGIN = """
#include "machina/plugin_api.h"
static machina::ToolResult run(const std::string&, machina::DSState&) {
    return {machina::StepStatus::OK, "\\"%s\\"", ""};
}
extern "C" void machina_plugin_init(machina::IToolRegistrar* host) {
    machina::ToolDesc desc;
    desc.aid = "AID.VERSION.v1";
    desc.side_effects = {"none"};
    host->register_tool(desc, run);
}
extern "C" int machina_plugin_abi_version() { return 1; }
"""


def compile_plugin(where, tmp_path, version):
    source = tmp_path / f"{version}.cpp"
    source.write_text(PLUGIN % version)
    built = tmp_path / f"{version}.so"
    subprocess.run(
        ["c++", "-std=c++17", "-shared", "-fPIC", "-I", where["include"], str(source), "-o", str(built)], check=True
    )
    return built


def test_a_plugin_is_replaced_under_load_and_the_next_call_uses_the_new_one(start, where, tmp_path):
    one, two = (compile_plugin(where, tmp_path, version) for version in ("one", "two"))
    live = tmp_path / "live.so"
    shutil.copy(one, live)
    served = start("--plugin", str(live))
    wrong = []
    stop = threading.Event()

    def load():
        with served.wire() as wire:
            while not stop.is_set():
                wire.send(*({"aid": "AID.VERSION.v1"} for _ in range(50)))
                wrong.extend(reply for reply in wire.replies(50) if reply["status"] != "OK")

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for new, name in ((two, "two"), (one, "one"), (two, "two")):
            time.sleep(0.2)
            fresh = tmp_path / "fresh.so"
            shutil.copy(new, fresh)
            os.replace(fresh, live)
            assert json.loads(served.call("AID.VERSION.v1")["output_json"]) == name
        shutil.copy(one, live)  # written over in place, under running toolhosts
        assert json.loads(served.call("AID.VERSION.v1")["output_json"]) == "one"
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    assert served.counts().get("crash", 0) == 0


def test_a_broken_new_plugin_changes_nothing_and_says_why(start, where, tmp_path):
    live = tmp_path / "live.so"
    shutil.copy(compile_plugin(where, tmp_path, "one"), live)
    served = start("--plugin", str(live))
    live.write_bytes(b"not a plugin")
    assert json.loads(served.call("AID.VERSION.v1")["output_json"]) == "one"
    assert "live.so" in served.status()["pools"][0]["reason"]


def test_reload_adds_and_removes_tools_without_dropping_a_call(start, where, tmp_path):
    served = start(config=toolhost("d", where["demo_plugin"]))
    file = tmp_path / "broker0.toml"
    before = set(served.toolhosts())
    demo = toolhost("d", where["demo_plugin"])
    file.write_text(demo + toolhost("f", where["fault_plugin"]))
    result = broker("reload", "--socket", served.path)
    assert "1 kept, 1 added" in result.stdout, result.stderr
    assert before <= set(served.toolhosts())
    assert served.call("AID.FAULT.STDERR.v1", bytes=1)["ok"]
    file.write_text(demo)
    assert "1 removed" in broker("reload", "--socket", served.path).stdout
    assert served.call("AID.FAULT.STDERR.v1", bytes=1)["type"] == "not_found"
    file.write_text("[[toolhost]]\n")
    refused = broker("reload", "--socket", served.path)
    assert refused.returncode == 1
    assert "name" in refused.stderr
    assert served.call(ECHO)["ok"]


def test_idle_processes_leave_and_are_started_again(start, where):
    served = start(config=toolhost("d", where["demo_plugin"], min=1, max=6, idle_seconds=0.3))
    with served.wire() as wire:
        wire.send(*({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":300}'} for _ in range(6)))
        served.eventually(lambda: len(served.toolhosts()) >= 4)
        wire.replies(6)
    served.eventually(lambda: len(served.toolhosts()) == 1)
    assert served.call(ECHO)["ok"]


def test_processes_are_recycled_by_call_count_and_lifetime_without_losing_calls(start, where):
    served = start(config=toolhost("d", where["demo_plugin"], max_calls=50, lifetime_seconds=0.5))
    with served.wire() as wire:
        for _ in range(20):
            wire.send(*({"aid": ECHO} for _ in range(100)))
            assert all(reply["ok"] for reply in wire.replies(100))
            time.sleep(0.05)
    assert served.counts()["recycled"] >= 10


def test_toolhosts_are_fenced_in(start, where):
    served = start("--plugin", where["demo_plugin"], env={"SECRET": "x", "MACHINA_LEASE_ENFORCE": "0"})
    pid = served.toolhosts()[0]

    def text(name):
        return Path(f"/proc/{pid}/{name}").read_text()

    assert "SECRET" not in text("environ")
    assert "NoNewPrivs:\t1" in text("status")
    assert "Umask:\t0077" in text("status")
    limits = text("limits")
    for name, value in (("Max address space", "1073741824"), ("Max open files", "64"), ("Max file size", "16777216")):
        assert value in next(line for line in limits.splitlines() if line.startswith(name))
    assert os.getpgid(pid) == pid
    assert len(os.listdir(f"/proc/{pid}/fd")) <= 8


def test_a_thousand_idle_connections_are_no_burden(demo):
    wires = [demo.wire() for _ in range(1000)]
    try:
        demo.eventually(lambda: demo.status()["connections"] >= 1000)
        assert demo.call(ECHO)["ok"]
        assert wires[777].ask({"aid": ECHO})["ok"]
    finally:
        for wire in wires:
            wire.socket.close()
    demo.eventually(lambda: demo.status()["connections"] == 1)


def test_too_many_connections_are_told_so(start, where):
    served = start("--plugin", where["demo_plugin"], env={"BROKER_SERVER_MAX_CONNECTIONS": "3"})
    wires = [served.wire() for _ in range(3)]
    for wire in wires:
        assert wire.ask({"aid": ECHO})["ok"]
    with served.wire() as fourth:
        reply = fourth.reply()
        assert reply["type"] == "overloaded"
        assert "server.max_connections" in reply["error"]
    for wire in wires:
        wire.socket.close()
