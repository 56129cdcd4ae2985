"""What the switchboard must not lose on the way: counts, fences, ends, bounds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

import psutil
import pytest

from tests.support.config import toolhost
from tests.support.toolhosts import scripted

A, ECHO = "AID.A.v1", "AID.DEMO.ECHO.v1"
FAST = 60  # calls, until a tool of `scripted` is known and its calls pass by themselves


def hosted(folder, body, **settings):
    return toolhost("h", binary=scripted(folder, body), **{"min": 1, "max": 1, "cwd": str(folder), **settings})


def call(text, **more):
    return {"aid": A, "input_json": text, **more}


def make_known(broker):
    with broker.wire() as wire:
        for _ in range(FAST):
            wire.ask(call("1"))


def rss(broker):
    return psutil.Process(broker.process.pid).memory_info().rss


def test_a_call_that_is_run_again_is_not_run_again_for_ever(start, tmp_path):
    """It kills each toolhost that it is given to: also when it passes by itself, the fourth time is the last."""
    body = 'if "die" in request["input_json"]:\n    open("ran", "a").write("x"); os._exit(3)\nsay(output_json="1")'
    broker = start(config=hosted(tmp_path, body, rerun=[A]))
    make_known(broker)
    with broker.wire() as wire:
        assert wire.ask(call("die"))["type"] == "crash"
    assert (tmp_path / "ran").read_text() == "xxxx"


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_calls_left_without_an_answer_do_not_shift_the_next_callers_answer_to_this_one(start, tmp_path, lost):
    """Each of the lost calls is a run of its own, and only the first run of the other caller has a fence."""
    body = """text = request["input_json"]
if text == "slow": time.sleep(0.3)
if text != "lost": say(output_json=text)"""
    broker = start(config=hosted(tmp_path, body))
    make_known(broker)
    with broker.wire() as wire, broker.wire() as other:
        for text in ["slow", *["lost"] * lost]:
            wire.send(call(text))
            time.sleep(0.02)
        other.send(call('"secret"'))
        assert wire.reply()["output_json"] == "slow"
        assert [reply["type"] for reply in wire.replies(lost)] == ["bad_reply"] * lost
        assert other.reply()["type"] == "bad_reply"


def test_a_caller_with_nothing_outstanding_ends_at_once_when_the_broker_stops(demo):
    with demo.wire() as quiet, demo.wire() as silent:
        quiet.ask({"aid": ECHO})
        begin = time.monotonic()
        demo.process.send_signal(signal.SIGTERM)
        assert quiet.ended()
        assert silent.ended()
        assert time.monotonic() - begin < 0.5


def test_long_lines_beyond_the_bound_cost_one_caller_its_line_not_all(start, where):
    """All of them grow in one turn: the bound is passed once, so one has to come again."""
    broker = start("--plugin", where["demo_plugin"], config="[limits]\nqueue_bytes = 8388608\n")
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(broker.wire()) for _ in range(9)]
        for wire in wires:
            wire.send(b'{"aid":"' + ECHO.encode() + b'","input_json":"' + b"x" * 900_000)
        time.sleep(0.3)
        broker.process.send_signal(signal.SIGSTOP)
        for wire in wires:
            wire.send(b"x" * 100_000)
        broker.process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        refused = [wire for wire in wires if not wire.quiet(0.02)]
        assert len(refused) == 1
        assert refused[0].reply()["type"] == "overloaded"
        for wire in wires:
            wire.send(b'"}\n')
            assert wire in refused or wire.reply()["ok"]


@pytest.mark.parametrize("folder", [False, True])
def test_a_plugin_is_replaced_with_the_next_call_whatever_in_its_path_is_switched(start, tmp_path, folder):
    """A link, as releases are, or the folder that it is in: the file itself stays what and where it is."""
    body = 'say(output_json=json.load(open(sys.argv[2]))["tools"][0]["name"])'
    place, draft = tmp_path / "current", tmp_path / "draft"

    def switch(version):
        release = tmp_path / version
        release.mkdir()
        (release / "plugin").write_text(json.dumps({"ok": True, "tools": [{"aid": A, "name": version}]}))
        if not folder:
            draft.symlink_to(release)
            os.replace(draft, place)
            return
        if place.exists():
            place.rename(tmp_path / f"before-{version}")
        release.rename(place)

    switch("v0")
    broker = start(config=toolhost("h", str(place / "plugin"), binary=scripted(tmp_path, body), min=1, max=2))
    with broker.wire() as wire:
        for version in range(1, 6):
            for _ in range(8):
                wire.ask(call("1"))
            switch(f"v{version}")
            assert wire.ask(call("1"))["output_json"] == f"v{version}"


def test_a_caller_that_floods_and_does_not_read_fills_no_memory_while_the_broker_drains(start, where):
    """Each refusal is longer than its line, and a long call keeps the broker alive."""
    broker = start("--plugin", where["demo_plugin"], config="[server]\ndrain_seconds = 5\n")
    with broker.wire() as wire, broker.wire(0.5) as flood:
        for one in (wire, flood):
            one.send({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":2500}'})
        time.sleep(0.3)
        before = rss(broker)
        broker.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 1.5
        with contextlib.suppress(TimeoutError):
            while time.monotonic() < end:
                flood.send(b'{"aid":"AID.DEMO.ECHO.v1"}\n' * 2000)
        assert rss(broker) < before + 50_000_000
        assert wire.reply()["ok"]


def test_bad_lines_of_many_callers_at_once_are_not_all_kept_at_once(demo):
    """Each line is a row, a hundred times as long: the rows of one turn have a bound, and their memory goes again."""
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(demo.wire()) for _ in range(64)]
        before = rss(demo)
        demo.process.send_signal(signal.SIGSTOP)
        for wire in wires:
            wire.send(b"x\n" * 4096)
        demo.process.send_signal(signal.SIGCONT)
        for wire in wires:
            assert all(not reply["ok"] for reply in wire.replies(4096))
        assert rss(demo) < before + 60_000_000


def test_calls_that_ran_behind_a_junk_reply_are_not_run_again(start, tmp_path):
    """The toolhost goes on with what is in its pipe until it is killed."""
    body = """text = request["input_json"]
if text == "slow":
    time.sleep(0.2)
    print("junk", flush=True)
    continue
open("ran", "a").write(text + "\\n")
say(output_json=text)"""
    binary = scripted(tmp_path, body)
    broker = start(config=toolhost("h", binary=binary, min=1, max=1, cwd=str(tmp_path)))
    with broker.wire() as wire:
        for _ in range(40):
            wire.ask({"aid": A, "input_json": "warm"})
        (tmp_path / "ran").unlink()
        wire.send(*({"aid": A, "input_json": text} for text in ("slow", *(f"n{n}" for n in range(30)))))
        replies = wire.replies(31)
    assert replies[0]["type"] == "bad_reply"
    ran = (tmp_path / "ran").read_text().split()
    assert len(ran) == len(set(ran))
    for n, reply in enumerate(replies[1:]):
        if reply["ok"]:
            assert reply["output_json"] == f"n{n}"
            assert f"n{n}" in ran
        else:
            assert reply["type"] == "bad_reply"
            assert "may have run" in reply["error"]
