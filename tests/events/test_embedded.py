"""Event tools in the caller's own process: the same verdicts and state, and nothing left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from broker import Embedded
from broker.client.failures import CallFailed

DONE = 'say("done", ok=True)'


@pytest.fixture
def embedded(tmp_path: Path):
    """Makes one with these entries of the configuration."""
    made = []

    def make(text: str, **environ: str) -> Embedded:
        file = tmp_path / "broker.toml"
        file.write_text(text)
        made.append(Embedded(file=str(file), environ={**os.environ, **environ}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_call_has_its_events_and_its_session(embedded, tools):
    body = f"say('state_patch', patch={{'n': {{'a': 1}}}}); say('log', level='info', message='hm'); {DONE}"
    more = f"say('state_patch', patch={{'n': {{'b': 2}}}}); {DONE}"
    broker = embedded(tools.tool("first", body) + tools.tool("second", more))
    output = broker.call("first", session="s").output
    assert (output["verdict"], len(output["events"]), output["state"]) == ("success", 3, {"n": {"a": 1}})
    assert broker.call("second", session="s").output["state"] == {"n": {"a": 1, "b": 2}}
    assert broker.call("second", session="other").output["state"] == {"n": {"b": 2}}
    assert broker.state("s") == {"n": {"a": 1, "b": 2}}
    assert broker.clear_state("s") is True
    assert (broker.state("s"), broker.clear_state("s")) == ({}, False)


def test_failures_say_what_they_are(embedded, tools):
    broker = embedded(
        tools.tool("failed", 'say("done", ok=False, summary="no torch")')
        + tools.tool("silent", "pass")
        + tools.tool("slow", "time.sleep(60)", timeout_seconds=0.2)
        + tools.entry("missing", ["/nowhere/at/all"])
    )
    for name, kind, words in (
        ("failed", "tool_error", "no torch"),
        ("silent", "bad_reply", "Missing done event (protocol violation)"),
        ("slow", "timeout", "0.2 s"),
        ("missing", "not_found", "is not there"),
    ):
        with pytest.raises(CallFailed) as failed:
            broker.call(name)
        assert (failed.value.code, words in str(failed.value)) == (kind, True), (name, failed.value)


def test_a_key_runs_its_tool_once(embedded, tools, tmp_path):
    ran = tmp_path / "ran"
    broker = embedded(tools.tool("once", f"open({str(ran)!r}, 'a').write('x'); time.sleep(0.1); {DONE}"))
    threads = [threading.Thread(target=broker.call, args=("once",), kwargs={"idempotency_key": "k"}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ran.read_text() == "x"


def test_closing_ends_what_runs(embedded, tools, tmp_path):
    pid = tmp_path / "pid"
    broker = embedded(tools.tool("stays", f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"))
    failures = []

    def call():
        try:
            broker.call("stays")
        except CallFailed as failed:
            failures.append(failed)

    thread = threading.Thread(target=call)
    thread.start()
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.005)
    broker.close()
    thread.join(10)
    assert [failed.code for failed in failures] == ["crash"]
    assert not psutil.pid_exists(int(pid.read_text()))


def test_an_interrupted_call_leaves_no_process(embedded, tools, tmp_path):
    pid = tmp_path / "pid"
    broker = embedded(tools.tool("stays", f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"))

    def ring(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            broker.call("stays")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not pid.exists() or not psutil.pid_exists(int(pid.read_text()))
