"""Event tools over HTTP, from Python, and from the command line."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time

import pytest

from broker import AsyncClient, CallFailed
from broker.client.failures import Crash, ToolError
from broker.client.plan import PlanError, read_plan
from tests.support.command import broker_command
from tests.support.http import Web

DONE = 'say("done", ok=True, summary="all well")'
LISTEN = {"accept": "text/event-stream"}
FLOOD = (
    b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\ncontent-length: 16\r\n\r\n"
    b'{"tool":"flood"}'
)


@pytest.fixture
def scene(start, tools):
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
    config += tools.tool("dies", "say('state_patch', patch={'a': 1}); sys.exit(3)")
    hold = tools.folder / "go"
    config += tools.tool(
        "slow",
        f"say('log', level='info', message='1')\nwhile not os.path.exists({str(hold)!r}): time.sleep(.01)\n{DONE}",
    )
    config += tools.tool("flood", f"for n in range(20000): say('log', level='info', message='x' * 1000)\n{DONE}")
    served = start("--http", "127.0.0.1:0", config=config)
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
        ("{", "it is no plan"),
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
    done = broker_command(tmp_path, "call", "patch", '{"a":1}', "--session", "cli", "--socket", served.path)
    assert json.loads(done.stdout)["state"] == {"a": 1}
