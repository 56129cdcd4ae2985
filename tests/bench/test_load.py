"""The load generators, against real brokers."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest

from broker import Embedded
from broker.bench.embedded import InProcess
from broker.bench.load import Unix
from broker.bench.model import Lost, Plan, Tally
from broker.bench.private import Private
from broker.bench.wire import Connection, head_of
from tests.support.config import toolhost
from tests.support.toolhosts import scripted

ECHO, SLEEP, FAIL = "AID.DEMO.ECHO.v1", "AID.DEMO.SLEEP.v1", "AID.DEMO.FAIL.v1"
OK = b'{"ok":true,"status":"OK","output_json":"{\\"status\\":\\"OK\\"}","error":""}\n'
BAD = b'{"ok":false,"status":"TOOL_ERROR","error":"no","ds_state":{"status":"OK","ok":true}}\n'


def measure(face, tool=ECHO, text="{}", **how):
    plan = Plan(face=face.name, tool=tool, input=text, **{"seconds": 0.2, "warmup": 0.03, **how})
    tally, ticks = Tally(), []
    face.measure(plan, tally, ticks.append)
    assert ticks
    return tally


def rate(tally):
    return sum(one.answered for one in tally.rounds) / sum(one.seconds for one in tally.rounds)


@pytest.fixture(scope="module")
def embedded():
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("BROKER_", "MACHINA_"))}
    face = InProcess(lambda: Embedded(environ=clean))
    yield face
    face.close()


# --- a connection -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 60, 10_000])
def test_replies_are_counted_and_told_apart_however_they_are_cut(size):
    lines = [OK, OK, BAD, OK, BAD, BAD, OK]
    stream = b"".join(lines)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(ours, b"{}\n")
        connection.begin(len(lines))
        count, bad = 0, []
        for at in range(0, len(stream), size):
            more, whole = connection.replies(stream[at : at + size], head_of(OK))
            assert whole is None or len(whole) == more
            count += more
            bad += [line + b"\n" for line in whole or () if not line.startswith(head_of(OK))]
        assert count == len(lines)
        assert bad == [line for line in lines if line is BAD]
        with pytest.raises(Lost, match="not asked"):
            connection.replies(OK, head_of(OK))


def test_lines_that_a_full_socket_cuts_arrive_whole():
    line = b"".join(b"%d," % number for number in range(3000)) + b"\n"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(ours, line)
        connection.begin(100)
        assert connection.blocked
        assert 0 < connection.written() < 100
        got = bytearray()
        while len(got) < 100 * len(line):
            got += theirs.recv(50_000)
            connection.flush()
        assert got == line * 100
        assert connection.written() == 100


@pytest.mark.parametrize(
    ("line", "head"),
    [
        (OK, b'{"ok":true,"status":"OK"'),
        (b'{"ok": true, "status": "OK", "error": ""}', b'{"ok": true, "status": "OK"'),
        (b'{"output_json":"x","status":"OK"}', b""),
    ],
)
def test_how_a_success_begins_is_learned_where_that_is_sure(line, head):
    assert head_of(line) == head


# --- closed loops -----------------------------------------------------------------------------------------------------


def test_a_closed_loop_keeps_as_many_calls_under_way_as_asked(broker):
    face = Unix(broker.path)
    tally = measure(face, depth=16, connections=3, rounds=3)
    assert not tally.failed
    assert (tally.late, tally.unanswered, len(tally.rounds)) == (0, 0, 3)
    count = tally.latency().count
    assert count > 1000
    (told,) = [tool["calls"] for tool in broker.status()["tools"] if tool["aid"] == ECHO]
    assert told >= count
    assert rate(tally) == pytest.approx(count / 0.2, rel=0.3)
    assert tally.cpu_seconds > 0
    slow = measure(face, SLEEP, '{"ms":20}', depth=1)
    assert 19e6 < slow.latency().percentile(50) < 100e6
    assert 5 < rate(slow) < 60


def test_failures_are_counted_by_type_and_end_nothing(broker):
    tally = measure(Unix(broker.path), FAIL, '{"error":"out of ink"}', depth=4)
    assert tally.failed.keys() == {"tool_error"}
    assert tally.failed["tool_error"].count > 100
    assert tally.failed["tool_error"].example == "out of ink"
    assert tally.latency().count == 0
    tally = measure(Unix(broker.path), "AID.NO.SUCH.v1")
    assert "AID.NO.SUCH.v1" in tally.failed["not_found"].example


def test_successes_and_failures_are_told_apart_within_one_batch(start, tmp_path):
    body = 'say(**({"output_json": "1"} if n % 3 else {"ok": False, "status": "TOOL_ERROR", "error": "third"}))'
    host = scripted(tmp_path, body)
    served = start(config=f'[[toolhost]]\nname = "t"\nbinary = "{host}"\nmin = 1\nmax = 1\n')
    tally = measure(Unix(served.path), "AID.A.v1", depth=12)
    failed = tally.failed["tool_error"].count
    assert tally.failed["tool_error"].example == "third"
    assert failed / (failed + tally.latency().count) == pytest.approx(1 / 3, abs=0.05)


def test_large_inputs_and_many_connections(broker):
    text = json.dumps({"text": "ä" * 100_000})
    tally = measure(Unix(broker.path), text=text, depth=4, connections=4)
    assert not tally.failed
    assert tally.latency().count > 4


def test_the_client_alone_is_measured_against_a_mirror():
    with Private() as private:
        tally = measure(Unix(private.mirror(200), "client"), depth=64)
    assert not tally.failed
    assert rate(tally) > 50_000


# --- open loops -------------------------------------------------------------------------------------------------------


def test_an_open_loop_holds_its_rate(broker):
    tally = measure(Unix(broker.path), rate=1000, connections=3, seconds=0.5)
    assert tally.latency().count == pytest.approx(500, rel=0.1)
    assert rate(tally) == pytest.approx(1000, rel=0.25)
    assert not tally.failed
    assert tally.unanswered == 0


def test_latency_counts_from_when_a_call_was_due(start, where):
    """50 calls a second are possible. A closed loop sees 20 ms; whoever comes 200 times a second waits much longer."""
    served = start(config="[limits]\nconnection_bytes = 200000\n" + toolhost("d", where["demo_plugin"], min=1, max=1))
    face = Unix(served.path)
    closed = measure(face, SLEEP, '{"ms":20}').latency()
    text = json.dumps({"ms": 20, "padding": "x" * 20_000})
    tally = measure(face, SLEEP, text, rate=200, seconds=0.5, warmup=0.0)
    assert rate(tally) < 60
    latency = tally.latency()
    assert latency.count == pytest.approx(100, rel=0.1)  # those without an answer, too: they have waited for so long
    assert tally.unanswered > 10
    assert tally.late > 10
    assert latency.percentile(99) > 10 * closed.percentile(50) > 0
    assert latency.percentile(50) > 200e6


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_broker_that_dies_leaves_what_was_measured(demo):
    tally = Tally()
    plan = Plan(face="socket", tool=ECHO, input="{}", depth=8, seconds=5.0, rounds=5)
    ticks = []

    def tick(answered):
        ticks.append(answered)
        if len(ticks) == 3:
            demo.process.kill()

    begin = time.monotonic()
    with pytest.raises(Lost, match="closed the connection"):
        Unix(demo.path).measure(plan, tally, tick)
    assert time.monotonic() - begin < 2
    assert tally.latency().count > 100
    assert tally.rounds[-1].seconds < 1
    assert tally.failed["unavailable"].count == 8
    demo.process.wait()
    with pytest.raises(Lost, match="no connection"):
        Unix(demo.path).measure(plan, Tally(), tick)


def test_calls_that_do_not_end_are_not_waited_for_for_ever(broker, embedded):
    for face in (Unix(broker.path), embedded):
        begin = time.monotonic()
        tally = measure(face, SLEEP, '{"ms":3000}', depth=2, warmup=0.0, seconds=0.15)
        assert time.monotonic() - begin < 2.9
        assert tally.unanswered == 2
        assert tally.latency().min > 150e6
    assert measure(embedded, seconds=0.1).latency().count > 10  # it was made anew


# --- embedded ---------------------------------------------------------------------------------------------------------


def test_embedded_has_a_thread_for_each_call_under_way(embedded):
    tally = measure(embedded, depth=4, rounds=3)
    assert not tally.failed
    assert len(tally.rounds) == 3
    assert tally.latency().count > 500
    tally = measure(embedded, FAIL, '{"error":"out of ink"}', depth=2)
    assert tally.failed["tool_error"].example == "out of ink"


def test_embedded_holds_a_rate_or_says_that_it_cannot(embedded):
    tally = measure(embedded, rate=500)
    assert tally.latency().count == pytest.approx(100, abs=2)
    assert rate(tally) == pytest.approx(500, rel=0.3)
    tally = measure(embedded, SLEEP, '{"ms":20}', rate=4000, warmup=0.0)
    assert tally.latency().count == 800
    assert rate(tally) < 1600
    assert tally.late > 10
    assert tally.latency().percentile(99) > 200e6
