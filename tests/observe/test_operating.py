"""Health, the status once and as a stream, and the operator's words over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

from tests.observe.conftest import Site
from tests.support.toolhosts import scripted

ECHO = "AID.DEMO.ECHO.v1"


class Watching:
    """One who reads /status/stream."""

    def __init__(self, site):
        self.connection = site.connect()
        self.connection.request("GET", "/status/stream")
        self.response = self.connection.getresponse()

    def event(self):
        line = self.response.readline()
        assert line.startswith(b"data: "), line
        assert self.response.readline() == b"\n"
        return json.loads(line[6:])

    def leave(self):
        self.response.close()
        self.connection.close()


# --- health -----------------------------------------------------------------------------------------------------------


def test_a_broker_that_serves_is_alive_and_ready(site):
    assert [(site.get(path).status, site.get(path).body) for path in ("/livez", "/readyz")] == [(200, b"ok\n")] * 2


def test_one_whose_toolhosts_all_do_not_start_is_alive_and_says_why_it_is_not_ready(start, tmp_path):
    host = scripted(tmp_path, "pass", before="os._exit(3)")
    site = Site(start("--http", "127.0.0.1:0", config=f'[[toolhost]]\nname = "sick"\nbinary = "{host}"\n'))
    site.broker.eventually(lambda: site.get("/readyz").status == 503)
    reason = site.get("/readyz").body
    assert reason.startswith(b"sick: its toolhosts do not start: its toolhost ")
    assert b"exited with code 3" in reason
    assert site.get("/livez").status == 200


def test_one_that_drains_is_alive_and_not_ready(site):
    connection = site.connect()
    connection.request("GET", "/livez")
    assert connection.getresponse().read() == b"ok\n"
    with site.broker.wire() as wire:
        wire.send({"aid": "AID.DEMO.SLEEP.v1", "inputs": {"ms": 1500}})
        site.broker.eventually(lambda: any(p["in_flight"] for p in processes(site)))
        os.kill(site.broker.process.pid, signal.SIGTERM)
        time.sleep(0.3)
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        assert (response.status, response.read()) == (503, b"the broker is stopping\n")
        assert wire.reply()["ok"]


def processes(site):
    return [one for pool in site.broker.status()["pools"] for one in pool["processes"]]


# --- status -----------------------------------------------------------------------------------------------------------


def test_the_status_is_that_of_the_command_line(site):
    site.call(ECHO)
    shown = site.get("/status").json()
    assert shown["tools"][0]["latency"]["http"]["count"] == 1
    assert len(shown["bounds_seconds"]) + 1 == len(shown["tools"][0]["latency"]["http"]["buckets"])
    assert shown["tools"][0]["breaker"] == "closed"
    assert set(shown) >= set(site.broker.status()) - {"ok", "status"}


def test_the_stream_tells_the_status_once_a_second_until_the_watcher_leaves(site):
    one, other = Watching(site), Watching(site)
    assert one.response.getheader("content-type") == "text/event-stream"
    begin = time.monotonic()
    first = one.event()
    site.call(ECHO)
    second = one.event()
    assert 0.8 < time.monotonic() - begin < 3
    assert [len(event["tools"]) for event in (first, second)] == [0, 1]
    assert [other.event()["uptime_seconds"] for _ in range(2)] == [
        first["uptime_seconds"],
        second["uptime_seconds"],
    ], "one report is made for all"
    one.leave()
    other.leave()
    site.broker.eventually(lambda: connections(site) == 1)
    again = Watching(site)
    assert again.event()["uptime_seconds"] > second["uptime_seconds"], "what is told first is not what was true then"
    again.leave()


def test_the_last_word_of_the_stream_is_that_the_broker_stops(site):
    watching = Watching(site)
    assert watching.event()["draining"] is False
    os.kill(site.broker.process.pid, signal.SIGTERM)
    last = watching.event()
    while not last["draining"]:
        last = watching.event()
    assert watching.response.read() == b""


def connections(site):
    text = site.get("/metrics").body.decode()
    return float(next(one.split()[-1] for one in text.splitlines() if one.startswith('broker_connections{face="http"')))


def test_so_many_may_watch_and_the_next_one_is_told_so(site):
    watching = [Watching(site) for _ in range(64)]
    assert all(one.event() for one in watching)
    answer = site.get("/status/stream")
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert "64 watch already" in answer.json()["error"]["message"]
    for one in watching:
        one.leave()
    site.broker.eventually(lambda: Watching(site).response.status == 200)


def test_a_broker_that_is_told_to_stop_does_not_wait_for_watchers_even_if_they_do_not_read(site):
    watching = Watching(site)
    watching.event()
    deaf = socket.create_connection(("127.0.0.1", site.port))
    deaf.sendall(b"GET /status/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
    time.sleep(0.2)
    begin = time.monotonic()
    assert site.broker.stop() == 0
    assert time.monotonic() - begin < 2
    assert not watching.response.read().rpartition(b"\n\n")[2], "it ends between two events"
    deaf.close()


# --- words ------------------------------------------------------------------------------------------------------------


def test_the_operators_words_work_with_an_operators_token(site, token):
    def say(word, **given):
        return site.ask("POST", f"/operator/{word}", given, token)

    lease = say("lease.issue", tool_aid="AID.FILE.WRITE.v1", ttl_ms=60000)
    assert (lease.status, lease.json()["tier"]) == (200, 1)
    (listed,) = say("lease.list").json()["leases"]
    assert say("lease.revoke", name=listed["fingerprint"]).json()["fingerprint"] == listed["fingerprint"]
    assert say("lease.gc").json()["issued"] == 1
    assert say("pause", name="demo").json() == {"ok": True, "paused": ["demo"]}
    assert say("resume", name="demo").json()["paused"] == []
    assert say("breaker.reset", name=ECHO).json()["now"] == "closed"
    assert "kept" in say("reload").json()["result"]
    assert site.ask("POST", "/operator/reload", None, token).status == 200, "a body is not needed"


def test_everybody_else_is_told_how_to_become_one(site):
    for answer in (site.ask("POST", "/operator/reload", {}), site.ask("POST", "/operator/no", {})):
        assert answer.status == 403
        assert "broker token new NAME" in answer.json()["error"]["message"]
        assert "operator = true" in answer.json()["error"]["message"]


def test_what_is_wrong_with_a_word_is_said(site, token):
    def say(word, body):
        answer = site.ask("POST", f"/operator/{word}", body, token)
        return answer.status, answer.json()["error"]["message"]

    assert say("status", {})[0] == 404, "that is GET /status"
    assert "lease.issue" in say("no.such", {})[1]
    assert say("pause", {"name": "nobody"}) == (
        404,
        "there is no pool or tool called 'nobody'; pools: demo, fault, wire; `broker tools` shows the tools",
    )
    assert say("pause", {"name": 5})[0] == 400
    assert say("pause", [])[0] == 400
    assert say("pause", {"name": "x" * 70000})[0] == 413


def test_pause_and_resume_are_commands_as_well(site):
    def command(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "broker", *arguments, "--socket", site.broker.path],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout or done.stderr

    assert command("pause", ECHO) == (0, f"paused: {ECHO}\n")
    assert command("pause", "demo") == (0, f"paused: {ECHO}, demo\n")
    assert command("resume", "demo") == (0, f"paused: {ECHO}\n")
    assert command("resume", "*") == (0, "nothing is paused\n")
    code, text = command("pause", "no")
    assert (code, "pools: demo, fault, wire" in text) == (1, True)
