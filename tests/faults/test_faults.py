"""CONTRACT §9 with real faults: each call answered once, nobody else hurt, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import psutil
import pytest

from tests.support.config import toolhost

ECHO = "AID.DEMO.ECHO.v1"


def fault(name, **inputs):
    return {"aid": f"AID.FAULT.{name}.v1", "input_json": json.dumps(inputs)}


def echo(n, **more):
    return {"aid": ECHO, "input_json": json.dumps({"n": n}), **more}


def output(reply):
    assert reply["status"] == "OK", reply
    return json.loads(reply["output_json"])


@pytest.mark.parametrize(
    ("request_", "kind", "says"),
    [
        (fault("SEGV"), "crash", "SIGSEGV"),
        (fault("EXIT", code=7), "crash", "code 7"),
        (fault("HALF"), "crash", "exited"),
        (fault("CLOSE"), "crash", "closed its output"),
        (fault("SEGV_MID"), "crash", "SIGSEGV"),
        (fault("JUNK"), "bad_reply", "not a JSON object"),
        (fault("OVERSIZE"), "reply_too_large", "1048576"),
        ({**fault("HANG"), "timeout_ms": 200}, "timeout", "0.2 s"),
        ({**fault("HANG_TERM"), "timeout_ms": 200}, "timeout", "0.2 s"),
        ({**fault("LATE", ms=60000), "timeout_ms": 200}, "timeout", "0.2 s"),
    ],
    ids=lambda value: value["aid"] if isinstance(value, dict) else None,
)
def test_what_a_toolhost_does_wrong_is_one_clear_answer_and_the_next_call_works(faulty, request_, kind, says):
    with faulty.wire() as wire:
        for _ in range(3):
            reply = wire.ask(request_)
            assert (reply["ok"], reply["type"], reply["aid"]) == (False, kind, request_["aid"])
            assert says in reply["error"]
        assert output(wire.ask(echo(1))) == {"n": 1}
        assert wire.quiet()


def test_a_toolhost_that_answers_twice_is_found_out_before_anybody_is_behind_it(faulty):
    with faulty.wire() as wire:
        for n in range(8):
            wire.send({**fault("TWICE"), "id": f"twice{n}"}, {**fault("OK", n=n), "id": f"ok{n}"})
        replies = {reply["id"]: reply for reply in wire.replies(16)}
        assert wire.quiet()
    for n in range(8):
        assert output(replies[f"ok{n}"]) == {"n": n}
    assert faulty.counts()["violation"] >= 1


def test_noise_on_stderr_and_stdout_harms_nothing(faulty):
    with faulty.wire() as wire:
        assert wire.ask(fault("STDERR", bytes=5_000_000))["status"] == "OK"
        assert wire.ask(fault("STDOUT", text='{"ok":true}'))["status"] == "OK"
        assert output(wire.ask(echo(1))) == {"n": 1}
    assert faulty.counts().get("violation", 0) == 0


def test_the_crash_report_has_the_toolhosts_last_words(start, tmp_path):
    host = tmp_path / "host"
    host.write_text(
        """#!/usr/bin/env python3
import sys
if sys.argv[1] == "--list":
    print('{"ok":true,"tools":[{"aid":"AID.SAY.v1"}]}', end="")
    sys.exit()
for line in sys.stdin:
    if "_fence" in line:
        print('{"ok":false,"error":"?"}', flush=True)
    else:
        sys.exit("the disk is on fire")
"""
    )
    host.chmod(0o755)
    assert "the disk is on fire" in start("--toolhost", str(host)).ask({"aid": "AID.SAY.v1"})["error"]


def test_a_grandchild_that_holds_the_pipe_delays_nobody_and_dies_with_its_group(faulty):
    with faulty.wire() as wire:
        reply = wire.ask(fault("GRANDCHILD", ms=60000))
        grandchild = psutil.Process(output(reply)["pid"])
        assert grandchild.is_running()
        toolhost = os.getpgid(grandchild.pid)
        os.kill(toolhost, signal.SIGKILL)
        faulty.eventually(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)
        assert output(wire.ask(echo(1))) == {"n": 1}


def test_memory_beyond_the_limit_is_a_tool_error_not_a_crash(faulty):
    reply = faulty.call("AID.FAULT.MEMORY.v1", mb=4096)
    assert reply["status"] == "TOOL_ERROR"
    assert faulty.counts().get("crash", 0) == 0


def test_a_toolhost_that_grows_too_much_is_replaced(start, where):
    broker = start(config=toolhost("f", where["fault_plugin"], min=1, max=1, max_rss_growth_mb=50))
    before = broker.toolhosts()
    broker.call("AID.FAULT.MEMORY.v1", mb=100, keep=True)
    broker.eventually(lambda: broker.toolhosts() not in ([], before))
    assert broker.counts()["recycled"] == 1


def test_calls_behind_a_timeout_move_and_do_not_time_out_for_it(start, where):
    """One process: everything that is sent behind the hanging call has to wait for its end, and then runs."""
    broker = start(
        config=toolhost("p", where["demo_plugin"], min=1, max=1) + toolhost("f", where["fault_plugin"], min=1, max=1)
    )
    with broker.wire() as wire:
        wire.send(
            {"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":5000}', "timeout_ms": 500},
            *(echo(n, timeout_ms=300) for n in range(20)),
        )
        assert wire.reply()["type"] == "timeout"
        assert [output(reply)["n"] for reply in wire.replies(20)] == list(range(20))


def test_a_late_reply_reaches_nobody(faulty):
    with faulty.wire() as wire:
        wire.send({**fault("LATE", ms=300), "timeout_ms": 150, "id": "late"})
        assert wire.reply()["type"] == "timeout"
        for n in range(5):
            wire.send({**fault("OK", n=n), "id": n})
            reply = wire.reply()
            assert (reply["id"], output(reply)) == (n, {"n": n})
            time.sleep(0.1)
        assert wire.quiet(0.3)


def test_kill_9_in_the_middle_of_twenty_thousand_calls_loses_only_what_was_running(start, where):
    broker = start("--plugin", where["demo_plugin"])
    calls, kills = 20_000, 0
    done = threading.Event()
    answers: dict[int, dict] = {}
    with broker.wire(timeout=60) as wire:

        def read():
            for _ in range(calls):
                reply = wire.reply()
                assert reply["id"] not in answers, "answered twice"
                answers[reply["id"]] = reply
            done.set()

        def write():
            for at in range(0, calls, 50):
                wire.send(*(echo(n, id=n) for n in range(at, at + 50)))
                time.sleep(0.001)

        reader, writer = threading.Thread(target=read), threading.Thread(target=write)
        reader.start()
        writer.start()
        while not done.wait(0.03):
            for pid in broker.toolhosts()[:1]:
                try:
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
                except ProcessLookupError:
                    pass
        reader.join()
        writer.join()
        assert wire.quiet()
    lost = [reply for reply in answers.values() if not reply["ok"]]
    assert len(answers) == calls
    assert kills >= 5
    assert all(reply["type"] == "crash" for reply in lost), lost[:3]
    assert len(lost) <= kills
    assert all(output(reply) == {"n": n} for n, reply in answers.items() if reply["ok"])


def test_nothing_that_may_have_run_is_run_again(start, where):
    """COUNTER counts its own process's runs; whoever got no answer may have counted, never more."""
    broker = start("--plugin", where["demo_plugin"])
    ran: dict[int, int] = {}
    with broker.wire() as wire:
        total, answered = 300, 0
        for at in range(0, total, 10):
            wire.send(*({"aid": "AID.DEMO.COUNTER.v1", "id": n} for n in range(at, at + 10)))
            if at % 50 == 0:
                for pid in broker.toolhosts()[:1]:
                    os.kill(pid, signal.SIGKILL)
            for reply in wire.replies(10):
                if reply["ok"]:
                    answered += 1
                    count = output(reply)
                    ran[count["pid"]] = max(ran.get(count["pid"], 0), count["count"])
        assert sum(ran.values()) <= total
        assert answered >= total - broker.counts()["crash"]


def test_a_tool_that_the_configuration_names_as_safe_is_run_again(start, where):
    broker = start(config=toolhost("d", where["demo_plugin"], min=1, max=2, rerun=["AID.DEMO.*"]))
    with broker.wire() as wire:
        wire.send({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":500}'})
        time.sleep(0.2)
        busy = [p["pid"] for pool in broker.status()["pools"] for p in pool["processes"] if p["in_flight"]]
        os.kill(busy[0], signal.SIGKILL)
        assert wire.reply()["status"] == "OK"


def test_a_toolhost_that_dies_at_start_is_not_respawned_in_a_loop_and_says_why(start, tmp_path):
    host = tmp_path / "host"
    mark = tmp_path / "starts"
    host.write_text(
        f"""#!/bin/sh
[ "$1" = --list ] && {{ printf '{{"ok":true,"tools":[{{"aid":"AID.X.v1"}}]}}'; exit 0; }}
echo start >> {mark}
echo "no license file" >&2
exit 9
"""
    )
    host.chmod(0o755)
    broker = start("--toolhost", str(host))
    reply = broker.ask({"aid": "AID.X.v1"})
    assert reply["type"] == "unavailable"
    assert "no license file" in reply["error"]
    assert "code 9" in reply["error"]
    assert broker.status()["pools"][0]["state"] == "broken"
    starts = len(mark.read_text().splitlines())
    time.sleep(1)
    assert len(mark.read_text().splitlines()) <= starts + 1 <= 12


def test_a_caller_that_hangs_up_costs_nobody_anything(demo):
    for _ in range(20):
        with demo.wire() as wire:
            wire.send(*({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":20}'} for _ in range(50)))
    with demo.wire() as wire:
        begin = time.monotonic()
        assert output(wire.ask(echo(1))) == {"n": 1}
        assert time.monotonic() - begin < 2, "queued calls of callers that left were run"
    demo.eventually(lambda: demo.status()["waiting"] == 0)
    demo.eventually(lambda: demo.status()["connections"] == 1)


def test_one_callers_flood_does_not_starve_anothers_single_call(demo):
    with demo.wire() as flood, demo.wire() as single:
        flood.send(*({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":20}'} for _ in range(500)))
        time.sleep(0.3)
        begin = time.monotonic()
        assert output(single.ask(echo(1))) == {"n": 1}
        assert time.monotonic() - begin < 0.5
        begin = time.monotonic()
        assert single.ask({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":1}'})["status"] == "OK"
        assert time.monotonic() - begin < 0.5


def test_a_call_that_waits_too_long_is_overloaded_with_a_hint(start, where):
    broker = start(config="[limits]\nqueue_seconds = 0.3\n" + toolhost("d", where["demo_plugin"], min=1, max=1))
    with broker.wire() as wire:
        wire.send(*({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":1000}', "id": n} for n in range(2)))
        reply = wire.reply()
        assert (reply["type"], reply["retry_after"]) == ("overloaded", 1)
        assert "limits.queue_seconds" in reply["error"]
        assert wire.reply()["status"] == "OK"


def test_a_caller_that_never_reads_is_not_read_from_and_others_go_on(demo):
    with demo.wire(timeout=2) as rude:
        request = json.dumps({"aid": "AID.DEMO.BLOB.v1", "input_json": '{"bytes":100000}'}).encode() + b"\n"
        sent = 0
        try:
            while sent < 64 * 1024 * 1024:
                sent += rude.socket.send(request * 1000)
        except TimeoutError:
            pass
        assert sent < 64 * 1024 * 1024, "the broker swallowed everything"
        with demo.wire() as polite:
            assert output(polite.ask(echo(1))) == {"n": 1}
        assert psutil.Process(demo.process.pid).memory_info().rss < 600 * 1024 * 1024


def test_descriptors_and_memory_stay_flat_over_many_deaths(faulty):
    process = psutil.Process(faulty.process.pid)
    with faulty.wire() as wire:
        for _ in range(5):
            wire.ask(fault("EXIT"))
        faulty.eventually(lambda: len(faulty.toolhosts()) >= 6)
        time.sleep(0.3)
        descriptors, rss = process.num_fds(), process.memory_info().rss
        for _ in range(40):
            wire.ask(fault("EXIT"))
        faulty.eventually(lambda: abs(process.num_fds() - descriptors) <= 8)
        assert process.memory_info().rss < rss * 1.2


def test_calls_that_time_out_in_new_toolhosts_are_no_starts_that_failed(start, where):
    broker = start(config="[breaker]\nin_a_row = 100\nleast_calls = 100\n" + toolhost("d", where["demo_plugin"], min=1))
    for _ in range(6):
        reply = broker.ask({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":5000}', "timeout_ms": 50})
        assert reply["type"] == "timeout", reply
    assert broker.call("AID.DEMO.ECHO.v1")["ok"]
    assert broker.status()["pools"][0]["state"] != "broken"
