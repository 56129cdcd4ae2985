"""Event tools over HTTP, from Python, and from the command line."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from broker import AsyncClient, CallFailed, Client
from broker.client.failures import Crash, ToolError
from broker.client.plan import PlanError, _read, read_plan
from tests.support.command import broker_command
from tests.support.http import Web

DONE = 'say("done", ok=True, summary="all well")'
LISTEN = {"accept": "text/event-stream"}
FLOOD = (
    b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\ncontent-length: 16\r\n\r\n"
    b'{"tool":"flood"}'
)


@pytest.fixture
def scene(start, tools, where):
    """A broker with HTTP and some tools."""
    asset = tools.folder / "a.png"
    asset.write_bytes(b"PNG" * 100_000)
    page = tools.folder / "page.html"
    page.write_text("<script>alert(1)</script>")
    config = tools.tool(
        "paint",
        f"say('asset', assetId='a', kind='image', mediaType='image/png', path={str(asset)!r})\n"
        f"say('asset', assetId='h', kind='page', mediaType='text/html', path={str(page)!r})\n"
        f"say('asset', assetId='x', kind='page', mediaType='a/b\\r\\nx: y', path={str(page)!r})\n{DONE}",
    )
    config += tools.tool("patch", f"say('state_patch', patch=json.loads(given)['input'])\n{DONE}")
    config += tools.tool(
        "fails", "say('log', level='warn', message='hm \\x1b[31m'); say('done', ok=False, summary='no')"
    )
    config += tools.tool("junk", "os.write(1, b'\\x1b[31mjunk\\n')")
    config += tools.tool("dies", "say('state_patch', patch={'a': 1}); sys.exit(3)")
    hold = tools.folder / "go"
    config += tools.tool(
        "slow",
        f"say('log', level='info', message='1')\nwhile not os.path.exists({str(hold)!r}): time.sleep(.01)\n{DONE}",
    )
    config += tools.tool("flood", f"for n in range(20000): say('log', level='info', message='x' * 1000)\n{DONE}")
    served = start("--http", "127.0.0.1:0", "--plugin", where["demo_plugin"], config=config)
    return served, Web(served.ready), hold


def parts(body: bytes):
    """The stream's events: (name, data)."""
    found = []
    for part in body.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.splitlines() if line)
        if "data" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def test_a_call_over_http_has_its_events_in_its_result(scene):
    _, web, _ = scene
    answer = web.execute("patch", {"a": 1}, headers={"broker-session": "s"})
    assert (answer.status, answer.json["status"]) == (200, "ok")
    assert answer.json["output"]["state"] == {"a": 1}
    assert [one["type"] for one in answer.json["output"]["events"]] == ["state_patch", "done"]
    assert web.execute("patch", {"b": 2}).json["output"]["state"] == {"b": 2}
    failed = web.execute("fails", {})
    assert (failed.status, failed.json["stderr"], failed.json["output"]["verdict"]) == (500, "no", "failed")
    died = web.execute("dies", {})
    assert (died.status, died.json["metrics"]["error_code"]) == (500, "crash")
    assert died.json["output"]["state"] == {"a": 1}
    service = web.ask("POST", "/tools", {"tool_name": "patch", "payload": {"c": 3}}).json
    assert (service["ok"], service["result"]["state"]) == (True, {"c": 3})
    assert "Process exited with code 3" in web.ask("POST", "/tools", {"tool_name": "dies"}).json["error"]["message"]


def test_a_stream_over_http_comes_as_it_happens(scene):
    _, web, hold = scene
    connection = http.client.HTTPConnection(web.host, web.port, timeout=20)
    connection.request("POST", "/v1/tools/execute", json.dumps({"tool": "slow"}), LISTEN)
    response = connection.getresponse()
    assert response.getheader("content-type") == "text/event-stream"
    first = response.readline() + response.readline() + response.readline()
    assert parts(first)[0][1]["event"]["message"] == "1"
    hold.touch()
    rest = parts(response.read())
    assert [name for name, _ in rest] == ["event", "result"]
    assert rest[-1][1]["output"]["verdict"] == "success"
    connection.close()


def test_what_cannot_begin_is_answered_as_ever(scene):
    _, web, _ = scene
    for body, status in (({"tool": "nowhere"}, 404), ("{", 400), ({"tool": " "}, 400)):
        answer = web.ask("POST", "/v1/tools/execute", body, LISTEN)
        assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
    found = parts(web.ask("POST", "/v1/tools/execute", {"tool": "dies"}, LISTEN).body)
    assert [name for name, _ in found] == ["event", "result"]
    assert found[-1][1]["status"] == "error"


def test_a_slow_reader_over_http_makes_the_tool_wait(scene):
    served, web, _ = scene
    with web.socket(60) as wire:
        wire.sendall(FLOOD)
        time.sleep(1.0)
        assert served.status()["processes"] >= 1
        assert web.get("/livez").status == 200
        received = b""
        while b"event: result" not in received[-2_000_000:]:
            part = wire.recv(1 << 20)
            assert part
            received += part
    assert received.count(b"event: event\n") == 20001


def test_who_leaves_a_stream_leaves_nothing_running_for_ever(scene):
    served, web, _ = scene
    with web.socket() as wire:
        wire.sendall(FLOOD)
        wire.recv(1000)
    calls = lambda: {tool["aid"]: tool["calls"] for tool in served.status()["tools"]}  # noqa: E731
    served.eventually(lambda: calls().get("flood") == 1, 30)


def test_the_state_of_a_session_over_http(scene):
    served, web, _ = scene
    web.execute("patch", {"a": {"b": 1}}, headers={"broker-session": "an evening/1"})
    place = "/v1/sessions/an%20evening%2F1/state"
    assert web.get(place).json == {"session": "an evening/1", "state": {"a": {"b": 1}}}
    with served.wire() as wire:  # another principal
        assert wire.ask({"aid": "_state", "session": "an evening/1"})["state"] == {}
    assert web.ask("DELETE", place).json["cleared"] is True
    assert web.get(place).json["state"] == {}
    assert web.get("/v1/sessions/x").status == 404
    assert web.get("/v1/sessions//state").status == 404


def test_assets_over_http(scene, tools):
    served, web, _ = scene
    web.execute("paint", {})
    listed = web.get("/v1/assets").json["assets"]
    assert [one["assetId"] for one in listed] == ["a", "h", "x"]
    picture, page, odd = (web.get(one["url"]) for one in listed)
    assert (picture.status, picture.headers["content-type"]) == (200, "image/png")
    assert picture.body == b"PNG" * 100_000
    assert picture.headers["content-disposition"] == 'inline; filename="a.png"'
    assert page.headers["content-disposition"].startswith("attachment")
    assert "sandbox" in page.headers["content-security-policy"]
    assert (odd.headers["content-type"], "x" in odd.headers) == ("application/octet-stream", False)
    with served.wire() as wire:
        assert wire.ask({"aid": "_assets"})["assets"] == []
    (tools.folder / "a.png").unlink()
    gone = web.get(listed[0]["url"])
    assert (gone.status, "is gone" in gone.json["error"]["message"]) == (404, True)
    assert web.get("/v1/assets/asset_999999").status == 404


def test_a_stream_in_python(scene):
    served, _, _ = scene

    async def main():
        async with AsyncClient(served.path) as client:
            stream = client.stream("patch", {"a": 1}, session="py")
            events = [event async for event in stream]
            assert [event.type for event in events] == ["state_patch", "done"]
            assert stream.reply.output["state"] == {"a": 1}
            assert (await client.call("patch", {"b": 2}, session="py")).output["state"] == {"a": 1, "b": 2}
            painted = [event.asset async for event in client.stream("paint") if event.type == "asset"]
            assert [one["registered"] for one in painted] == [True, True, True]
            failing = client.stream("fails")
            assert [(await anext(failing)).type, (await anext(failing)).type] == ["log", "done"]
            with pytest.raises(ToolError, match="no"):
                await anext(failing)
            with pytest.raises(Crash):
                async for _ in client.stream("dies"):
                    pass
            async with client.stream("flood") as flood:
                async for event in flood:
                    assert event.body["message"] == "x" * 1000
                    break
            with pytest.raises(CallFailed, match="not found"):
                async for _ in client.stream("nowhere"):
                    pass
        nobody = AsyncClient(served.path + ".none")
        with pytest.raises(CallFailed, match="no broker answers"):
            async for _ in nobody.stream("patch"):
                pass

    asyncio.run(main())


def test_an_event_that_was_not_waited_for_is_there_the_next_time(scene):
    served, _, hold = scene

    async def main():
        async with AsyncClient(served.path) as client:
            stream = client.stream("slow")
            assert stream.reply is None
            assert (await anext(stream)).type == "log"
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.05)
            hold.touch()
            assert [event.type async for event in stream] == ["done"]
            assert stream.reply.output["verdict"] == "success"
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    asyncio.run(main())


def test_a_stream_that_nobody_holds_any_more_hangs_up(scene):
    served, _, hold = scene

    def sockets():
        return sum(os.readlink(one).startswith("socket:") for one in list(fds()))

    def fds():
        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{name}"
            if os.path.islink(path):
                yield path

    async def leave(stream):
        async for event in stream:
            raise KeyError(event)

    async def main():
        async with AsyncClient(served.path) as client:
            before = sockets()
            async for _ in client.stream("slow"):
                break
            with pytest.raises(KeyError):
                await leave(client.stream("slow"))
            task = asyncio.create_task(anext(client.stream("flood")))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            client.stream("never asked for")
            del task
            gc.collect()
            await asyncio.sleep(0.05)
            assert sockets() == before
        hold.touch()

    asyncio.run(main())


def test_the_state_of_a_session_from_python(scene):
    served, _, _ = scene
    with Client(served.path) as client:
        client.call("patch", {"a": {"b": 1}}, session="mine")
        assert client.state("mine") == {"a": {"b": 1}}
        assert client.state("nobody's") == {}
        with pytest.raises(ValueError, match="by its name"):
            client.state("")

    async def main():
        async with AsyncClient(served.path) as client:
            assert await client.state("mine") == {"a": {"b": 1}}
            assert await client.clear_state("mine") is True
            assert await client.clear_state("mine") is False
            assert await client.state("mine") == {}

    asyncio.run(main())


def test_a_broker_that_dies_ends_a_stream_with_its_reason(scene):
    served, _, _ = scene

    async def main():
        async with AsyncClient(served.path) as client:
            stream = client.stream("slow")
            assert (await anext(stream)).body["message"] == "1"
            served.process.kill()
            with pytest.raises(CallFailed, match="may have run"):
                await anext(stream)

    asyncio.run(main())


PLAN = {
    "tools": [
        {"toolId": "one", "toolPath": "/somewhere/patch", "input": {"n": {"one": 1}}, "dependencies": []},
        {"id": "two", "tool": "patch", "input": {"n": {"two": 2}}, "after": ["one"]},
        {"id": "bad", "tool": "fails"},
        {"id": "left out", "tool": "patch", "after": ["bad"]},
        {"id": "and this", "tool": "patch", "after": ["left out"]},
        {"id": "optional", "tool": "dies", "required": False},
        {"id": "runs", "tool": "patch", "input": {"n": {"runs": 3}}, "after": ["optional", "two"]},
    ]
}


def test_a_plan_goes_on_beside_a_failure_and_builds_one_state(scene, tmp_path):
    served, _, _ = scene
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PLAN))
    done = broker_command(tmp_path, "plan", str(file), "--socket", served.path, "--json")
    outcomes = {one["id"]: one for one in json.loads(done.stdout)}
    assert done.returncode == 1
    assert {name: one["ended"] for name, one in outcomes.items()} == {
        "one": "success",
        "two": "success",
        "bad": "failed",
        "left out": "skipped",
        "and this": "skipped",
        "optional": "failed",
        "runs": "success",
    }
    assert outcomes["left out"]["reason"] == "bad failed"
    assert outcomes["runs"]["output"]["state"] == {"a": 1, "n": {"one": 1, "two": 2, "runs": 3}}
    shown = broker_command(tmp_path, "plan", str(file), "--socket", served.path)
    assert shown.returncode == 1
    assert "7 steps: 3 success, 2 failed, 2 skipped" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert "left out  skipped  bad failed" in shown.stdout


def test_a_plan_is_live_and_its_steps_run_at_the_same_time_unless_it_says_otherwise(scene, tmp_path):
    served, _, hold = scene
    file = tmp_path / "plan.json"
    steps = [{"id": "a", "tool": "slow"}, {"id": "b", "tool": "slow"}]
    file.write_text(json.dumps({"tools": steps}))
    timer = threading.Timer(0.8, hold.touch)
    timer.start()
    done = broker_command(tmp_path, "plan", str(file), "--socket", served.path)
    timer.join()
    kinds = [line.split()[:2] for line in done.stdout.splitlines()]
    assert sorted(kinds[:2]) == [["a", "info"], ["b", "info"]]
    file.write_text(json.dumps({"tools": steps, "parallel": False}))
    done = broker_command(tmp_path, "plan", str(file), "--socket", served.path)
    kinds = [line.split()[:2] for line in done.stdout.splitlines()]
    assert kinds[:4] == [["a", "info"], ["a", "success"], ["b", "info"], ["b", "success"]]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("[]", "it is no plan: expected `object`"),
        ("", "it is not JSON: Input data was truncated"),
        ("{", "it is not JSON: Input data was truncated"),
        (
            '{"tools": [\n  {"id": "a",\n   "tool": "ä" "x"}\n]}',
            "it is not JSON: line 3, column 16: expected ',' or '}'",
        ),
        ('{"tools": [{"id": "a", "tool": "x", "input": ' + "[" * 5000 + "]" * 5000 + "}]}", "it is nested too deeply"),
        ({}, "missing required field `tools`"),
        ({"tools": [{"tool": "x"}]}, "step no. 1: object missing required field `id`"),
        ({"tools": [{"id": "a", "tool": "x"}, {"id": "a", "tool": "x"}]}, "two steps are called 'a'"),
        ({"tools": [{"id": "a", "tool": "x", "after": ["b"]}]}, "'a' is after 'b', and there is no such step"),
        ({"tools": [{"id": "a", "tool": "x", "after": ["a"]}]}, "these steps wait for each other: a"),
    ],
)
def test_mistakes_in_a_plan_are_named_before_anything_runs(plan, words):
    with pytest.raises(PlanError) as error:
        read_plan(plan if isinstance(plan, str) else json.dumps(plan))
    assert words in str(error.value)


def test_what_a_step_puts_out_may_be_anything(scene, tmp_path):
    """JSON stays as it is, and what is none is a text; neither it nor a step's name is a command to a terminal."""
    served, _, _ = scene
    plan = tmp_path / "plan.json"
    echo = {"tool": "AID.DEMO.ECHO.v1", "input": {"n": 1.0}}
    blob = {"tool": "AID.DEMO.BLOB.v1", "input": {"bytes": 10}}
    plan.write_text(json.dumps({"tools": [{"id": "e\x1b[31m", **echo}, {"id": "b", **blob}]}))
    done = broker_command(tmp_path, "plan", str(plan), "--socket", served.path)
    assert (done.returncode, "\x1b" in done.stdout) == (0, False)
    assert "2 steps: 2 success, 0 failed, 0 skipped" in done.stdout
    done = broker_command(tmp_path, "plan", str(plan), "--socket", served.path, "--json")
    assert '"output":{"n": 1.0}' in done.stdout
    assert json.loads(done.stdout)[1]["output"] == "x" * 8
    assert _read("not JSON") == "not JSON"
    assert _read("") is None
    assert _read("[" * 5000 + "]" * 5000).startswith("[[")


def test_fifty_steps_and_a_thousand(scene, tmp_path):
    served, _, _ = scene
    plan = tmp_path / "plan.json"
    chains = [
        {"id": f"{n}", "tool": "patch", "input": {f"k{n}": n}, "after": [f"{n - 1}"] if n % 5 else []}
        for n in range(50)
    ]
    plan.write_text(json.dumps({"tools": chains}))
    done = broker_command(tmp_path, "plan", str(plan), "--socket", served.path, "--session", "fifty", "--json")
    assert [one["ended"] for one in json.loads(done.stdout)] == ["success"] * 50
    with Client(served.path) as client:
        assert client.state("fifty") == {f"k{n}": n for n in range(50)}
    plan.write_text(json.dumps({"tools": [{"id": f"{n}", "tool": "AID.DEMO.ECHO.v1"} for n in range(1000)]}))
    assert "1000 success" in broker_command(tmp_path, "plan", str(plan), "--socket", served.path).stdout
    plan.write_text(json.dumps({"tools": [{"id": f"{n}", "tool": "AID.DEMO.ECHO.v1"} for n in range(1001)]}))
    assert "1000 is the most" in broker_command(tmp_path, "plan", str(plan), "--socket", served.path).stderr


def test_a_plan_that_is_interrupted_ends_quietly(scene, tmp_path):
    served, _, hold = scene
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"tools": [{"id": "a", "tool": "slow"}]}))
    command = [sys.executable, "-m", "broker", "plan", str(plan), "--socket", served.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().split() == ["a", "info", "1"]
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=10)
    hold.touch()
    assert (process.returncode, out, error) == (130, "", "")


def test_an_unknown_tool_in_a_plan_stops_it_before_anything_runs(scene, tmp_path):
    served, _, _ = scene
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"tools": [{"id": "a", "tool": "patch"}, {"id": "b", "tool": "nowhere"}]}))
    done = broker_command(tmp_path, "plan", str(plan), "--socket", served.path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "step 'b': tool not found: nowhere" in done.stderr


def test_a_call_from_the_command_line_is_heard_while_it_runs(scene, tmp_path):
    served, _, _ = scene
    done = broker_command(tmp_path, "call", "fails", "{}", "--stream", "--socket", served.path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "warn     hm  [31m"
    done = broker_command(tmp_path, "call", "junk", "--socket", served.path)
    assert done.stderr == "broker: bad_reply: a line is not JSON:  [31mjunk (protocol violation)\n"
    done = broker_command(tmp_path, "call", "patch", '{"a":1}', "--session", "cli", "--socket", served.path)
    assert json.loads(done.stdout)["state"] == {"a": 1}
