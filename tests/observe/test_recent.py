"""The last errors: what an operator sees of them, and what nobody sees."""

from __future__ import annotations

import subprocess
import sys
import time

from broker.observe.recent import LONGEST, MOST, Recent
from tests.observe.conftest import Site
from tests.support.config import toolhost
from tests.support.toolhosts import scripted

EXIT, HANG, JUNK = "AID.FAULT.EXIT.v1", "AID.FAULT.HANG.v1", "AID.FAULT.JUNK.v1"
SECRET = "sesame-4711"


def codes(broker):
    return [(one["tool"], one["code"], one["count"]) for one in broker.status()["recent"]]


def of_tools(broker):
    return [one for one in codes(broker) if one[1] != "did_not_start"]


def test_equal_errors_in_a_row_are_one_with_a_count(faulty):
    begin = time.time()
    with faulty.wire() as wire:
        for _ in range(6):
            wire.ask({"aid": EXIT})
        wire.ask({"aid": HANG, "timeout_ms": 200})
        wire.ask({"aid": JUNK})
    assert of_tools(faulty) == [
        (EXIT, "crash", 5),
        (EXIT, "breaker_open", 1),
        (HANG, "timeout", 1),
        (JUNK, "bad_reply", 1),
    ]
    assert all(begin - 1 < one["time"] < time.time() + 1 for one in faulty.status()["recent"])
    assert "exited with code" in faulty.status()["recent"][0]["reason"]


def test_a_toolhost_that_does_not_start_is_among_them(start, where, tmp_path):
    host = scripted(tmp_path, "os._exit(1)", before="os._exit(3)")
    broker = start(config=f'[[toolhost]]\nname = "sick"\nbinary = "{host}"\n' + toolhost("well", where["demo_plugin"]))
    broker.eventually(lambda: ("sick", "did_not_start", 5) in codes(broker))


def test_they_are_bounded_in_number_and_size():
    recent = Recent()
    for n in range(10 * MOST):
        recent.add("AID.X.v1", "crash", f"{n} " + "x" * 10 * LONGEST)
    shown = recent.report()
    assert len(shown) == MOST
    assert shown[-1]["reason"].startswith(f"{10 * MOST - 1} ")
    assert max(len(one["reason"]) for one in shown) == LONGEST


def test_nothing_that_a_tool_has_said_and_no_token_is_shown_to_everybody(start, tmp_path, token):
    body = f'print("{SECRET}", file=sys.stderr if aid == "AID.A.v1" else sys.stdout, flush=True)\nos._exit(3)'
    host = scripted(tmp_path, body)
    command = f'[[oneshot]]\nname = "loud"\ncommand = ["sh", "-c", "echo {SECRET} >&2; exit 3"]\n'
    principal = '[[principal]]\nname = "token:ops"\noperator = true\n'
    config = f'{principal}[[toolhost]]\nname = "a"\nbinary = "{host}"\n{command}'
    site = Site(start("--http", "127.0.0.1:0", config=config))
    lease = site.ask("POST", "/operator/lease.issue", {"tool_aid": "*", "tier": 3, "ttl_ms": 60000}, token).json()
    for aid in ("AID.A.v1", "AID.B.v1", "loud"):
        for _ in range(6):
            site.broker.call(aid, text=SECRET)
    shown = site.get("/status").body.decode() + site.get("/metrics").body.decode()
    assert {one["code"] for one in site.get("/status").json()["recent"]} >= {"crash", "breaker_open"}
    for hidden in (SECRET, token, lease["token_id"]):
        assert hidden not in shown
    assert site.get("/status").json()["leases_alive"][0]["issuer"] == "token:ops"
    assert SECRET in str(site.broker.status()["pools"]), "the operator is told all of it"
    assert SECRET not in str(site.broker.status()["recent"])


def test_the_status_on_a_terminal_shows_times_and_the_last_errors(faulty):
    for _ in range(2):
        faulty.call(EXIT)
    with faulty.wire() as wire:
        for n in range(50):
            wire.ask({"aid": "AID.DEMO.ECHO.v1", "inputs": {"n": n}})
    with faulty.operator() as wire:
        wire.ask({"aid": "_pause", "name": "wire"})
    done = subprocess.run(
        [sys.executable, "-m", "broker", "status", "--socket", faulty.path], capture_output=True, text=True, check=True
    )
    assert "P50 MS" in done.stdout
    assert "P99 MS" in done.stdout
    assert "paused: wire (`broker resume NAME` lets it go)" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if EXIT in line and "times" in line]
    assert f"{EXIT}  crash (2 times): its toolhost " in line
