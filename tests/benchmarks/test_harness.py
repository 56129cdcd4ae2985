"""The benchmarks' own honesty: the arithmetic, the controls' answers, the report, and what becomes of failures."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks import report
from benchmarks.harness.bench import Bench, Pace
from benchmarks.harness.controls import ECHO, NAMES, Controls, Failed, build
from benchmarks.harness.crew import Crew
from benchmarks.harness.ratios import RATIOS, Ratio, toolhost
from benchmarks.harness.results import Curve, Goal, Growth, Peer, Results, Row, Side, load
from benchmarks.harness.rounds import Spread, interleaved, ratios
from benchmarks.harness.side_by_side import side_by_side
from benchmarks.policy import WEB
from broker.bench.machine import describe

BRIEF = Pace(1, 0.02, 1, 0.02, 1, 0.02)
LINE = '{"aid":"AID.DEMO.ECHO.v1","input_json":"{\\"n\\":\\"0-0\\",\\"p\\":\\"\\"}"}'
# As a user starts it: a background job's Ctrl-C is ignored, and that is inherited.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from benchmarks.peers.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def controls(tmp_path_factory):
    return Controls(tmp_path_factory.mktemp("controls"))


@pytest.fixture
def bench(tmp_path, controls):
    return Bench(results(), BRIEF, tmp_path / "results.json", controls)


def results(**members):
    return Results(made="2020-01-01 00:00 UTC", command="…", quick=True, machine=describe(), **members)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_sides_take_turns_and_the_first_turn_does_not_count():
    turns = []

    def side(name):
        turns.append(name)
        return float(len(turns))

    assert interleaved(2, lambda: side("A"), lambda: side("B")) == [[3.0, 5.0], [4.0, 6.0]]
    assert turns == ["A", "B"] * 3


def test_a_ratio_is_that_of_each_round_not_of_the_medians():
    row = Row(name="r", over=side_of(10, 100, 30), under=side_of(10, 10, 10))
    assert row.figures() == ratios([10, 100, 30], [10, 10, 10]) == [1, 10, 3]
    spread = Spread(row.figures())
    assert (spread.median, spread.low, spread.high) == (3, 1, 10)


def side_of(*figures):
    return Side(name="side", unit="µs", figures=list(figures))


@pytest.mark.parametrize(
    ("sign", "figure", "met"),
    [("≤", 2.0, True), ("≤", 2.1, False), ("≥", 2.0, True), ("≥", 1.9, False), ("<", 2.0, False), ("<", 1.9, True)],
)
def test_a_goal_is_met_by_the_median(sign, figure, met):
    assert Row(name="r", goal=Goal(sign, 2.0), over=side_of(0, figure, 1000)).met() is met


def test_a_fault_leaves_a_goal_unmet_whatever_the_figures_say():
    assert Row(name="r", goal=Goal("<", 60), over=side_of(1), fault="it loads asyncio").met() is False
    assert Row(name="r", goal=Goal("<", 60), problem="no compiler").met() is None


def test_a_control_that_is_slower_than_what_contains_it_judges_nobody():
    row = Row(name="r", goal=Goal("≤", 2), over=side_of(11, 11), under=side_of(40, 35), floor=True)
    assert row.disturbed()
    assert row.met() is None
    assert "not judged" in report.verdict(row)
    row.under = side_of(5, 5)
    assert row.met() is False


def test_a_verdict_says_when_rounds_lie_on_both_sides_of_the_goal():
    assert report.verdict(Row(name="r", goal=Goal("≥", 2), over=side_of(1, 3, 4))) == "met, within noise"
    assert report.verdict(Row(name="r", goal=Goal("≥", 2), over=side_of(2, 3, 4))) == "met"


# --- controls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_controls_compile_without_warnings(controls, name):
    assert Path(controls[name]).exists()  # a warning would have raised


def test_a_warning_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "sloppy.c").write_text("int main(void) { int unused; return 0; }\n")
    monkeypatch.setattr("benchmarks.harness.controls.SOURCES", tmp_path)
    with pytest.raises(Failed, match="warnings"):
        build("sloppy", tmp_path)


def test_the_line_server_says_what_our_toolhost_says(controls):
    lines = [LINE, LINE.replace("0-0", 'a\\\\\\"\\\\n\\u0001'), '{"aid":"AID.DEMO.ECHO.v1"}']
    asked = "".join(f"{line}\n" for line in lines)
    ours, theirs = (
        subprocess.run(command, input=asked, capture_output=True, text=True, check=True).stdout.splitlines()
        for command in (toolhost(), [controls["lines"]])
    )
    assert [json.loads(line) for line in theirs] == [json.loads(line) for line in ours]
    assert theirs[0] == ours[0]


def test_the_fixed_answer_is_the_echo_of_the_usual_call_and_fences_are_refused_by_name(controls):
    asked = f'{LINE}\n{{"aid":"_fence.17"}}\n'
    said = subprocess.run(
        [controls["fixed"], "--serve"], input=asked, capture_output=True, text=True, check=True
    ).stdout
    answer, refusal = said.splitlines()
    assert (
        answer + "\n"
        == subprocess.run(toolhost(), input=LINE + "\n", capture_output=True, text=True, check=True).stdout
    )
    assert json.loads(refusal) == {"ok": False, "error": "tool not found: _fence.17"}
    listed = subprocess.run([controls["fixed"], "--list"], capture_output=True, check=True, env={"FIXED_TOOLS": "3"})
    assert [tool["aid"] for tool in json.loads(listed.stdout)["tools"]] == [f"AID.FIXED.T{n}.v1" for n in range(3)]


def test_the_relay_carries_every_reply_to_its_caller(controls):
    with Crew(controls) as crew:
        path = crew.relay(*toolhost())
        assert controls.load(path, 4_000, 64, 8).calls == 4_000
        assert controls.load(path, 64, 64, 1, payload=100_000).calls == 64  # more than the pipes hold


def test_the_caller_in_c_checks_what_it_gets(controls):
    assert controls.load("-", 1_000, 64, how="same", command=toolhost()).calls == 1_000
    assert controls.load("-", "0.02s", 64, command=toolhost()).calls > 0
    with pytest.raises(Failed, match="expected"):  # the fixed answer is right for one input only
        controls.load("-", 100, 8, command=(controls["fixed"], "--serve"))
    with pytest.raises(Failed, match="10 calls failed"):
        controls.load("-", 10, 1, aid="AID.NONE.v1", command=toolhost())


def test_the_round_trip_checks_what_it_gets(controls):
    assert controls.roundtrip(100, LINE, *toolhost()) > 0
    with pytest.raises(Failed, match="not a success"):
        controls.roundtrip(100, '{"aid":"AID.NONE.v1"}', *toolhost())


def test_the_http_caller_in_c_checks_what_it_gets(controls):
    with Crew(controls) as crew:
        (_, broker), uvicorn = crew.web(WEB), crew.uvicorn()
        for port, tool in ((broker, ECHO), (broker, "echo_json"), (uvicorn, ECHO)):
            assert controls.http(port, 1_000, 32, tool).calls == 1_000
            timed = controls.http(port, "0.1s", 32, tool)
            assert timed.calls == pytest.approx(timed.per_second * 0.1, rel=0.3)
            assert 0 < timed.p50_us <= timed.p99_us < 0.2e6
        with pytest.raises(Failed, match="10 calls failed"):
            controls.http(broker, 10, 1, "AID.NONE.v1")
        command = [controls["http"], str(uvicorn), "/", "10", "4", '{"a":1}', '"a":2']
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (said.returncode, json.loads(said.stdout)["wrong"]) == (1, 10)
        assert 'expected "a":2, got: {"a":1}' in said.stderr


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nhello", "does not give its length"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhello", "more came than the answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhello", "closed after 0 answers"),
        (b"", "closed after 0 answers"),
    ],
)
def test_the_http_caller_in_c_counts_nothing_that_is_no_whole_answer(controls, answer, words):
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve():
            with listener.accept()[0] as one:
                one.recv(65536)
                one.sendall(answer)

        served = pool.submit(serve)
        with pytest.raises(Failed, match=words):
            controls.http(listener.getsockname()[1], 1, 1)
        served.result()


# --- failures ---------------------------------------------------------------------------------------------------------

FAILING = """
import contextlib
from benchmarks.peers.peer import Peer

@contextlib.contextmanager
def opened():
    {begin}
    yield lambda inputs: {answer}

PEER = Peer(name={name!r}, how="for a test", threads=opened, needs={needs!r})
"""


def test_a_peer_that_fails_does_not_cost_the_others_theirs(bench, tmp_path, monkeypatch):
    peers = {
        "broken_start": ("raise RuntimeError('it has no wings')", "inputs", ()),
        "wrong_answer": ("pass", "{'n': -1}", ()),
        "nowhere": ("pass", "inputs", ("no-such-distribution",)),
        "good": ("pass", "inputs", ()),
    }
    for name, (begin, answer, needs) in peers.items():
        text = FAILING.format(begin=begin, answer=answer, name=name, needs=needs)
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    side_by_side(bench, list(peers))
    found = {peer.name: peer for peer in load(tmp_path / "results.json").peers}
    assert "it has no wings" in found["broken_start"].problem
    assert "was answered" in found["wrong_answer"].problem
    assert "make bench-peers" in found["nowhere"].problem
    assert found["good"].problem == ""
    assert found["good"].p50[0] > 0
    assert found["good"].rate[0] > 0


def test_a_ratio_that_cannot_be_measured_says_why_in_a_row_of_its_own(bench):
    def measure(_):
        raise Failed("the moon is in the way")

    row = Ratio("r", Goal("≥", 1), measure).run(bench)
    assert (row.problem, row.met()) == ("the moon is in the way", None)


def test_ctrl_c_keeps_what_was_measured_and_leaves_nobody_behind(tmp_path):
    stored = tmp_path / "results.json"
    command = [sys.executable, "-c", COMMAND, "--quick", "--only", "ratios", "--results", str(stored)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None
    assert RATIOS[0].name in process.stderr.readline()
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    kept = load(stored)
    assert kept.partial == "interrupted"
    assert kept.rows[0].figures()
    assert RATIOS[0].name in said


# --- report -----------------------------------------------------------------------------------------------------------


def test_the_report_is_made_of_stored_results(tmp_path):
    curves = [Curve(name="broker", figures=[[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])]
    results(
        rows=[
            Row(name="a ÷ b", goal=Goal("≥", 2), over=side_of(10, 30), under=side_of(10, 10)),
            Row(name="c ÷ d", goal=Goal("≤", 2), over=side_of(50), under=side_of(10)),
            Row(name="e ÷ f", goal=Goal("≤", 2), problem="no compiler"),
        ],
        peers=[
            Peer(name="somebody", how="as it comes", p50=[100.0], rate=[10_000.0], versions={"some": "1.2"}),
            Peer(name="nobody", how="as it comes", problem="it is not here"),
        ],
        growth=[
            Growth(name="size", title="Size", points=["1", "2"], axis="bytes", curves=curves),
            Growth(name="none", title="None", problem="no time"),
        ],
        partial="interrupted",
    ).save(tmp_path / "results.json")
    report.write(load(tmp_path / "results.json"), tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    for expected in (
        "Of 3 goals, 1 are met by the median, 1 of these within noise.",
        "**Not met:** c ÷ d.",
        "**Not judged or not measured:** e ÷ f.",
        "| a ÷ b | 2.00 | 1.00 to 3.00 | ≥ 2 | met, within noise | side 20.0 µs (10.0 µs to 30.0 µs) ÷ side 10.0 µs",
        "| c ÷ d | 5.00 | 5.00 to 5.00 | ≤ 2 | **not met** |",
        "| e ÷ f | - | - | ≤ 2 | not measured | - |",
        "no compiler",
        "| somebody | 100 µs |",
        "**nobody**: as it comes. *it is not here.*",
        "some 1.2",
        "| 2 | 20/s (10/s to 30/s) |",
        "(benchmarks/size.svg)",
        "Not measured: no time.",
        "**Quick and noisy:**",
        "**Partial:** interrupted",
    ):
        assert expected in text
    drawing = ET.parse(tmp_path / "benchmarks" / "size.svg").getroot()
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert "broker" in "".join(drawing.itertext())
    assert not (tmp_path / "benchmarks" / "none.svg").exists()
