"""Event tools that behave badly, behind a real broker: how they end, what they leave, what they cost others."""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.assets import Assets, Found
from broker.runtimes.events.protocol import understood
from tests.conftest import Brokers, Served
from tests.support.event_tools import DONE, Tools, event, output
from tests.support.http import Web

# What it does is in its input: a list of steps.
PLAYER = """#!{python} -IS
import json, os, signal, sys, time
def play(steps):
    for what, *more in steps:
        if what == "say":
            text = more[0].encode()
            while text: text = text[os.write(more[1] if len(more) > 1 else 1, text):]
        elif what == "repeat":
            for number in range(more[1]): os.write(1, more[0].replace("#", str(number)).encode())
        elif what == "babble":
            end = time.monotonic() + more[1]
            while time.monotonic() < end: os.write(more[0], b"x" * 1000)
        elif what == "sleep": time.sleep(more[0])
        elif what == "exit": os._exit(more[0])
        elif what == "kill": os.kill(os.getpid(), more[0]); time.sleep(10)
        elif what == "close": os.close(more[0])
        elif what == "ignore": signal.signal(more[0], signal.SIG_IGN)
        elif what == "on term":
            def ended(*_, path=more[0]): open(path, "w").write("told"); os._exit(0)
            signal.signal(signal.SIGTERM, ended)
        elif what == "touch": open(more[0], "w").write(str(os.getpid()))
        elif what == "fork":
            if not os.fork():
                if more[0]: os.setsid()
                play(more[1]); os._exit(0)
play(json.loads(sys.stdin.buffer.read())["input"]["do"])
"""
LOG = json.dumps(event("log", level="info", message="m")) + "\n"
SAID = DONE.decode()
FLOOD = ["repeat", json.dumps(event("log", level="info", message="#" + "x" * 1000)) + "\n", 20_000]


class Stage:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tools = Tools(folder)
        player = folder / "player"
        player.write_text(PLAYER.format(python=sys.executable))
        player.chmod(0o755)
        play = [str(player)]
        self.brokers = Brokers(folder)
        config = "[breaker]\nin_a_row = 1000\nleast_calls = 1000\n"
        config += self.tools.entry("play", play, timeout_seconds=20.0, max=16)
        config += self.tools.entry("brief", play, timeout_seconds=0.4)
        config += self.tools.entry("two", play, timeout_seconds=20.0, max=2)
        config += self.tools.entry("one", play, timeout_seconds=20.0, max=1)
        self.config = config
        self.broker: Served = self.brokers.start("--http", "127.0.0.1:0", config=config)
        self.web = Web(self.broker.ready)

    def play(self, *steps: Any, tool: str = "play", **members: Any) -> dict[str, Any]:
        return self.broker.ask({"aid": tool, "inputs": {"do": steps}, **members})


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("stage"))
    yield made
    made.brokers.end()


def seconds(function):
    begun = time.monotonic()
    function()
    return time.monotonic() - begun


DAEMON = ["fork", True, [["babble", 2, 3.0]]]
ENDS: dict[str, tuple[list[Any], str, str]] = {
    "done": ([["say", SAID]], "success", ""),
    "without its last line end": ([["say", SAID.strip()]], "success", ""),
    "byte by byte": ([["say", one] for one in LOG + SAID], "success", ""),
    "CRLF": ([["say", (LOG + SAID).replace("\n", "\r\n")]], "success", ""),
    "stderr between": ([["say", "noise\n", 2], ["say", LOG], ["say", "\x00\x1b[0m", 2], ["say", SAID]], "success", ""),
    "exits late, but in time": ([["say", SAID], ["sleep", 1.0]], "success", ""),
    "no line end, stdout closed, exits late": ([["say", SAID.strip()], ["close", 1], ["sleep", 0.5]], "success", ""),
    "stdin closed unread": ([["close", 0], ["say", SAID]], "success", ""),
    "says it failed": ([["say", SAID.replace("true", "false")]], "failed", "Tool reported failure"),
    "done, then exit 1": ([["say", SAID], ["exit", 1]], "protocol_failure", "Process exited with code 1"),
    "done, then killed": ([["say", SAID], ["kill", 9]], "protocol_failure", "Process was killed by SIGKILL"),
    "killed": ([["say", LOG], ["kill", 15]], "protocol_failure", "Process was killed by SIGTERM"),
    "exit 255": ([["exit", 255]], "protocol_failure", "Process exited with code 255"),
    "nothing": ([], "protocol_failure", "Missing done event (protocol violation)"),
    "done, stays": ([["say", SAID], ["sleep", 60]], "protocol_failure", "did not exit within 2 s after done"),
    "done, closes, stays": (
        [["say", SAID], ["close", 1], ["close", 2], ["sleep", 60]],
        "protocol_failure",
        "did not exit within 2 s after done",
    ),
    "done without a line end, closes, stays": (
        [["say", SAID.strip()], ["close", 1], ["sleep", 60]],
        "protocol_failure",
        "did not exit within 2 s after done",
    ),
    "a grandchild holds stdout": ([["fork", False, [["sleep", 60]]], ["say", SAID]], "success", ""),
    "a daemon holds stdout": ([["fork", True, [["sleep", 60]]], ["say", SAID]], "success", ""),
    "daemons babble on stderr": ([DAEMON, DAEMON, DAEMON, ["say", SAID]], "success", ""),
    "a daemon is done, not the tool": (
        [["fork", True, [["sleep", 0.3], ["say", SAID]]]],
        "protocol_failure",
        "Missing done event",
    ),
}


def test_how_it_ends(stage):
    """All at once; none of them takes longer than the two seconds after `done`."""
    with stage.broker.wire() as wire:
        begun = time.monotonic()
        wire.send(*({"id": name, "aid": "play", "inputs": {"do": steps}} for name, (steps, _, _) in ENDS.items()))
        replies = {reply["id"]: reply for reply in wire.replies(len(ENDS))}
    assert time.monotonic() - begun < 8
    for name, (_, verdict, words) in ENDS.items():
        assert (output(replies[name])["verdict"], words in replies[name]["error"]) == (verdict, True), replies[name]
    stage.broker.eventually(lambda: not family(stage), 5)


def family(stage):
    player = str(stage.folder / "player")
    return [one for one in psutil.Process(stage.broker.process.pid).children(True) if player in _command(one)]


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_tool_that_is_late_is_asked_to_end_before_it_is_killed(stage):
    told = stage.folder / "told"
    begun = time.monotonic()
    reply = stage.play(["on term", str(told)], ["sleep", 60], tool="brief")
    assert time.monotonic() - begun < 1.3
    assert (reply["type"], "0.4 s" in reply["error"]) == ("timeout", True)
    stage.broker.eventually(told.exists, 2)


def test_a_tool_that_breaks_the_protocol_is_asked_to_end_too(stage):
    told = stage.folder / "told too"
    assert "not JSON" in stage.play(["on term", str(told)], ["say", "junk\n"], ["sleep", 60])["error"]
    stage.broker.eventually(told.exists, 2)


def test_one_that_does_not_listen_is_killed_with_all_that_it_started_and_its_caller_does_not_wait(stage):
    stay = [["ignore", 15], ["sleep", 60]]
    took = seconds(lambda: stage.play(["fork", False, stay], *stay, tool="brief"))
    assert 0.4 <= took < 1.3
    assert len(family(stage)) == 2
    stage.broker.eventually(lambda: not family(stage), 3)
    assert stage.broker.status()["processes"] <= 2


def test_the_limit_of_calls_at_once_counts_those_that_have_yet_to_end(stage):
    """`max = 1` means that there are never two of them."""
    with stage.broker.wire() as wire:
        stay = {"do": [["ignore", 15], ["sleep", 60]]}
        wire.send({"id": 1, "aid": "one", "inputs": stay, "timeout_ms": 300})
        assert wire.reply()["type"] == "timeout"
        pid = stage.folder / "pid"
        wire.send({"id": 2, "aid": "one", "inputs": {"do": [["touch", str(pid)], ["say", SAID]]}})
        assert (wire.reply()["id"], len(family(stage))) == (2, 0)


def test_a_long_summary_is_cut_and_the_reply_stays_within_its_bound(stage):
    for ok in (True, False):
        said = json.dumps(event("done", ok=ok, summary="\x01" * 150_000)) + "\n"
        with stage.broker.wire() as wire:
            wire.send({"aid": "play", "inputs": {"do": [["say", said]]}})
            line = wire.raw()
        reply = json.loads(line)
        assert len(line) <= 1 << 20
        assert output(reply)["verdict"] == ("success" if ok else "failed")
        assert output(reply)["summary"].endswith("… (150000 characters)")


def test_what_a_tool_nests_deeply_is_refused_or_arrives_over_every_face(stage):
    def deep(levels):
        inner = '{"a":' * levels + "1" + "}" * levels
        return '{"version":"0","type":"state_patch","patch":' + inner + "}\n"

    refused = stage.play(["say", deep(125)])
    assert (refused["type"], "125 levels (limits.depth" in refused["error"]) == ("bad_reply", True)
    given = {"do": [["say", deep(124) + SAID]]}
    assert output(stage.play(*given["do"]))["verdict"] == "success"
    assert stage.web.execute("play", given).json["output"]["verdict"] == "success"
    service = stage.web.ask("POST", "/tools", {"tool_name": "play", "payload": given}).json
    assert service["result"]["verdict"] == "success"


def test_many_patches_of_a_large_state_do_not_hold_up_others(stage):
    large = json.dumps(event("state_patch", patch={f"key {n}": n for n in range(12_000)})) + "\n"
    small = ["repeat", '{"version":"0","type":"state_patch","patch":{"n":#}}\n', 3000]
    worst = 0.0
    over = threading.Event()
    replies = []

    def patch():
        replies.append(stage.play(["say", large], small, ["say", SAID]))
        over.set()

    thread = threading.Thread(target=patch)
    thread.start()
    with stage.broker.wire() as wire:
        while not over.is_set():
            worst = max(worst, seconds(lambda: wire.ask({"aid": "_state"})))
    thread.join()
    assert output(replies[0])["state"]["n"] == 2999
    assert worst < 0.25


def test_a_stalled_reader_leaves_room_for_others_of_the_same_tool(stage):
    with stage.broker.wire() as stalled, stage.broker.wire(5) as other:
        stalled.send(
            *({"id": n, "aid": "two", "stream": True, "inputs": {"do": [FLOOD, ["say", SAID]]}} for n in (1, 2))
        )
        stage.broker.eventually(lambda: len(family(stage)) == 2)
        time.sleep(0.5)
        assert seconds(lambda: other.ask({"aid": "two", "inputs": {"do": [["say", SAID]]}})) < 2
    stage.broker.eventually(lambda: not family(stage), 10)


def test_a_slow_reader_of_a_tool_that_has_ended_gets_its_success(stage):
    """The tool's time is not over because its caller takes longer to read."""
    with stage.broker.wire(60) as wire:
        wire.send({"id": 0, "aid": "play", "stream": True, "timeout_ms": 1000, "inputs": {"do": [["say", LOG + SAID]]}})
        wire.send(*({"id": n, "aid": "AID.DEMO.BLOB.v1", "inputs": {"bytes": 900_000}} for n in range(1, 4)))
        time.sleep(1.6)
        replies = [reply for reply in (wire.reply() for _ in range(6)) if reply["id"] == 0]
        assert [reply.get("ok") for reply in replies] == [None, None, True]


# --- assets ---------------------------------------------------------------------------------------------------------


def asset(name, path, kind="image/png", **more):
    return json.dumps(event("asset", assetId=name, kind="k", mediaType=kind, path=str(path), **more)) + "\n"


def paint(stage, *said):
    done = stage.web.execute("play", {"do": [["say", "".join(said) + SAID]]})
    return {one["assetId"]: one for one in done.json["output"]["assets"]}


def test_a_file_that_becomes_a_link_is_not_served(stage):
    picture, secret = stage.folder / "a.png", stage.folder / "secret"
    picture.write_bytes(b"PNG")
    secret.write_text("secret")
    url = paint(stage, asset("a", picture))["a"]["url"]
    assert stage.web.get(url).body == b"PNG"
    picture.unlink()
    picture.symlink_to(secret)
    answer = stage.web.get(url)
    assert (answer.status, b"secret" in answer.body.replace(str(secret).encode(), b"")) == (404, False)
    picture.unlink()
    os.mkfifo(picture)
    assert stage.web.get(url).status == 404
    picture.unlink()
    assert "is gone" in stage.web.get(url).json["error"]["message"]


def test_an_assets_name_is_never_anothers_after_a_restart():
    body = understood(asset("a", "/x").encode().strip(), 128).body
    first, second = (Assets().register(Found("/x", 1), body, "paint", "uid:1", ()) for _ in range(2))
    assert first.id != second.id


def test_odd_names_and_media_types_of_assets_break_no_header(stage):
    odd = stage.folder / 'we"ird\nx: y;é\\.png'
    odd.write_bytes(b"x")
    kinds = [
        "image/png\r\nx: y",
        "image/png; a=\r\nx: y",
        "image/",
        "a/b c",
        "image/p\u00e4ng",
        " Image/PNG ",
        "text/plain; charset=utf-8",
    ]
    found = paint(stage, *(asset(kind, odd, kind) for kind in kinds))
    served = []
    for kind in kinds:
        answer = stage.web.get(found[kind]["url"])
        assert (answer.status, answer.body, "x" in answer.headers) == (200, b"x", False)
        assert answer.headers["content-disposition"].endswith('filename="we_ird_x: y;__.png"')
        served.append(answer.headers["content-type"])
    assert served == ["application/octet-stream"] * 5 + ["image/png", "text/plain; charset=utf-8"]


def test_a_part_of_an_asset_or_its_head_alone(stage):
    film = stage.folder / "film.mp4"
    film.write_bytes(bytes(range(256)) * 4096)
    url = paint(stage, asset("f", film, "video/mp4"))["f"]["url"]
    whole = film.read_bytes()
    assert stage.web.get(url).body == whole
    for wanted, part in (
        ("0-0", slice(0, 1)),
        ("10-700000", slice(10, 700_001)),
        ("1048570-", slice(1_048_570, None)),
        ("-6", slice(-6, None)),
    ):
        answer = stage.web.get(url, range=f"bytes={wanted}")
        start, stop, _ = part.indices(len(whole))
        assert (answer.status, answer.body == whole[part]) == (206, True), wanted
        assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(whole)}"
    for wanted in ("bytes=1048576-", "bytes=-0"):
        answer = stage.web.get(url, range=wanted)
        assert (answer.status, answer.headers["content-range"], answer.body) == (416, "bytes */1048576", b"")
    for wanted in ("bytes=5-2", "bytes=0-1,4-5", "lines=1-2", "bytes=-"):
        assert stage.web.get(url, range=wanted).body == whole
    head = stage.web.ask("HEAD", url)
    assert (head.status, head.headers["content-length"], head.body) == (200, str(len(whole)), b"")
    film.write_bytes(b"")
    assert stage.web.get(url).body == b""


def test_a_flood_of_assets_is_bounded_in_memory_and_in_the_log(stage):
    picture = stage.folder / "c.png"
    picture.write_bytes(b"PNG")
    process = psutil.Process(stage.broker.process.pid)
    long = {"metadata": {"long": "y" * 200_000}}
    good = ["repeat", asset("#", picture, **long), 400]
    bad = ["repeat", asset("#" + "y" * 200_000, stage.folder / "none", **long), 200]
    stage.play(good, ["say", SAID])
    before, logged = process.memory_info().rss, stage.broker.log.stat().st_size
    for steps in (good, bad):
        reply = stage.play(steps, ["say", SAID])
        assert output(reply)["verdict"] == "success"
        assert output(reply)["cut"]["asset"] > 150
    assert process.memory_info().rss - before < 60 << 20
    assert stage.broker.log.stat().st_size - logged < 1000
    assert len(stage.web.get("/v1/assets").json["assets"]) < 25


def test_a_device_is_only_looked_at(stage):
    (reason,) = (one["reason"] for one in paint(stage, asset("d", "/dev/ptmx")).values())
    assert "not a regular file" in reason


# --- sessions over HTTP ---------------------------------------------------------------------------------------------


def test_a_session_over_http_has_the_same_name_in_a_header_and_in_an_address(stage):
    patch = {"do": [["say", json.dumps(event("state_patch", patch={"a": 1})) + "\n" + SAID]]}
    stage.web.execute("play", patch, headers={"broker-session": "caf\u00e9".encode().decode("latin-1")})
    assert stage.web.get("/v1/sessions/caf%C3%A9/state").json["state"] == {"a": 1}
    refused = stage.web.execute("play", patch, headers={"broker-session": "s" * 257})
    assert (refused.status, "256 characters" in refused.json["stderr"]) == (400, True)


def test_the_service_of_namel3ss_has_sessions_too(stage):
    patch = {"do": [["say", json.dumps(event("state_patch", patch={"b": 1})) + "\n" + SAID]]}
    for _ in range(2):
        stage.web.ask("POST", "/tools", {"tool_name": "play", "payload": patch}, {"broker-session": "n"})
    assert stage.web.get("/v1/sessions/n/state").json["state"] == {"b": 1}


# --- streams over HTTP ----------------------------------------------------------------------------------------------


def test_a_repeated_key_is_a_stream_of_the_result_alone(stage):
    given = {"tool": "play", "input": {"do": [["say", SAID]]}}
    headers = {"accept": "text/event-stream", "idempotency-key": "again"}
    first, second = (stage.web.ask("POST", "/v1/tools/execute", given, headers) for _ in range(2))
    assert first.headers["content-type"] == second.headers["content-type"] == "text/event-stream"
    assert (first.body.count(b"event: event"), second.body.count(b"event: event")) == (1, 0)
    assert b"event: result" in second.body


def test_a_stream_to_a_caller_of_http_1_0_has_no_chunks_and_ends_with_the_connection(stage):
    body = json.dumps({"tool": "play", "input": {"do": [["say", LOG], ["sleep", 0.2], ["say", SAID]]}}).encode()
    head = b"POST /v1/tools/execute HTTP/1.0\r\naccept: text/event-stream\r\nconnection: keep-alive\r\n"
    answer = stage.web.raw(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    top, _, rest = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in top
    assert b"connection: close" in top
    assert rest.startswith(b"event: event\ndata: {")
    assert rest.count(b"event: ") == 3
    assert rest.endswith(b"}\n\n")


def test_a_download_that_nobody_waits_for_any_more_ends(stage):
    film = stage.folder / "long.mp4"
    with film.open("wb") as file:
        file.truncate(2 << 30)
    url = paint(stage, asset("l", film, "video/mp4"))["l"]["url"]
    connection = http.client.HTTPConnection(stage.web.host, stage.web.port, timeout=10)
    connection.request("GET", url)
    assert connection.getresponse().read(1000) == b"\0" * 1000
    connection.sock.close()
    connection.close()
    process = psutil.Process(stage.broker.process.pid)
    stage.broker.eventually(lambda: str(film) not in {one.path for one in process.open_files()}, 3)
    film.unlink()


# --- how it is started ----------------------------------------------------------------------------------------------


def test_a_relative_command_is_found_in_its_working_directory(start, tools):
    tools.tool("here", "say('log', level='info', message=os.getcwd()); say('done', ok=True)")
    script = tools.folder / "plain"
    script.write_text("echo no first line\n")
    script.chmod(0o755)
    inner = tools.folder / "inner"
    inner.mkdir()
    (inner / "deep.py").write_text((tools.folder / "here.py").read_text())
    (inner / "deep.py").chmod(0o755)
    config = tools.entry("here", ["./here.py"])
    config += tools.entry("inner", ["./deep.py"], cwd=str(inner))
    config += tools.entry("inner too", ["./deep.py"], cwd="inner")
    config += tools.entry("plain", [str(script)])
    broker = start(config=config)
    for name, place in (("here", tools.folder), ("inner", inner), ("inner too", inner)):
        assert output(broker.call(name))["events"][0]["message"] == str(place)
    refused = broker.call("plain")
    assert (refused["type"], "begins with #!" in refused["error"]) == ("not_found", True)
