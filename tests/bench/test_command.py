"""`broker bench` as users have it: what they see, what they get as files, and what they are told when it cannot be."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import psutil
import pytest

from broker.bench import cases, page, report
from broker.bench.compare import compare
from broker.bench.text import Paint, duration, number
from broker.cli import main
from tests.bench.conftest import begin

ECHO = "AID.DEMO.ECHO.v1"
SHORT = ["--duration", "0.15", "--warmup", "0.03"]


def done(process, code=0):
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, (process.returncode, out, err)
    assert "Traceback" not in err
    return out, err


@pytest.fixture(scope="module")
def measured(tmp_path_factory, broker):
    """A report of two depths, as its file; on stdout there was nothing else."""
    folder = tmp_path_factory.mktemp("report")
    arguments = ["--tool", ECHO, "--input", '{"a":"<b>&"}', "--depth", "1,8", "--json", "-"]
    out, err = done(begin(folder, "--socket", broker.path, *arguments, *SHORT))
    assert "P99.9" in err
    path = folder / "a.json"
    path.write_text(out)
    return path


def wait_for(check):
    deadline = time.monotonic() + 20
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def calls_of(served):
    return sum(tool["calls"] for tool in served.status()["tools"])


# --- what one sees ----------------------------------------------------------------------------------------------------


def test_a_tool_gets_a_table_on_stdout(bench, broker):
    out, err = done(bench("--socket", broker.path, "--tool", ECHO, "--depth", "4", *SHORT))
    assert "P99.9" in out
    (line,) = [line for line in out.splitlines() if line.startswith(f"socket, depth 4, {ECHO} ")]
    assert line.split()[-1] == "0"
    assert "the client alone, depth 4" in out
    assert "\x1b" not in out + err
    assert err == ""  # short, and no terminal


def test_an_open_loop_says_what_was_due_and_what_was_done(bench, broker):
    arguments = ["--tool", ECHO, "--rate", "400", "--connections", "2"]
    out, _ = done(bench("--socket", broker.path, *arguments, *SHORT))
    assert f"socket, 400/s, 2 connections, {ECHO}" in out
    assert "of the 400 that were due; " in out
    assert "started in time" in out


def test_failures_are_shown_with_an_example_and_all_of_them_failing_is_no_success(bench, broker):
    arguments = ["--tool", "AID.DEMO.FAIL.v1", "--input", '{"error":"out of ink"}']
    out, err = done(bench("--socket", broker.path, *arguments, *SHORT), 1)
    assert "tool_error, for example: out of ink" in out
    assert "no call has succeeded" in err


def test_embedded_needs_no_broker(bench):
    out, _ = done(bench("--tool", ECHO, "--embedded", "--depth", "2", *SHORT))
    assert f"embedded, depth 2, {ECHO}" in out


def test_the_self_portrait_starts_a_broker_where_there_is_none(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cases, "SECONDS", 0.1)
    monkeypatch.setattr(cases, "WARMUP", 0.01)
    monkeypatch.setattr(cases, "PASSES", 1)
    before = set(psutil.Process().children(recursive=True))
    assert main(["bench", "--json", str(tmp_path / "p.json"), "--html", str(tmp_path / "p.html")]) == 0
    captured = capsys.readouterr()
    assert "no broker is serving" in captured.err
    assert "a private one with the demo tools is measured" in captured.err
    whole = report.read(str(tmp_path / "p.json"))
    assert len(whole.cases) == 23
    assert len(whole.client) == 5
    assert not [one.name for one in whole.cases if one.failed or not one.succeeded]
    for name in (
        "embedded, depth 256, 64 B",
        "socket, depth 64, 8 connections, 64 B",
        "http, depth 1, 32 connections, 16 KB",
    ):
        assert name in captured.out
        assert name in (tmp_path / "p.html").read_text()
    assert not set(psutil.Process().children(recursive=True)) - before


def test_the_self_portrait_is_within_twenty_five_seconds():
    assert cases.PASSES * sum(plan.seconds + plan.warmup for plan in cases.portrait(http=True)) < 21


@pytest.mark.parametrize(
    ("nanoseconds", "words"),
    [(0, "0 ns"), (999, "999 ns"), (999.6, "1.00 µs"), (12_345, "12.3 µs"), (99_960, "100 µs"), (2.5e9, "2.50 s")],
)
def test_durations_have_three_digits(nanoseconds, words):
    assert duration(nanoseconds) == words


# --- files ------------------------------------------------------------------------------------------------------------


def test_json_is_as_documented_and_reads_back(measured):
    tree = json.loads(measured.read_text())
    assert (tree["schema"], tree["version"], tree["partial"]) == ("toolhost-broker-bench", 1, "")
    assert tree["machine"]["cores"] >= 1
    assert socket.gethostname() not in json.dumps(tree["machine"])
    one, eight = tree["cases"]
    assert (one["depth"], eight["depth"], one["loop"], one["input_bytes"]) == (1, 8, "closed", len('{"a":"<b>&"}'))
    assert one["succeeded"] == one["histogram"]["count"] == sum(times for _, times in one["histogram"]["buckets"])
    assert 0 < one["latency"]["p50"] <= one["latency"]["p99"] <= one["latency"]["max"]
    assert len(one["rounds"]) == 5
    assert eight["client_cpu_ns"] > 0
    whole = report.read(str(measured))
    assert msgspec.json.decode(report.encode(whole)) == tree
    measured.with_name("b.json").write_text(json.dumps({**tree, "added later": 1}))
    assert report.read(str(measured.with_name("b.json"))) == whole


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_well_formed_whole_and_has_the_figures(measured):
    whole = report.read(str(measured))
    whole.cases[0].failed["tool_error"] = report.Failures(3, "<script>alert(1)</script>")
    text = page.render(whole)
    tags = Tags()
    tags.feed(text.removeprefix("<!DOCTYPE html>"))
    assert tags.open == []
    words = " ".join(tags.words)
    for one in whole.cases:
        for figure in (number(one.rate), duration(one.latency.p50), duration(one.latency.p99_9), one.name):
            assert figure in words
    assert whole.machine.cpu in words
    assert "--depth 1,8" in words  # the command
    assert "<script>alert(1)</script>" in words  # as words, not as a tag
    assert "script" not in {tag for tag, _ in tags.seen}
    assert not [attrs for _, attrs in tags.seen if attrs.keys() & {"src", "href"}]
    assert "prefers-color-scheme:dark" in text
    assert "url(" not in text
    plots = ["<svg" + part.split("</svg>")[0] + "</svg>" for part in text.split("<svg")[1:]]
    labels = [ElementTree.fromstring(plot).get("aria-label") for plot in plots]
    assert [label for label in labels if label] == [
        "Latency by percentile, socket: by depth",
        "Throughput by depth",
    ]


def test_two_reports_are_compared_and_what_is_beyond_the_spread_is_marked(measured, capsys, tmp_path):
    tree = json.loads(measured.read_text())
    for case in (*tree["cases"], *tree["client"]):  # a busy machine's rounds may differ by more than ten times
        case["rounds"] = [case["rounds"][0]] * len(case["rounds"])
    measured = tmp_path / "steady.json"
    measured.write_text(json.dumps(tree))
    tree = json.loads(measured.read_text())  # no part of it twice
    slow = tree["cases"][1]
    for part in slow["rounds"]:
        part["answered"] = part["answered"] // 10
        part["p50"] *= 10
    slow["rate"] /= 10
    slow["latency"]["p50"] *= 10
    tree["cases"].append({**tree["cases"][0], "name": "another"})
    tree["machine"]["cores"] = 64
    other = tmp_path / "other.json"
    other.write_text(json.dumps(tree))
    assert main(["bench", "--compare", str(measured), str(other)]) == 0
    out = capsys.readouterr().out
    first, second = [line for line in out.splitlines() if line.startswith("socket")]
    assert "worse" not in first
    assert "better" not in first
    assert first.count("1.00") >= 3
    assert "worse 0.10" in second
    assert "worse 10.00" in second
    assert "only in B: another" in out
    assert "two machines" in out
    assert len([line for line in out.splitlines() if line.startswith("client, depth")]) == 2
    assert "the client alone has changed" not in out
    for part in tree["client"][0]["rounds"]:
        part["p50"] *= 10
    other.write_text(json.dumps(tree))
    assert main(["bench", "--compare", str(measured), str(other)]) == 0
    assert "the client alone has changed, too" in capsys.readouterr().out
    assert main(["bench", "--compare", str(other), str(measured)]) == 0
    assert "better 10.00" in capsys.readouterr().out
    whole = report.read(str(measured))
    assert "no case in common" in compare(whole, msgspec.structs.replace(whole, cases=[], client=[]), Paint(False))


# --- the end, early ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("embedded", [False, True])
def test_ctrl_c_shows_what_there_is_and_leaves_nothing_behind(bench, broker, tmp_path, embedded):
    place = ["--embedded"] if embedded else ["--socket", broker.path]
    files = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    before = calls_of(broker)
    process = bench(*place, "--tool", ECHO, "--depth", "1", "--duration", "30", "--warmup", "0", *files)
    if embedded:
        wait_for(psutil.Process(process.pid).children)
    else:
        wait_for(lambda: calls_of(broker) > before + 100)
    time.sleep(0.3)
    family = psutil.Process(process.pid).children(recursive=True)
    told = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = done(process, 130)
    assert time.monotonic() - told < 4
    assert family
    assert not psutil.wait_procs(family, timeout=2)[1]
    assert "partial: interrupted" in out
    whole = report.read(str(tmp_path / "r.json"))
    assert whole.partial == "interrupted"
    assert whole.cases[0].succeeded > 100
    assert whole.cases[0].seconds < 10
    assert "Partial:" in (tmp_path / "r.html").read_text()


def test_a_portrait_that_is_killed_leaves_no_broker(bench):
    process = bench()
    mine = psutil.Process(process.pid)
    wait_for(lambda: len(mine.children(recursive=True)) >= 4)  # the broker, its toolhosts, the mirror
    family = mine.children(recursive=True)
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(family, timeout=5)[1]


def test_a_broker_that_dies_in_the_middle_costs_no_figure(bench, demo, tmp_path):
    process = bench(
        "--socket", demo.path, "--tool", ECHO, "--duration", "20", "--warmup", "0.1", "--json", str(tmp_path / "r.json")
    )
    wait_for(lambda: calls_of(demo) > 100)
    time.sleep(0.3)
    demo.process.kill()
    out, err = done(process, 1)
    assert "partial: the broker has closed the connection" in out
    assert "the figures until then are above" in err
    assert report.read(str(tmp_path / "r.json")).cases[0].succeeded > 100


# --- mistakes ---------------------------------------------------------------------------------------------------------


def refused(capsys, code, arguments, *parts):
    assert main(["bench", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("broker: ")
    for part in parts:
        assert part in line, line


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--depth", "8"], ["--depth", "--tool"]),
        (["--embedded"], ["--embedded", "--tool"]),
        (["--tool", ECHO, "--rate", "5", "--depth", "8"], ["--rate", "--depth", "give one"]),
        (["--tool", ECHO, "--embedded", "--connections", "8"], ["--connections", "leave out"]),
        (["--tool", ECHO, "--embedded", "--socket", "/x"], ["--socket", "leave out"]),
        (["--http", "http://127.0.0.1:1"], ["--http", "--tool"]),
        (["--tool", ECHO, "--http", "http://127.0.0.1:1", "--embedded"], ["--http", "--embedded", "give one"]),
        (["--tool", ECHO, "--http", "http://127.0.0.1:1", "--socket", "/x"], ["--http", "--socket", "give one"]),
        (["--tool", ECHO, "--http", "http://127.0.0.1:1", "--connections", "2"], ["--connections", "--depth"]),
        (["--tool", ECHO, "--http", "127.0.0.1:8080"], ["--http", "http://HOST:PORT", "http://127.0.0.1:8080"]),
        (["--tool", ECHO, "--http", "http://a:b"], ["--http", "http://127.0.0.1:8080"]),
        (["--tool", ECHO, "--depth", "0"], ["--depth 0", "from 1 to"]),
        (["--tool", ECHO, "--depth", "8,8"], ["different"]),
        (["--tool", ECHO, "--depth", "many"], ["--depth many", "whole number"]),
        (["--tool", ECHO, "--rate", "-1"], ["--rate -1", "from"]),
        (["--tool", ECHO, "--rate", "nan"], ["--rate nan", "from"]),
        (["--tool", ECHO, "--connections", "0"], ["--connections 0", "from 1"]),
        (["--tool", ECHO, "--duration", "0"], ["--duration 0", "from"]),
        (["--tool", ECHO, "--warmup", "-1"], ["--warmup -1", "from"]),
        (["--tool", ECHO, "--input", "{text:1}"], ["--input", "not JSON", "quote it"]),
        (["--json", "/no/such/folder/a.json"], ["--json", "/no/such/folder", "name another"]),
        (["--html", "/"], ["--html /", "name another"]),
        (["--json", "a", "--html", "a"], ["same file"]),
        (["--compare", "a", "b", "--tool", ECHO], ["--compare", "--tool"]),
    ],
)
def test_wrong_usage_is_told_in_one_sentence(capsys, tmp_path, monkeypatch, arguments, parts):
    monkeypatch.chdir(tmp_path)
    refused(capsys, 2, arguments, *parts)
    assert not os.listdir(tmp_path)


def test_a_dead_socket(capsys, tmp_path):
    path = str(tmp_path / "b.sock")
    refused(capsys, 1, ["--socket", path, "--tool", ECHO], path, "broker serve")
    refused(capsys, 1, ["--socket", path], path, "broker serve")


def test_an_unknown_tool(capsys, broker, monkeypatch, tmp_path):
    refused(capsys, 1, ["--socket", broker.path, "--tool", "AID.DEMO.ECO.v1"], "did you mean AID.DEMO.ECHO.v1?")
    refused(capsys, 1, ["--socket", broker.path, "--tool", "x"], "does not have x", "broker tools")
    monkeypatch.chdir(tmp_path)
    refused(capsys, 1, ["--embedded", "--tool", "x"], "do not have x", "broker tools")


def test_files_that_are_no_reports(capsys, measured, tmp_path):
    refused(capsys, 1, ["--compare", str(measured), "/no/such.json"], "/no/such.json", "--json FILE")
    tree = json.loads(measured.read_text())
    broken = tmp_path / "broken.json"
    tree["cases"][0]["histogram"]["count"] = 7
    for content in ("", "{}", "[1]", "\0", json.dumps({**tree, "version": 2}), json.dumps(tree)):
        broken.write_text(content)
        refused(capsys, 1, ["--compare", str(measured), str(broken)], str(broken), "not a report", "--json FILE")


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    for part in ("examples:", "--rate 500", "open loop", "--compare before.json after.json", "Exit codes"):
        assert part in out
