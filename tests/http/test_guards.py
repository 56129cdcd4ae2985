"""Who may call over HTTP, and what becomes of callers that are slow, broken or hostile."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from tests.support.command import broker_command
from tests.support.http import Web, answer_on
from tests.support.toolhosts import listing, scripted

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example"])
def test_a_name_that_is_not_this_machines_is_refused(web, host):
    """So that a page whose name leads here (DNS rebinding) reads nothing."""
    answer = web.execute("AID.DEMO.ECHO.v1", {}, headers={"Host": host})
    assert (answer.status, answer.json["metrics"]["error_code"]) == (403, "forbidden")
    assert web.get("/v1/tools", Host=host).json["error"]["code"] == "forbidden"


@pytest.mark.parametrize("host", ["localhost", "LocalHost:1", "127.0.0.1:8080", "[::1]:8080"])
def test_names_of_this_machine_are_not(web, host):
    assert web.execute("AID.DEMO.ECHO.v1", {}, headers={"Host": host}).status == 200


def test_pages_from_elsewhere_may_not_call(web):
    answer = web.execute("AID.DEMO.ECHO.v1", {}, headers={"Origin": "https://evil.example"})
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert web.execute("AID.DEMO.ECHO.v1", {}, headers={"Content-Type": kind}).status == 400
    own = {"Origin": f"http://{web.host}:{web.port}", "Content-Type": "application/json; charset=utf-8"}
    assert web.execute("AID.DEMO.ECHO.v1", {}, headers=own).status == 200


def test_pages_that_are_named_may_call(start_web, where):
    config = f'[[toolhost]]\nname = "d"\nplugins = ["{where["demo_plugin"]}"]\n[http]\ncors = ["https://app.example"]\n'
    _, web = start_web(config=config)
    origin = {"Origin": "https://app.example", **JSON}
    answer = web.execute("AID.DEMO.ECHO.v1", {}, headers=origin)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert answer.headers["access-control-expose-headers"] == "retry-after, traceparent, x-request-id"
    may = web.ask("OPTIONS", "/v1/tools/execute", headers=origin)
    assert (may.status, may.headers["access-control-allow-origin"]) == (204, "https://app.example")
    assert {"authorization", "content-type"} <= set(may.headers["access-control-allow-headers"].split(", "))


def test_pages_that_are_named_may_ask_whether_they_may_show_a_token(start_web, where, tmp_path):
    """Beyond loopback as well: a browser asks without it."""
    broker_command(tmp_path, "token", "new", "page")
    config = f'[[toolhost]]\nname = "d"\nplugins = ["{where["demo_plugin"]}"]\n[http]\ncors = ["https://app.example"]\n'
    web = Web(start_web("--http", "0.0.0.0:0", config=config)[0].ready.replace("0.0.0.0", "127.0.0.1"))
    assert web.ask("OPTIONS", "/v1/tools/execute", headers={"Origin": "https://app.example"}).status == 204
    assert web.ask("OPTIONS", "/v1/tools/execute", headers={"Origin": "https://evil.example"}).status == 403
    assert web.execute("AID.DEMO.ECHO.v1", {}, headers={"Origin": "https://app.example"}).status == 403


def test_a_token_names_its_caller_and_its_rights(start_web, where, tmp_path):
    config = f"""
    [[toolhost]]
    name = "d"
    plugins = ["{where["demo_plugin"]}"]
    [[principal]]
    name = "token:ci"
    tools = ["AID.DEMO.ECHO.v1"]
    [[principal]]
    name = "http:anonymous"
    tools = ["AID.DEMO.COUNTER.v1"]
    operator = true
    """
    _, web = start_web(config=config)
    token = broker_command(tmp_path, "token", "new", "ci").stdout.split()[-1]
    bearer = {"Authorization": f"Bearer {token}"}
    assert [tool["name"] for tool in web.ask("GET", "/v1/tools", headers=bearer).json["tools"]] == ["AID.DEMO.ECHO.v1"]
    assert web.execute("AID.DEMO.ECHO.v1", {}, headers=bearer).status == 200
    refused = web.execute("AID.DEMO.COUNTER.v1", {}, headers=bearer)
    assert (refused.status, refused.json["metrics"]["error_code"]) == (403, "forbidden")
    assert web.execute("AID.DEMO.COUNTER.v1", {}).status == 200
    assert web.execute("AID.DEMO.ECHO.v1", {}).status == 403
    made = web.execute("AID.DEMO.ECHO.v1", {}, headers=bearer).json["metrics"]["job_id"]
    assert web.get(f"/v1/jobs/{made}").status == 404  # it is somebody else's
    assert web.ask("GET", f"/v1/jobs/{made}", headers=bearer).status == 200
    wrong = web.execute("AID.DEMO.ECHO.v1", {}, headers={"Authorization": "Bearer tbk_nonsense"})
    assert (wrong.status, wrong.json["stderr"].startswith("there is no such token")) == (403, True)


def test_who_watches_with_a_token_that_is_revoked_hears_no_more(start_web, where, tmp_path):
    _, web = start_web("--plugin", where["demo_plugin"])
    token = broker_command(tmp_path, "token", "new", "watcher").stdout.split()[-1]
    with web.socket(5) as wire:
        head = f"GET /status/stream HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n"
        wire.sendall(head.encode())
        assert wire.recv(65536).startswith(b"HTTP/1.1 200")
        broker_command(tmp_path, "token", "revoke", "watcher")
        deadline = time.monotonic() + 4
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            assert time.monotonic() < deadline
            received += wire.recv(65536)


def refused_start(tmp_path, *arguments):
    result = broker_command(tmp_path, "serve", "--socket", str(tmp_path / "b.sock"), *arguments)
    assert result.returncode == 2
    return result.stderr


def test_beyond_loopback_a_token_is_needed(where, tmp_path):
    text = refused_start(tmp_path, "--http", "0.0.0.0:0", "--plugin", where["demo_plugin"])
    assert "broker token new NAME" in text
    assert "--insecure" in text


def test_an_address_that_is_taken_is_said(web, where, tmp_path):
    text = refused_start(tmp_path, "--http", f"127.0.0.1:{web.port}", "--plugin", where["demo_plugin"])
    assert f"cannot listen on --http 127.0.0.1:{web.port}: Address already in use" in text
    assert "expected HOST:PORT" in refused_start(tmp_path, "--http", "8080", "--plugin", where["demo_plugin"])


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"{}\n\n",
        b"POST / HTTP/1.1\r\n: x\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_one_refusal(web, junk):
    answer = web.raw(junk)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"x-request-id" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_heads_and_bodies_must_end_in_time_and_idle_callers_leave(start_web, where):
    config = f"""
    [limits]
    line_seconds = 1.0
    [http]
    header_seconds = 0.5
    idle_seconds = 1.0
    [[toolhost]]
    name = "d"
    plugins = ["{where["demo_plugin"]}"]
    """
    _, web = start_web(config=config)
    begin = time.monotonic()
    assert web.raw(b"") == b""
    assert web.raw(b"GET /healthz HTTP/1.1\r\nhost: loc").startswith(b"HTTP/1.1 408")
    slow = b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{"
    assert web.raw(slow).startswith(b"HTTP/1.1 408")
    assert web.raw(slow.replace(b"/v1/tools/execute", b"/v1/jobs")).startswith(b"HTTP/1.1 408")
    assert b"200 OK" in web.raw(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert time.monotonic() - begin < 12


def test_a_head_has_a_cap(web):
    with web.socket() as wire:
        wire.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x-a: aaaaaaaaa\r\n" * 4000)
        time.sleep(0.1)
        wire.sendall(b"x-a: aaaaaaaaa\r\n" * 200)
        assert answer_on(wire).status == 431
    assert web.get("/healthz").status == 200


def test_connections_are_bounded(start_web, where):
    _, web = start_web("--plugin", where["demo_plugin"], env={"BROKER_HTTP_MAX_CONNECTIONS": "4"})
    wires = [web.socket() for _ in range(4)]
    time.sleep(0.1)
    assert web.raw(b"").startswith(b"HTTP/1.1 429")
    for wire in wires:
        wire.close()
    time.sleep(0.1)
    assert web.get("/healthz").status == 200


def test_whoever_hangs_up_waits_no_more_and_what_ran_is_nobodys(start_web, where):
    config = f'[[toolhost]]\nname = "d"\nplugins = ["{where["demo_plugin"]}"]\nmin = 1\nmax = 1\n'
    served, web = start_web(config=config)
    body = b'{"tool":"AID.DEMO.SLEEP.v1","input":{"ms":800}}'
    request = b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    wires = []
    for _ in range(6):
        wire = web.socket()
        wire.sendall(request)
        wires.append(wire)
    time.sleep(0.3)
    assert served.status()["waiting"] == 5
    for wire in wires:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wire.close()
    served.eventually(lambda: served.status()["waiting"] == 0, 2)
    assert web.execute("AID.DEMO.ECHO.v1", {"n": 1}).json["output"] == {"n": 1}


def test_a_caller_that_does_not_read_holds_nobody_up(web):
    body = b'{"tool":"AID.DEMO.BLOB.v1","input":{"bytes":900000}}'
    request = b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with web.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.sendall(request * 50)
        time.sleep(0.3)
        assert web.execute("AID.DEMO.ECHO.v1", {"n": 1}).json["output"] == {"n": 1}


def test_one_principals_flood_does_not_starve_anothers_single_call(start_web, where, tmp_path):
    config = f'[[toolhost]]\nname = "d"\nplugins = ["{where["demo_plugin"]}"]\nmin = 1\nmax = 1\n'
    served, web = start_web(config=config)
    bearers = {}
    for name in ("flood", "single"):
        token = broker_command(tmp_path, "token", "new", name).stdout.split()[-1]
        bearers[name] = {"Authorization": f"Bearer {token}"}
    sleep = ("AID.DEMO.SLEEP.v1", {"ms": 30})
    threads = [
        threading.Thread(target=web.execute, args=sleep, kwargs={"headers": bearers["flood"]}) for _ in range(60)
    ]
    for thread in threads:
        thread.start()
    served.eventually(lambda: served.status()["waiting"] > 30)
    begin = time.monotonic()
    assert web.execute(*sleep, headers=bearers["single"]).status == 200
    assert time.monotonic() - begin < 0.6
    for thread in threads:
        thread.join()


def test_long_bodies_on_their_way_are_bounded_in_all(start_web, where):
    config = f"""
    [limits]
    queue_bytes = 3000000
    [[toolhost]]
    name = "d"
    plugins = ["{where["demo_plugin"]}"]
    """
    _, web = start_web(config=config)
    head = b"POST /tools HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2000000\r\n\r\n"
    with web.socket() as first, web.socket() as second:
        first.sendall(head + b"x" * 1_900_000)
        time.sleep(0.2)
        with contextlib.suppress(OSError):
            second.sendall(head + b"x" * 1_500_000)
        assert second.recv(65536).startswith(b"HTTP/1.1 429")
        assert web.execute("AID.DEMO.ECHO.v1", {"n": 1}).status == 200
    time.sleep(0.1)
    with web.socket() as third:
        third.sendall(head + b"x" * 2_000_000)
        assert third.recv(65536).startswith(b"HTTP/1.1 400")


def test_the_broker_finishes_what_runs_and_refuses_what_comes(start_web, where):
    served, web = start_web("--plugin", where["demo_plugin"])
    body = b'{"tool":"AID.DEMO.SLEEP.v1","input":{"ms":1000}}'
    head = b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    running, idle = web.socket(), web.socket()
    running.sendall(head % len(body) + body)
    idle.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert answer_on(idle).status == 200
    time.sleep(0.2)
    served.process.terminate()
    time.sleep(0.2)
    idle.sendall(head % len(body) + body)
    assert answer_on(idle).status == 503
    assert answer_on(running).status == 200
    assert served.process.wait(10) == 0
    with pytest.raises(OSError, match="refused"):
        web.get("/healthz")


def test_a_replaced_plugin_is_used_by_the_next_call_over_http_too(start_web, tmp_path):
    plugin = listing(tmp_path / "tools.so", A=["none"])
    host = scripted(tmp_path, 'say(output_json="{}")')
    _, web = start_web("--toolhost", host, "--plugin", plugin)
    assert web.execute("AID.A.v1", {}).status == 200
    listing(tmp_path / "tools.so", B=["none"])
    assert web.execute("AID.B.v1", {}).status == 200
    assert web.execute("AID.A.v1", {}).status == 404
