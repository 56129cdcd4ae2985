"""Several requests on one connection: each gets its own answer, in order, whatever becomes of the ones behind it."""

from __future__ import annotations

import json
import re
import socket
import time

import pytest

from tests.support.http import answer_on, until_the_end

SHORT = """
[limits]
line_seconds = 1.0
[http]
header_seconds = 0.5
idle_seconds = 1.0
[[toolhost]]
name = "d"
plugins = ["{demo_plugin}"]
"""
GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


def call(tool, given, *headers):
    body = json.dumps({"tool": tool, "input": given}).encode()
    head = [b"POST /v1/tools/execute HTTP/1.1", b"host: localhost", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def sleep(milliseconds):
    return call("AID.DEMO.SLEEP.v1", {"ms": milliseconds})


def statuses(received):
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+)", received)]


@pytest.fixture
def impatient(start_web, where):
    return start_web(config=SHORT.format(**where))[1]


@pytest.mark.parametrize(
    ("behind", "status"),
    [(b"POST /v1/tools/execute HTTP/1.1\r\nhost: loc", 408), (b"NONSENSE\r\n\r\n", 400), (sleep(1)[:-3], 408)],
    ids=["a head that does not end", "no HTTP", "a body that does not end"],
)
def test_trouble_behind_a_running_call_does_not_take_its_place(impatient, behind, status):
    with impatient.socket() as wire:
        wire.sendall(sleep(1500) + behind)
        received = until_the_end(wire)
    assert statuses(received) == [200, status]
    assert b'"slept_ms":1500' in received


def test_a_body_that_is_broken_behind_a_running_call_ends_the_connection_after_its_answer(web):
    chunked = b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\nZZ\r\n"
    with web.socket() as wire:
        wire.sendall(sleep(300) + GET + chunked)
        assert statuses(until_the_end(wire)) == [200, 200, 400]


def test_whoever_waits_for_us_is_not_too_slow(impatient):
    request = call("AID.DEMO.ECHO.v1", {"n": 1}, b"connection: close")
    with impatient.socket() as wire:
        wire.sendall(sleep(1500) + request[:-5])
        time.sleep(1.7)
        wire.sendall(request[-5:])
        assert statuses(until_the_end(wire)) == [200, 200]


def test_a_connection_with_calls_behind_the_first_is_not_idle(impatient):
    with impatient.socket() as wire:
        wire.sendall(sleep(50) + sleep(2500))
        received = until_the_end(wire)
    assert statuses(received) == [200, 200]


def test_a_half_closed_caller_gets_all_its_answers(web):
    with web.socket() as wire:
        wire.sendall(sleep(50) + sleep(400) + GET)
        received = wire.recv(65536)
        wire.shutdown(1)
        assert statuses(received + until_the_end(wire)) == [200, 200, 200]
    with web.socket() as wire:
        wire.sendall(sleep(200) + sleep(1)[:-1])
        wire.shutdown(1)
        assert statuses(until_the_end(wire)) == [200]


@pytest.mark.parametrize("end", [b"", b"ZZ\r\n"], ids=["too slow", "broken"])
def test_a_request_that_was_refused_before_its_end_is_not_refused_again(impatient, end):
    with impatient.socket() as wire:
        wire.sendall(b"POST /v1/tools/execute HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(33):
            wire.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        received = wire.recv(65536)
        wire.sendall(end)
        assert statuses(received + until_the_end(wire)) == [413]


def test_a_head_that_comes_with_a_large_body_before_it_is_not_large(web):
    last = call("AID.DEMO.ECHO.v1", {}, b"connection: close")
    with web.socket() as wire:
        wire.sendall(call("AID.DEMO.ECHO.v1", {"text": "x" * 70_000}) + last[:10])
        time.sleep(0.2)
        wire.sendall(last[10:])
        assert statuses(until_the_end(wire)) == [200, 200]


def test_a_flood_of_pipelined_requests_is_answered_and_held_back(web):
    count = 20_000
    with web.socket() as wire:
        wire.setblocking(False)
        left, received = memoryview(GET * count), 0
        deadline = time.monotonic() + 30
        while received < count and time.monotonic() < deadline:
            if left:
                try:
                    left = left[wire.send(left[:65536]) :]
                except BlockingIOError:
                    time.sleep(0.001)
            try:
                part = wire.recv(1 << 20)
            except BlockingIOError:
                continue
            assert part, f"ended after {received}"
            received += part.count(b"HTTP/1.1 200")
    assert received >= count - 50  # one may come in two parts


@pytest.mark.parametrize("pause", [0, 0.1])
def test_a_request_that_would_rather_speak_another_protocol_is_answered_in_this_one(web, pause):
    """As curl --http2 and Java's client send it."""
    upgrade = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAAP__")
    request = call("AID.DEMO.ECHO.v1", {"n": 1}, *upgrade)
    at = request.index(b"\r\n\r\n") + 4
    with web.socket() as wire:
        wire.sendall(request[:at])
        time.sleep(pause)
        wire.sendall(request[at:] + call("AID.DEMO.ECHO.v1", {"n": 2}, b"connection: close"))
        received = until_the_end(wire)
    assert statuses(received) == [200, 200]
    assert b'"output":{"n": 1}' in received
    assert b'"output":{"n": 2}' in received
    assert statuses(web.raw(b"CONNECT evil.example:80 HTTP/1.1\r\nhost: evil.example:80\r\n\r\n")) == [400]


def test_whoever_does_not_read_gets_no_more_answers(start_web, where):
    """Neither where each request begins as the one before did."""
    _, web = start_web("--plugin", where["demo_plugin"])
    small, large = (
        call("AID.DEMO.BLOB.v1", {"bytes": size, "pad": "x" * pad}) for size, pad in ((10, 7), (1_000_000, 2))
    )
    assert len(small) == len(large)
    with socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect((web.host, web.port))
        for request in [small] * 3 + [large] * 20:
            wire.sendall(request)
            time.sleep(0.08)
            if request is small:
                assert answer_on(wire).status == 200
        ran = int(web.execute("AID.DEMO.ECHO.v1", {}).json["metrics"]["job_id"].removeprefix("job_"))
    assert ran < 16
