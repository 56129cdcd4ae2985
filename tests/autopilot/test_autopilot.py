"""Selections, menus, budgets, selectors that are programs, and runs that are gone through again."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from broker import Client, Embedded
from broker.autopilot import ExternalSelector, Kind, Menu, RunHeader, RunLog, Runner, Selection, parse, replay
from broker.autopilot.runner import SelectorFailed
from broker.policy.breaker import Settings
from tests.support.config import toolhost

ECHO, STATE, COUNTER, FAIL = "AID.DEMO.ECHO.v1", "AID.DEMO.STATE.v1", "AID.DEMO.COUNTER.v1", "AID.DEMO.FAIL.v1"
EXAMPLE = Path(__file__).parents[2] / "examples" / "autopilot.py"


@pytest.mark.parametrize(
    ("raw", "kind", "sid", "patch"),
    [
        ("<PICK><SID0007><END>", "PICK", "SID0007", {}),
        ('<PICK><SID0007><INP>{"a":1}</INP><END>', "PICK", "SID0007", {"a": 1}),
        ('  <PICK><SID0007><INP>\n{"a": "</INP><END>"}\n</INP><END>\n', "PICK", "SID0007", {"a": "</INP><END>"}),
        (f"<PICK><SID0007><INP64>{base64.b64encode(b'{}').decode()}</INP64><END>", "PICK", "SID0007", {}),
        ("<PICK><SID0007><INP64>eyJh\nIjoxfQ==</INP64><END>", "PICK", "SID0007", {"a": 1}),
        ("<ASK_SUP><END>", "ASK_SUP", None, {}),
        ("<NOOP><END>\n", "NOOP", None, {}),
        ("", "INVALID", None, {}),
        ("<PICK><END>", "INVALID", None, {}),
        ("<PICK><SID007><END>", "INVALID", None, {}),
        ("<PICK><SID00071><END>", "INVALID", None, {}),
        ("<PICK><SID\u0660\u0660\u0660\u0667><END>", "INVALID", None, {}),
        ("<PICK><sid0007><END>", "INVALID", None, {}),
        ("<PICK><SID0007>", "INVALID", None, {}),
        ("<PICK><SID0007><END><NOOP><END>", "INVALID", None, {}),
        ("I pick <PICK><SID0007><END>", "INVALID", None, {}),
        ("<PICK><SID0007><INP>[1]</INP><END>", "INVALID", None, {}),
        ("<PICK><SID0007><INP>{</INP><END>", "INVALID", None, {}),
        ("<PICK><SID0007><INP></INP><END>", "INVALID", None, {}),
        ("<PICK><SID0007><INP64>***</INP64><END>", "INVALID", None, {}),
        ("<PICK><SID0007><INP64>WzFd</INP64><END>", "INVALID", None, {}),
        ("<PICK><SID0007><INP64>/w==</INP64><END>", "INVALID", None, {}),
        ("<PICK><SID0007><INP>" + "[" * 100_000 + "</INP><END>", "INVALID", None, {}),
        ("x" * 2_000_000, "INVALID", None, {}),
    ],
)
def test_selections(raw, kind, sid, patch):
    selection = parse(raw)
    assert (selection.kind.value, selection.sid, selection.patch()) == (kind, sid, patch)
    assert selection.raw == raw


def test_a_header_is_filled_in():
    header = RunHeader()
    assert (header.spec_version, header.profile_id, header.request_id) == ("1.4.2", "A", None)
    assert header.run_id != RunHeader().run_id


def test_a_menu_knows_both_ways():
    menu = Menu([{"aid": f"AID.T{n}.v1", "tags": ("x",)} for n in (3, 1, 2)])
    assert [menu[sid]["aid"] for sid in menu] == ["AID.T1.v1", "AID.T2.v1", "AID.T3.v1"]
    assert all(menu[menu.sid(menu[sid]["aid"])] == menu[sid] for sid in menu)
    assert menu.rows()[0] == {"sid": "SID0001", "aid": "AID.T1.v1", "name": "", "tags": ["x"]}
    with pytest.raises(ValueError, match="9999"):
        Menu([{"aid": str(n)} for n in range(10_000)])


@pytest.fixture(scope="module")
def tools(where):
    with Embedded(plugins=[where["demo_plugin"]]) as embedded:
        yield embedded


def picks(menu, *choices):
    """A selector that says these, one after the other: (tool, patch), or a text."""
    said = iter(choices)

    def choose(situation):  # noqa: ARG001
        choice = next(said, "<NOOP><END>")
        if isinstance(choice, str):
            return choice
        aid, patch = choice
        return f"<PICK><{menu.sid(aid)}><INP>{json.dumps(patch)}</INP><END>"

    return choose


def run(tools, *choices, inputs=None, **more):
    menu = Menu(tools.tools())
    return Runner(tools, picks(menu, *choices), menu=menu, **more).run(inputs or {})


def test_patches_are_merged_key_by_key_and_one_level_deep(tools):
    outcome = run(tools, (ECHO, {"b": {"y": 2}}), (ECHO, {"c": 3}), inputs={"a": 1, "b": {"x": 1}})
    assert outcome.reason == "noop"
    assert [json.loads(step.output_json) for step in outcome.steps] == [
        {"a": 1, "b": {"y": 2}},
        {"a": 1, "b": {"y": 2}, "c": 3},
    ]
    assert outcome.inputs == {"a": 1, "b": {"y": 2}, "c": 3}


def test_state_goes_from_step_to_step(tools):
    get = {"op": "get", "slot": 5}
    outcome = run(
        tools, (STATE, {"op": "put", "slot": 5, "value": "kept"}), (STATE, get), (STATE, {"op": "del"}), (STATE, get)
    )
    found = [json.loads(step.output_json).get("found") for step in outcome.steps]
    assert found[1] is True
    assert found[3] is False
    assert outcome.slots == {}


def test_a_run_is_within_its_budget(tools):
    endless = run(tools, *[(ECHO, {})] * 100)
    assert (endless.reason, len(endless.steps)) == ("out_of_steps", 64)
    invalid = run(tools, *["nonsense"] * 100)
    assert (invalid.reason, len(invalid.steps)) == ("invalid_picks", 8)
    mixed = run(tools, *["nonsense", (ECHO, {})] * 100)
    assert (mixed.reason, len(mixed.steps)) == ("invalid_picks", 15)
    assert run(tools, "<PICK><SID9999><END>").steps[0].invalid
    assert run(tools, "<ASK_SUP><END>").reason == "ask_sup"


def test_a_tool_that_fails_is_a_step_and_the_selector_is_told(tools):
    told = []
    menu = Menu(tools.tools())

    def choose(situation):
        told.append(situation.last)
        return f"<PICK><{menu.sid(FAIL)}><END>" if situation.step == 1 else "<NOOP><END>"

    outcome = Runner(tools, choose, menu=menu).run({"error": "oh no"})
    assert (outcome.steps[0].code, outcome.steps[0].error) == ("tool_error", "oh no")
    assert told[1].error == "oh no"


def test_a_selection_object_will_do(tools):
    menu = Menu(tools.tools())
    choices = iter([Selection(Kind.PICK, menu.sid(ECHO), '{"n":1}'), Selection(Kind.NOOP)])
    assert Runner(tools, lambda _: next(choices), menu=menu).run({}).steps[0].output_json == '{"n":1}'


# --- selectors that are programs --------------------------------------------------------------------------------------


def program(folder, body):
    path = folder / "selector"
    path.write_text(f"#!/usr/bin/env python3\nimport json, os, sys, time\nsituation = json.load(sys.stdin)\n{body}\n")
    path.chmod(0o755)
    return [str(path)]


def test_a_program_selects(tools, tmp_path):
    body = """sids = {row["aid"]: row["sid"] for row in situation["menu"]}
print("<NOOP><END>" if situation["last"] else f"<PICK><{sids['AID.DEMO.ECHO.v1']}><INP>{{\\"n\\":1}}</INP><END>")"""
    outcome = Runner(tools, ExternalSelector(program(tmp_path, body))).run({})
    assert (outcome.reason, outcome.steps[0].output_json) == ("noop", '{"n":1}')


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("time.sleep(60)", "within 0.5 s"),
        ("os._exit(3)", "exited with code 3"),
        ("sys.exit('no idea')", "no idea"),
        ("print('x' * 3_000_000)", "more than"),
        ("os.fork() or time.sleep(60); time.sleep(60)", "within 0.5 s"),
    ],
)
def test_a_program_that_does_not_choose_is_invalid_and_then_left_alone(tools, tmp_path, body, words):
    begin = time.monotonic()
    outcome = Runner(tools, ExternalSelector(program(tmp_path, body), timeout=0.5)).run({})
    assert outcome.reason == "selector_failed"
    assert words in outcome.detail
    assert len(outcome.steps) == 3
    assert time.monotonic() - begin < 5


def test_a_program_that_is_missing_is_said_so(tools, tmp_path):
    outcome = Runner(tools, ExternalSelector([str(tmp_path / "none")])).run({})
    assert "is it built, and executable?" in outcome.detail


def test_a_program_that_is_well_again_is_asked_again(tmp_path, tools):
    sick = tmp_path / "sick"
    sick.touch()
    command = program(tmp_path, f"os.path.exists({str(sick)!r}) and sys.exit(1)\nprint('<NOOP><END>')")
    selector = ExternalSelector(command, breaker=Settings(in_a_row=1, open_seconds=0.3))
    assert Runner(tools, selector).run({}).reason == "selector_failed"
    with pytest.raises(SelectorFailed, match="too often"):
        selector(None)
    sick.unlink()
    time.sleep(0.4)
    assert Runner(tools, selector).run({}).reason == "noop"


# --- logs and replays -------------------------------------------------------------------------------------------------


def logged(tools, path, *choices):
    log = RunLog(path)
    run(tools, *choices, log=log, inputs={"a": 1})
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_has_every_step_and_can_be_replayed(tools, tmp_path):
    path = tmp_path / "run.jsonl"
    put = (STATE, {"op": "put", "slot": 5, "value": "kept"})
    lines = logged(tools, path, (ECHO, {"n": 1}), (COUNTER, {}), put, "nonsense", (FAIL, {"error": "x"}))
    assert [line["event"] for line in lines] == ["run", "step", "step", "step", "step", "step", "end"]
    assert lines[0]["header"]["spec_version"] == "1.4.2"
    count = json.loads(lines[2]["output_json"])["count"]
    again = replay(path, tools)
    assert again.same
    assert (again.run, again.taken) == (3, 1)
    assert "5" in again.slots
    assert json.loads(tools.call(COUNTER).output_json)["count"] == count + 1, "what is not deterministic was not run"


def test_a_replay_finds_what_is_different(tools, tmp_path):
    path = tmp_path / "run.jsonl"
    logged(tools, path, (ECHO, {"n": 1}))
    path.write_text(
        path.read_text().replace('{\\"n\\":1', '{\\"n\\":2').replace('{\\"a\\":1,\\"n\\":1', '{\\"a\\":1,\\"n\\":2')
    )
    again = replay(path, tools)
    assert not again.same
    assert again.differences[0].aid == ECHO


def test_a_log_that_was_cut_is_replayed_as_far_as_it_goes(tools, tmp_path):
    path = tmp_path / "run.jsonl"
    logged(tools, path, (ECHO, {"n": 1}), (ECHO, {"n": 2}))
    text = path.read_text()
    path.write_text(text[: text.rindex('{"event":"step"') + 30])
    again = replay(path, tools)
    assert (again.run, again.complete, again.differences) == (1, False, [])
    path.write_text("")
    with pytest.raises(ValueError, match="no run in it"):
        replay(path, tools)


@pytest.mark.parametrize("way", ["embedded", "daemon"])
@pytest.mark.parametrize("flags", [[], ["--external"]])
def test_the_example_does_its_task(start, where, tmp_path, way, flags):
    work = tmp_path / "work"
    work.mkdir()
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "MACHINA_WORK_DIR": str(work)}
    if way == "daemon":
        broker = start(config=toolhost("d", where["demo_plugin"]), env={"MACHINA_WORK_DIR": str(work)})
        environment["MACHINA_BROKER_SOCKET"] = broker.path
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be")
    command = [sys.executable, str(EXAMPLE), *flags, str(text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "report.txt").read_text() == "6 words, most of all be (2), to (2), not (1)\n"
    assert "2 run again, 1 taken from the log, same: True" in done.stdout
    assert len((work / "run.jsonl").read_text().splitlines()) == 5


def test_a_client_will_do_as_well(shared):
    with Client(shared.path) as tools:
        assert run(tools, (ECHO, {"n": 1})).steps[0].output_json == '{"n":1}'
