"""Event tools behind a real broker: input, verdicts, streams, state, assets, death and floods."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.event_tools import output

STREAMS = json.loads((Path(__file__).parent.parent / "vectors" / "narratoria_streams.json").read_text())
DONE = 'say("done", ok=True)'


def wait_for(check, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_recorded_streams_from_real_processes(start, tools):
    """All of them, and what each leaves in its session."""
    config = ""
    for vector in STREAMS:
        lines = "".join(one + "\n" for one in vector["stdout_lines"])
        config += tools.tool(
            vector["id"], f"sys.stderr.write('noise')\nos.write(1, {lines.encode()!r})\nsys.exit({vector['exit_code']})"
        )
        config += tools.tool(vector["id"] + "_before", f"say('state_patch', patch={vector['initial_state']!r})\n{DONE}")
    broker = start(config=config)
    with broker.wire() as wire:
        for vector in STREAMS:
            wire.ask({"aid": vector["id"] + "_before", "session": vector["id"]})
            reply = wire.ask({"aid": vector["id"], "session": vector["id"]})
            expected = vector["expect"]
            assert output(reply)["verdict"] == expected["verdict"], vector["id"]
            assert output(reply)["state"] == expected["final_state"]
            assert reply["ok"] is (expected["verdict"] == "success")
            assert wire.ask({"aid": "_state", "session": vector["id"]})["state"] == expected["final_state"]
            assert [json.loads(one) for one in vector["stdout_lines"]] == output(reply)["events"]


def test_what_a_tool_reads(start, tools):
    told = f"say('log', level='info', message=given.decode()); {DONE}"
    config = tools.tool("wrapped", told, operation="light", env={"X": "1"}) + tools.tool("flat", told, input="flat")
    broker = start(config=config)
    with broker.wire() as wire:

        def read(**request):
            return json.loads(output(wire.ask(request))["events"][0]["message"])

        given = {"b": [1.0, "\u00e4"]}
        assert read(aid="wrapped", inputs=given, request_id="r1") == {
            "requestId": "r1",
            "tool": "wrapped",
            "operation": "light",
            "input": given,
        }
        assert read(aid="wrapped", input_json="[1]")["input"] == [1]
        assert len(read(aid="wrapped")["requestId"]) == 36
        assert read(aid="flat", inputs=given, request_id="r2") == given | {"requestId": "r2"}
        refused = wire.ask({"aid": "flat", "input_json": "[1]"})
        assert (refused["type"], "must be an object" in refused["error"]) == ("bad_request", True)
        refused = wire.ask({"aid": "wrapped", "input_json": "{"})
        assert (refused["type"], "not JSON" in refused["error"]) == ("bad_request", True)


def test_a_stream_comes_as_it_happens_between_other_replies(start, tools):
    hold = tools.folder / "go"
    body = f"""
say("log", level="info", message="one")
while not os.path.exists({str(hold)!r}): time.sleep(0.005)
say("state_patch", patch={{"a": 1}})
say("ui_event", event="odd")
{DONE}"""
    broker = start("--plugin", _demo(), config=tools.tool("slow", body))
    with broker.wire() as wire:
        wire.send({"id": [1], "aid": "slow", "stream": True}, {"aid": "AID.DEMO.ECHO.v1", "input_json": '"x"'})
        first, second = sorted(wire.replies(2), key=lambda reply: "ok" in reply)
        assert first == {"id": [1], "event": {"version": "0", "type": "log", "level": "info", "message": "one"}}
        assert second["output_json"] == '"x"'
        assert wire.quiet()
        assert wire.ask({"aid": "_state"})["state"] == {}
        hold.touch()
        lines = wire.replies(4)
        assert [one["event"]["type"] for one in lines[:3]] == ["state_patch", "ui_event", "done"]
        assert lines[1]["placeholder"]["event"] == "odd"
        assert (lines[3]["id"], lines[3]["ok"]) == ([1], True)
        assert len(output(lines[3])["events"]) == 4
        assert wire.ask({"aid": "_state"})["state"] == {"a": 1}
        refused = wire.ask({"aid": "slow", "stream": True})
        assert (refused["type"], '"id"' in refused["error"]) == ("bad_request", True)


def _demo():
    from broker import where

    return where.demo_plugin()


def test_a_session_belongs_to_its_principal_or_connection(start, tools):
    patch = "say('state_patch', patch=json.loads(given)['input']); " + DONE
    broker = start(config=tools.tool("patch", patch))
    with broker.wire() as wire, broker.wire() as other:
        wire.ask({"aid": "patch", "inputs": {"mine": {"a": 1}}})
        wire.ask({"aid": "patch", "inputs": {"mine": {"b": 2}}})
        assert output(wire.ask({"aid": "patch"}))["state"] == {"mine": {"a": 1, "b": 2}}
        assert other.ask({"aid": "_state"})["state"] == {}
        wire.ask({"aid": "patch", "inputs": {"x": 1}, "session": "s"})
        assert other.ask({"aid": "_state", "session": "s"})["state"] == {"x": 1}
        assert other.ask({"aid": "_state.clear", "session": "s"})["cleared"] is True
        assert wire.ask({"aid": "_state", "session": "s"})["state"] == {}
        assert wire.ask({"aid": "_state", "session": 5})["type"] == "bad_request"
    with broker.wire() as wire:
        assert wire.ask({"aid": "_state"})["state"] == {}


def test_tools_that_patch_one_session_at_once_lose_nothing(start, tools):
    patch = "for n in range(50): say('state_patch', patch={f'{json.loads(given)[\"input\"][\"of\"]}': {f'{n}': n}})\n"
    broker = start(config=tools.tool("patch", patch + DONE))
    with broker.wire() as wire:
        wire.send(*({"id": n, "aid": "patch", "inputs": {"of": n}, "session": "s"} for n in range(8)))
        assert all(reply["ok"] for reply in wire.replies(8))
        assert wire.ask({"aid": "_state", "session": "s"})["state"] == {
            f"{of}": {f"{n}": n for n in range(50)} for of in range(8)
        }


def test_a_session_is_not_forgotten_while_a_tool_patches_it(start, tools):
    hold = tools.folder / "go"
    body = f"say('state_patch', patch={{'a': 1}})\nwhile not os.path.exists({str(hold)!r}): time.sleep(0.005)\n"
    body += f"say('state_patch', patch={{'b': 2}}); {DONE}"
    quick = f"say('state_patch', patch={{'c': 3}}); {DONE}"
    limits = "[limits]\nsessions = 2\nsession_idle_seconds = 0.05\n"
    broker = start(config=limits + tools.tool("slow", body) + tools.tool("quick", quick))
    with broker.wire() as wire:
        wire.send({"id": 1, "aid": "slow", "session": "kept", "stream": True})
        wire.raw()
        for number in range(5):
            wire.ask({"id": 2, "aid": "quick", "session": f"other {number}"})
        time.sleep(0.3)
        hold.touch()
        assert output(wire.replies(3)[-1])["state"] == {"a": 1, "b": 2}


def test_a_state_over_the_bound_ends_the_call_and_keeps_what_was(start, tools):
    body = f"say('state_patch', patch={{'a': 1}}); say('state_patch', patch={{'b': 'x' * 2000}}); {DONE}"
    broker = start(config="[limits]\nstate_bytes = 1000\n" + tools.tool("grow", body))
    with broker.wire() as wire:
        reply = wire.ask({"aid": "grow", "session": "s"})
        assert (reply["type"], "limits.state_bytes" in reply["error"]) == ("bad_reply", True)
        assert output(reply)["state"] == {"a": 1}
        assert wire.ask({"aid": "_state", "session": "s"})["state"] == {"a": 1}


def test_state_is_there_after_a_restart_where_it_has_a_file(start, tools):
    file = tools.folder / "kept" / "state.ndjson"
    config = f'[server]\nstate_file = "{file}"\n'
    config += tools.tool("patch", "say('state_patch', patch=json.loads(given)['input']); " + DONE)
    first = start(config=config)
    with first.wire() as wire:
        wire.ask({"aid": "patch", "inputs": {"torch": {"lit": True}, "n": 1.0}, "session": "s"})
        wire.ask({"aid": "patch", "inputs": {"of": "nobody"}})
    wait_for(lambda: b"torch" in file.read_bytes())
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    second = start(config=config)
    with second.wire() as wire:
        assert wire.ask({"aid": "_state", "session": "s"})["state"] == {"torch": {"lit": True}, "n": 1.0}
        wire.ask({"aid": "patch", "inputs": {"torch": None}, "session": "s"})
    assert second.stop() == 0
    assert b"nobody" not in file.read_bytes()
    with start(config=config).wire() as wire:
        assert wire.ask({"aid": "_state", "session": "s"})["state"] == {"n": 1.0}


def test_assets_are_looked_at_before_they_are_registered(start, tools, tmp_path):
    inside = tmp_path / "media"
    inside.mkdir()
    (inside / "a.png").write_bytes(b"PNG")
    (tmp_path / "out.png").write_bytes(b"secret")
    (inside / "link.png").symlink_to(tmp_path / "out.png")
    os.mkfifo(inside / "pipe")
    paths = {
        "good": str(inside / "a.png"),
        "relative": "media/a.png",
        "missing": str(inside / "none"),
        "folder": str(inside),
        "pipe": str(inside / "pipe"),
        "outside": str(tmp_path / "out.png"),
        "link": str(inside / "link.png"),
        "nul": "a\0b",
    }
    tell = [
        f"say('asset', assetId={name!r}, kind='image', mediaType='image/png', path={path!r})"
        for name, path in paths.items()
    ]
    broker = start(config=tools.tool("paint", "\n".join([*tell, DONE]), assets=[str(inside)]))
    with broker.wire() as wire:
        reply = wire.ask({"aid": "paint"})
        found = {one["assetId"]: one for one in output(reply)["assets"]}
        assert [name for name, one in found.items() if one["registered"]] == ["good", "relative"]
        assert "No such file" in found["missing"]["reason"]
        assert "not a regular file" in found["pipe"]["reason"]
        assert "not a regular file" in found["folder"]["reason"]
        for name in ("outside", "link"):
            assert "not below one of the allowed roots" in found[name]["reason"]
        assert "NUL" in found["nul"]["reason"]
        listed = wire.ask({"aid": "_assets"})["assets"]
        assert [one["assetId"] for one in listed] == ["good", "relative"]
        assert listed[0]["bytes"] == 3


FAILURES = {
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "crash", "Process was killed by SIGSEGV"),
    "exit": ("sys.stderr.write('why'); sys.exit(3)", "crash", "Process exited with code 3; it said: why"),
    "silent": ("", "bad_reply", "Missing done event (protocol violation)"),
    "junk": ("print('junk')", "bad_reply", "a line is not JSON: junk"),
    "lingers": (DONE + "; time.sleep(60)", "bad_reply", "did not exit within 2 s after done"),
    "grandchild": ("os.fork() or time.sleep(60); sys.exit(4)", "crash", "Process exited with code 4"),
    "hangs": ("say('state_patch', patch={'a': 1}); time.sleep(60)", "timeout", "was not done within 1.5 s"),
    "long": ("os.write(1, b'x' * 2000000); time.sleep(60)", "bad_reply", "limits.reply_bytes"),
}


def test_whatever_goes_wrong_has_its_reason_and_leaves_nothing_behind(start, tools):
    config = "".join(
        tools.tool(name, body, timeout_seconds=1.5 if name == "hangs" else 20.0)
        for name, (body, _, _) in FAILURES.items()
    )
    config += tools.entry("absent", [str(tools.folder / "nowhere")])
    config += tools.entry("lost", ["/bin/true"], cwd=str(tools.folder / "nowhere"))
    broker = start(config=config)
    with broker.wire() as wire:
        wire.send(*({"id": name, "aid": name} for name in FAILURES))
        replies = {reply["id"]: reply for reply in wire.replies(len(FAILURES))}
        for name, (_, kind, words) in FAILURES.items():
            assert replies[name]["type"] == kind, replies[name]
            assert words in replies[name]["error"]
            assert output(replies[name])["verdict"] == "protocol_failure"
            assert words.partition(";")[0] in output(replies[name])["reason"]
        assert output(replies["hangs"])["state"] == {"a": 1}
        assert output(replies["exit"])["stderr"] == "why"
        absent = wire.ask({"aid": "absent"})
        assert (absent["type"], str(tools.folder / "nowhere") in absent["error"]) == ("not_found", True)
        assert "its cwd" in wire.ask({"aid": "lost"})["error"]
        tool = next(one for one in broker.status()["tools"] if one["aid"] == "crash")
        assert (tool["calls"], tool["failed"]) == (1, 1)
    wait_for(lambda: not _scripts(broker, tools))


def _scripts(broker, tools):
    """Processes of tools that are still there; one that waits to be reaped is not."""
    found = []
    for one in psutil.Process(broker.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
            found += [one] if str(tools.folder) in " ".join(one.cmdline()) else []
    return found


def test_what_a_tool_does_wrong_counts_for_its_breaker_and_a_failure_of_its_own_does_not(start, tools):
    config = tools.tool("dies", "sys.exit(1)") + tools.tool("fails", "say('done', ok=False, summary='no')")
    broker = start(config="[breaker]\nin_a_row = 3\n" + config)
    with broker.wire() as wire:
        for _ in range(4):
            failed = wire.ask({"aid": "fails"})
            assert (failed["status"], failed["error"], output(failed)["verdict"]) == ("TOOL_ERROR", "no", "failed")
            last = wire.ask({"aid": "dies"})
        assert last["status"] == "BREAKER_TRIP"


def test_a_key_repeats_the_whole_reply_and_runs_nothing(start, tools):
    body = f"open({str(tools.folder / 'ran')!r}, 'a').write('x'); say('state_patch', patch={{'n': 1}}); "
    broker = start(config=tools.tool("once", body + DONE) + tools.tool("dies", body + "sys.exit(2)"))
    with broker.wire() as wire:
        wire.send(*({"id": n, "aid": "once", "stream": n == 1, "idempotency_key": "k"} for n in (1, 2)))
        lines = wire.replies(4)
        finals = {one["id"]: one for one in lines if "ok" in one}
        assert [one["id"] for one in lines if "event" in one] == [1, 1]
        assert (finals[2]["idempotent_hit"], output(finals[2])) == (True, output(finals[1]))
        dead = [wire.ask({"aid": "dies", "idempotency_key": "k"}) for _ in range(2)]
        assert dead[1]["idempotent_hit"] is True
        assert output(dead[1]) == output(dead[0])
    assert (tools.folder / "ran").read_text() == "xx"


def test_who_does_not_read_makes_the_tool_wait_and_nobody_else(start, tools):
    body = f"""
for n in range(1500):
    say("log", level="info", message="x" * 10000)
    open({str(tools.folder / "said")!r}, "w").write(str(n))
{DONE}"""
    broker = start("--plugin", _demo(), config=tools.tool("flood", body))
    with broker.wire(timeout=60) as wire, broker.wire() as other:
        wire.send({"id": 1, "aid": "flood", "stream": True})
        wire.raw()
        said = tools.folder / "said"

        def stands():
            before = said.read_text() if said.exists() else ""
            time.sleep(0.3)
            return before and before == said.read_text()

        wait_for(stands, 30)
        assert int(said.read_text()) < 1200
        assert other.ask({"aid": "AID.DEMO.ECHO.v1", "input_json": "1"})["output_json"] == "1"
        assert psutil.Process(broker.process.pid).memory_info().rss < 300 << 20
        count = 1
        while True:
            line = wire.raw()
            if b'"ok":' in line[:20]:
                break
            count += 1
        assert count == 1501
        final = json.loads(line)
        assert final["ok"] is True
        assert output(final)["cut"]["log"] > 1400


def test_a_caller_that_hangs_up_frees_a_tool_that_waits_for_it(start, tools):
    ended = tools.folder / "ended"
    body = f"for n in range(20000): say('log', level='info', message='x' * 1000)\nopen({str(ended)!r}, 'w')\n{DONE}"
    broker = start(config=tools.tool("flood", body))
    with broker.wire() as wire:
        wire.send({"id": 1, "aid": "flood", "stream": True})
        wire.raw()
    wait_for(ended.exists, 30)
    wait_for(lambda: not _scripts(broker, tools))


def test_a_broker_that_stops_leaves_no_tool_behind(start, tools):
    broker = start(
        config="[server]\ndrain_seconds = 0.2\n"
        + tools.tool("hangs", "say('log', level='info', message='here'); time.sleep(60)")
    )
    with broker.wire() as wire:
        wire.send({"id": 1, "aid": "hangs", "stream": True})
        wire.raw()
        assert broker.stop() == 0


def test_ten_calls_at_once_and_the_rest_in_turn(start, tools):
    broker = start(config=tools.tool("quick", DONE, max=2))
    with broker.wire() as wire:
        wire.send(*({"id": n, "aid": "quick"} for n in range(12)))
        assert all(reply["ok"] for reply in wire.replies(12))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('[[events]]\nname = "a"\ncommand = []\n', "command is a list, the program first"),
        ('[[events]]\nname = "_a"\ncommand = ["x"]\n', "is no name for a tool"),
        ('[[events]]\nname = "a"\ncommand = ["x"]\ninput = "odd"\n', "events no. 1, input"),
        ('[[events]]\nname = "a"\ncommand = ["x"]\nenv = { "A=B" = "c" }\n', "env 'A=B' is not a name"),
        ('[[events]]\nname = "a"\ncommand = ["x", "\\u0000"]\n', "has a NUL character"),
        ('[[events]]\nname = "a"\ncommand = ["x"]\ncolour = 1\n', "has no setting `colour`"),
        (
            '[[events]]\nname = "a"\ncommand = ["x"]\n[[oneshot]]\nname = "a"\ncommand = ["y"]\n',
            "two tools are called a",
        ),
    ],
)
def test_mistakes_in_the_configuration_are_named(tmp_path, entry, words):
    from tests.support.command import broker_command

    file = tmp_path / "broker.toml"
    file.write_text(entry)
    done = broker_command(tmp_path, "serve", "--config", str(file), "--socket", str(tmp_path / "s"))
    assert done.returncode != 0
    assert words in done.stderr
    assert str(file) in done.stderr
