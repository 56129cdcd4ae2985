"""Calls over HTTP, measured: against real brokers, and against answers that come in pieces."""

from __future__ import annotations

import os
import socket
import sys
import time

import pytest

from broker.bench import cases, page, report
from broker.bench.compare import compare
from broker.bench.http import Http, _Exchange, address, ask, open_connections
from broker.bench.model import Lost, Plan, Tally
from broker.bench.private import Private
from broker.bench.text import Paint
from broker.cli import main
from tests.bench.conftest import begin
from tests.bench.test_command import SHORT, Tags, done, refused
from tests.bench.test_load import ECHO, FAIL, SLEEP, measure, rate

OK = b'HTTP/1.1 200 OK\r\nx-request-id: 1\r\nContent-Length: 15\r\n\r\n{"status":"ok"}'
BAD = b'HTTP/1.1 500 Internal Server Error\r\ncontent-length:15\r\n\r\n{"stderr":"no"}'


@pytest.fixture
def short(monkeypatch, tmp_path):
    """A self-portrait of a moment, in a place of its own."""
    for name in [name for name in os.environ if name.startswith(("BROKER_", "MACHINA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cases, "SECONDS", 0.06)
    monkeypatch.setattr(cases, "WARMUP", 0.01)
    monkeypatch.setattr(cases, "PASSES", 1)


def faces(path):
    return {one.face for one in report.read(str(path)).cases}


# --- a connection -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 60, 10_000])
def test_answers_are_counted_and_told_apart_however_they_are_cut(size):
    answers = [OK, BAD, OK, OK, BAD, OK]
    stream = b"".join(answers)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        exchange = _Exchange(ours, b"POST / HTTP/1.1\r\n\r\n", 0)
        exchange.begin(len(answers))
        count, bad = 0, []
        for at in range(0, len(stream), size):
            more, whole = exchange.replies(stream[at : at + size], b"")
            assert whole is None or len(whole) == more
            count += more
            bad += [exchange.reason(one) for one in whole or () if exchange.reason(one) is not None]
        assert count == len(answers)
        assert bad == [("http_500", "no")] * 2
        with pytest.raises(Lost, match="not asked"):
            exchange.replies(OK, b"")
        with pytest.raises(Lost, match="how long it is"):
            exchange.replies(b"HTTP/1.1 200 OK\r\n\r\n", b"")


def test_where_a_broker_is():
    assert address("http://127.0.0.1:8080") == ("127.0.0.1", 8080)
    assert address("http://[::1]:81/") == ("::1", 81)
    assert address("http://localhost").port == 80
    for wrong in ("127.0.0.1:8080", "https://127.0.0.1", "http://", "http://a/b", "http://a:b", ""):
        with pytest.raises(ValueError, match=r"HOST:PORT|[Pp]ort"):
            address(wrong)


# --- loops ------------------------------------------------------------------------------------------------------------


def test_a_closed_loop_has_a_connection_for_each_call_under_way(web, url):
    before = {tool["aid"]: tool["calls"] for tool in web.status()["tools"]}
    tally = measure(Http(address(url)), connections=8, rounds=3)
    count = tally.latency().count
    assert not tally.failed
    assert (tally.late, tally.unanswered, len(tally.rounds)) == (0, 0, 3)
    assert count > 200
    (told,) = [tool["calls"] for tool in web.status()["tools"] if tool["aid"] == ECHO]
    assert told - before.get(ECHO, 0) >= count
    assert rate(tally) == pytest.approx(count / 0.2, rel=0.3)
    assert tally.cpu_seconds > 0
    slow = measure(Http(address(url)), SLEEP, '{"ms":20}')
    assert 19e6 < slow.latency().percentile(50) < 100e6


def test_failures_over_http_are_counted_by_code_and_end_nothing(url):
    tally = measure(Http(address(url)), FAIL, '{"error":"out of ink"}', connections=4)
    assert tally.failed["tool_error"].example == "out of ink"
    assert tally.failed["tool_error"].count > 20
    assert tally.latency().count == 0
    tally = measure(Http(address(url)), "AID.NO.SUCH.v1")
    assert tally.failed.keys() == {"unknown_tool"}


def test_large_inputs_and_answers_over_http(url):
    tally = measure(Http(address(url)), text=cases.echo_input(500_000), connections=4)
    assert not tally.failed
    assert tally.latency().count > 4


def test_an_open_loop_over_http_holds_its_rate(url):
    tally = measure(Http(address(url)), rate=300, connections=8, seconds=0.5)
    assert tally.latency().count == pytest.approx(150, abs=2)
    assert rate(tally) == pytest.approx(300, rel=0.25)
    assert not tally.failed
    assert tally.unanswered == 0


def test_latency_over_http_counts_from_when_a_call_was_due(url):
    tally = measure(Http(address(url)), SLEEP, '{"ms":20}', rate=200, connections=1, seconds=0.5, warmup=0.0)
    assert tally.latency().count == pytest.approx(100, abs=1)  # those without an answer, too
    assert rate(tally) < 60
    assert tally.late > 10
    assert tally.unanswered > 10
    assert tally.latency().percentile(99) > 300e6


def test_a_slow_open_loop_leaves_no_connection_idle_for_so_long_that_it_is_closed():
    assert [open_connections(rate) for rate in (0.01, 0.1, 1, 1000)] == [1, 3, 30, 32]


def test_a_broker_that_dies_over_http_leaves_what_was_measured(start, where):
    served = start("--http", "127.0.0.1:0", "--plugin", where["demo_plugin"])
    place = address(next(word for word in served.ready.split() if word.startswith("http:")))
    tally, ticks = Tally(), []

    def tick(answered):
        ticks.append(answered)
        if len(ticks) == 3:
            served.process.kill()

    begun = time.monotonic()
    with pytest.raises(Lost, match="closed the connection"):
        Http(place).measure(Plan(face="http", tool=ECHO, input="{}", connections=8, seconds=5.0), tally, tick)
    assert time.monotonic() - begun < 2
    assert tally.latency().count > 50
    assert tally.failed["unavailable"].count == 8


def test_the_http_client_alone_is_measured_against_a_mirror():
    with Private() as private:
        place = address(f"http://127.0.0.1:{private.http_mirror(300, 5)}")
        tally = measure(Http(place, cases.HTTP_CLIENT), connections=8)
        assert not tally.failed
        assert rate(tally) > 5000
        status, body = ask(place, "GET", "/")
        assert (status, len(body)) == (200, 300)


# --- what one sees ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory, url):
    folder = tmp_path_factory.mktemp("http")
    path = folder / "a.json"
    arguments = ["--tool", ECHO, "--http", url, "--input", '{\n"a": 1}', "--depth", "1,8", "--json", str(path)]
    out, _ = done(begin(folder, *arguments, *SHORT))
    return out, path


def test_a_tool_over_http_gets_a_table_and_is_told_what_the_client_is(measured):
    out, path = measured
    assert f"http, depth 1, {ECHO} " in out
    assert f"http, depth 1, 8 connections, {ECHO} " in out
    assert "the http client alone, depth 1, 8 connections" in out
    assert "the client is Python and shares the machine with the broker" in out
    whole = report.read(str(path))
    assert [(one.face, one.depth, one.connections) for one in whole.cases] == [("http", 1, 1), ("http", 1, 8)]
    assert [one.face for one in whole.client] == ["http client"] * 2
    assert not [one.name for one in (*whole.cases, *whole.client) if one.failed or not one.succeeded]


def test_an_open_loop_over_http_says_what_was_due(bench, url):
    out, _ = done(bench("--tool", ECHO, "--http", url, "--rate", "200", *SHORT))
    assert f"http, 200/s, 32 connections, {ECHO}" in out
    assert "of the 200 that were due; " in out


def test_the_page_shows_http_by_calls_under_way(measured):
    text = page.render(report.read(str(measured[1])))
    tags = Tags()
    tags.feed(text.removeprefix("<!DOCTYPE html>"))
    for words in ("http: by depth", "8 under way", "http, a connection for each call", "client is Python"):
        assert words in " ".join(tags.words)


def test_two_reports_over_http_are_compared_with_their_client(measured):
    whole = report.read(str(measured[1]))
    slower = report.read(str(measured[1]))
    for one in (*whole.client, *slower.client):  # a busy machine's rounds may differ by more than ten times
        for part in one.rounds:
            part.p50 = one.rounds[0].p50
    for part in slower.client[0].rounds:
        part.p50 *= 10
    same = compare(whole, whole, Paint(False))
    assert "http, depth 1, 8 connections" in same
    assert "the client alone has changed" not in same
    assert "the client alone has changed, too" in compare(whole, slower, Paint(False))


# --- the self-portrait ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short")
def test_the_self_portrait_measures_the_http_of_the_broker_that_runs(web, capsys, tmp_path):
    before = {tool["aid"]: tool["latency"] for tool in web.status()["tools"]}.get(ECHO, {}).get("http", {})
    assert main(["bench", "--socket", web.path, "--json", "p.json"]) == 0
    assert "not measured" not in capsys.readouterr().err
    whole = report.read(str(tmp_path / "p.json"))
    assert len([one for one in whole.cases if one.face == "http" and one.succeeded]) == 6
    (after,) = [tool["latency"]["http"] for tool in web.status()["tools"] if tool["aid"] == ECHO]
    assert after["count"] > before.get("count", 0) + 100


@pytest.mark.usefixtures("short")
def test_the_self_portrait_says_why_it_leaves_http_out(broker, capsys, tmp_path, start, where):
    assert main(["bench", "--socket", broker.path, "--json", "p.json"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not measured" in line]
    assert line.startswith("HTTP is not measured: the broker that is running does not serve it (`broker serve --http ")
    assert faces(tmp_path / "p.json") == {"embedded", "socket"}
    closed = '[[principal]]\nname = "http:*"\ntools = ["AID.OTHER.*"]\n'
    served = start("--http", "127.0.0.1:0", "--plugin", where["demo_plugin"], config=closed)
    assert main(["bench", "--socket", served.path, "--json", "p.json"]) == 0
    assert "HTTP is not measured: " in capsys.readouterr().err
    assert faces(tmp_path / "p.json") == {"embedded", "socket"}


@pytest.mark.usefixtures("short")
def test_without_the_packages_for_http_the_self_portrait_goes_on(monkeypatch, capsys, tmp_path):
    monkeypatch.delitem(sys.modules, "broker.faces.http.face", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["bench", "--json", "p.json"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not measured" in line]
    assert line == "HTTP is not measured: uvicorn is not installed (pip install 'toolhost-broker[http]')"
    assert faces(tmp_path / "p.json") == {"embedded", "socket"}


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_nobody_there_and_nobody_who_knows_the_tool(capsys, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = f"http://127.0.0.1:{listener.getsockname()[1]}"
    refused(capsys, 1, ["--http", dead, "--tool", ECHO], dead, "broker serve --http")
    refused(capsys, 1, ["--http", url, "--tool", "AID.DEMO.ECO.v1"], "did you mean AID.DEMO.ECHO.v1?")


def test_who_is_no_broker_is_told_apart(capsys):
    with Private() as private:
        url = f"http://127.0.0.1:{private.http_mirror(300, 4)}"
        refused(capsys, 1, ["--http", url, "--tool", ECHO], url, "is no broker")
