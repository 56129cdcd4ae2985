"""--serve, line by line: replies byte for byte, refusals, caps, and bytes that nobody should send."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .talk import Host, demo, environment, replies

Serve = Callable[..., Host]
Where = dict[str, Path]
CAP = 10_485_760
ROOM = 4096
OK_EMPTY = (
    b'{"ok":true,"status":"OK","output_json":"{}","error":"","ds_state":{"delta":true,"slots":{},"removed_slots":[]}}\n'
)
ECHO = b'{"aid":"AID.DEMO.ECHO.v1"}\n'


@pytest.mark.parametrize(
    ("request_line", "reply"),
    [
        (b'{"aid":"AID.DEMO.ECHO.v1"}', OK_EMPTY),
        (b' \t{ "aid" : "AID.DEMO.ECHO.v1" } ', OK_EMPTY),
        (b'{"\\u0061id":"AID.DEMO.ECHO\\u002ev1"}', OK_EMPTY),
        (b'{"aid":"AID.DEMO.ECHO.v1","input_json":7}', OK_EMPTY),
        (b'{"aid":"AID.DEMO.ECHO.v1","inputs":{"a":1},"x":1e999,"y":123456789012345678901234567890}', OK_EMPTY),
        (b'{"aid":"AID.DEMO.ECHO.v1","ds_state":null,"idempotency_key":7,"_lease_token":[]}', OK_EMPTY),
        (b"x", b'{"ok":false,"error":"invalid JSON"}\n'),
        (b" ", b'{"ok":false,"error":"invalid JSON"}\n'),
        (b"[]", b'{"ok":false,"error":"invalid JSON"}\n'),
        (b'"AID.DEMO.ECHO.v1"', b'{"ok":false,"error":"invalid JSON"}\n'),
        (b'{"aid":"AID.DEMO.ECHO.v1"}{}', b'{"ok":false,"error":"invalid JSON"}\n'),
        (b'{"aid":"AID.DEMO.ECHO.v1",}', b'{"ok":false,"error":"invalid JSON"}\n'),
        (b'\xef\xbb\xbf{"aid":"AID.DEMO.ECHO.v1"}', b'{"ok":false,"error":"invalid JSON"}\n'),
        (b'{"aid":"AID.DEMO.ECHO.v1","input_json":"\xff"}', b'{"ok":false,"error":"invalid JSON"}\n'),
        (b'{"aid":"AID.DEMO.ECHO.v1","input_json":"\\ud800"}', b'{"ok":false,"error":"invalid JSON"}\n'),
        (b'{"aid":"AID.DEMO.ECHO.v1"}\x00', b'{"ok":false,"error":"invalid JSON"}\n'),
        (b"\x00", b'{"ok":false,"error":"invalid JSON"}\n'),
        (b"{}", b'{"ok":false,"error":"missing aid"}\n'),
        (b'{"aid":""}', b'{"ok":false,"error":"missing aid"}\n'),
        (b'{"aid":7}', b'{"ok":false,"error":"missing aid"}\n'),
        (b'{"aid":"NOPE"}', b'{"ok":false,"error":"tool not found: NOPE"}\n'),
        (b'{"aid":"AID.DEMO.ECHO.v1\\u0000"}', b'{"ok":false,"error":"tool not found: AID.DEMO.ECHO.v1\\u0000"}\n'),
        (
            b'{"aid":"AID.DEMO.ECHO.v1","\\u0061id":"AID.DEMO.FAIL.v1"}',
            b'{"ok":false,"error":"invalid JSON","detail":"member given twice: aid"}\n',
        ),
        (
            b'{"aid":"AID.DEMO.ECHO.v1","input_json":"a\\u0000\\"\\\\\\n\\u00e9"}',
            OK_EMPTY.replace(b'"{}"', '"a\\u0000\\"\\\\\\né"'.encode()),
        ),
    ],
)
def test_a_line_gets_exactly_this_reply(serve: Serve, request_line: bytes, reply: bytes) -> None:
    host = serve()
    host.send(request_line + b"\n")
    assert host.raw_line() == reply
    host.send(ECHO)
    assert host.raw_line() == OK_EMPTY


def test_a_tools_failure_is_a_reply_with_ok_false(serve: Serve) -> None:
    host = serve()
    host.send(demo("FAIL", {"error": "no"}))
    assert host.raw_line() == (
        b'{"ok":false,"status":"TOOL_ERROR","output_json":"{}","error":"no",'
        b'"ds_state":{"delta":true,"slots":{},"removed_slots":[]}}\n'
    )


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""], ids=["empty line", "empty line with CR", "end of input"])
def test_an_empty_line_or_the_end_of_input_ends_it_with_exit_0(serve: Serve, end: bytes) -> None:
    code, out, err = serve().finish(ECHO + end + (ECHO if end else b""))
    assert (code, out, err) == (0, OK_EMPTY, b"")


def test_carriage_returns_are_tolerated_and_an_unterminated_last_line_is_a_line(serve: Serve) -> None:
    code, out, _ = serve().finish(ECHO.strip() + b"\r\n" + ECHO.strip())
    assert (code, out) == (0, OK_EMPTY * 2)


def test_a_line_that_comes_byte_by_byte_is_a_line(serve: Serve) -> None:
    host = serve()
    for byte in ECHO:
        host.send(bytes([byte]))
    assert host.raw_line() == OK_EMPTY


def echo_of(size: int) -> bytes:
    frame = b'{"aid":"AID.DEMO.ECHO.v1","input_json":"%s"}'
    return frame % (b"x" * (size - len(frame) + 2))


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_a_line_of_ten_megabytes_and_the_brokers_room_passes_and_one_byte_more_does_not(
    serve: Serve, line_end: bytes
) -> None:
    host = serve()
    code, out, _ = host.finish(line_end.join([echo_of(CAP + ROOM), echo_of(CAP + ROOM + 1), b"x" * 3 * CAP, ECHO]))
    first, second, third, last = out.splitlines(keepends=True)
    assert json.loads(first)["ok"] is True
    assert len(first) > CAP
    assert second == third == b'{"ok":false,"error":"request line over 10485760 bytes"}\n'
    assert (code, last) == (0, OK_EMPTY)


def memory_mb(host: Host, field: str) -> float:
    status = Path(f"/proc/{host.process.pid}/status").read_text()
    return int(next(row for row in status.splitlines() if row.startswith(field)).split()[1]) / 1024


@pytest.mark.usefixtures("limits_hold")
def test_memory_for_a_line_far_too_long_stays_within_the_cap(serve: Serve) -> None:
    host = serve()
    host.ask(ECHO)
    for _ in range(20):
        host.send(b"x" * CAP)
    host.send(b"\n")
    assert host.reply()["error"] == "request line over 10485760 bytes"
    assert memory_mb(host, "VmHWM") < 20


@pytest.mark.usefixtures("limits_hold")
def test_memory_does_not_grow_with_the_number_of_large_lines(serve: Serve) -> None:
    host = serve()
    for _ in range(3):
        host.ask(echo_of(CAP) + b"\n")
    after_three = memory_mb(host, "VmRSS")
    for _ in range(10):
        host.ask(echo_of(CAP) + b"\n")
    assert memory_mb(host, "VmRSS") < after_three + 12


def test_a_reply_may_be_longer_than_the_brokers_cap(serve: Serve) -> None:
    # The cap on replies is the broker's to enforce: it says reply_too_large, and the caller learns the truth.
    host = serve()
    for size in [1_048_576, 1_048_577, 5_000_000]:
        host.send(demo("BLOB", {"bytes": 1000}))
        frame = len(host.raw_line()) - 1 - 1000
        host.send(demo("BLOB", {"bytes": size - frame}))
        assert len(host.raw_line()) - 1 == size


def nested(depth: int) -> bytes:
    """A request whose `x` makes it nest `depth` levels in all."""
    return b'{"aid":"AID.DEMO.ECHO.v1","x":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}\n"


def test_nesting_is_bounded(serve: Serve) -> None:
    host = serve()
    host.send(nested(128))
    assert host.raw_line() == OK_EMPTY
    refusal = b'{"ok":false,"error":"invalid JSON","detail":"nested deeper than 128"}\n'
    for depth in [129, 100_000, 2_000_000]:
        host.send(nested(depth))
        assert host.raw_line() == refusal
    host.send(nested(100_000).replace(b"[", b'{"x":').replace(b"]", b"}").replace(b'{"x":}', b"{}"))
    assert host.raw_line() == refusal
    for unclosed in [b"[", b'{"x":', b"]", b'[{"x":']:
        host.send(unclosed * 100_000 + b"\n")
        assert host.raw_line() == b'{"ok":false,"error":"invalid JSON"}\n'


def test_a_line_of_five_million_values_is_read(serve: Serve) -> None:
    host = serve()
    assert host.ask(b'{"aid":"AID.DEMO.ECHO.v1","x":[' + b"1," * 5_000_000 + b"1]}\n", timeout=60)["ok"] is True


def test_thousands_of_random_lines_get_a_reply_each(serve: Serve) -> None:
    dice = random.Random(4)
    seeds = [ECHO.strip(), demo("STATE", {"op": "put", "slot": 3, "value": "é"}).strip(), nested(20).strip()]
    lines = []
    for _ in range(5000):
        mutated = bytearray(dice.choice(seeds))
        for _ in range(dice.randint(0, 4)):
            at = dice.randrange(len(mutated))
            mutated[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
        lines.append(bytes(mutated).replace(b"\n", b"").replace(b"\r", b"") or b"{")
    code, out, _ = serve().finish(b"\n".join(lines) + b"\n")
    assert code == 0
    assert len(replies(out)) == len(lines)


def test_replies_are_utf8_whatever_a_tool_returns(serve: Serve, build: Callable[..., Path]) -> None:
    plugin = build(
        r"""
        #include "machina/plugin_api.h"
        static machina::ToolResult bad(const std::string&, machina::DSState& state) {
            state.slots[1] = {"\xff", "\xc3", "\xed\xa0\x80", 1};
            return {machina::StepStatus::OK, "a\xff\xe2\x82z", "\x80"};
        }
        extern "C" int machina_plugin_abi_version() { return 1; }
        extern "C" void machina_plugin_init(machina::IToolRegistrar* host) {
            host->register_tool({"AID.BAD.v1", "\xfe", true, {"\xfe"}, {"none"}, {}}, bad);
        }
        """
    )
    reply = serve(plugin).ask(b'{"aid":"AID.BAD.v1"}\n')
    assert reply["output_json"] == b"a\xff\xe2\x82z".decode(errors="replace")
    assert reply["error"] == "\ufffd"
    assert reply["ds_state"]["slots"]["1"]["provenance"] == b"\xed\xa0\x80".decode(errors="replace")


def test_it_serves_over_non_blocking_sockets(where: Where) -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    command = [str(where["toolhost"]), "--serve", str(where["demo_plugin"])]
    with ours, subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno(), env=environment()) as process:
        theirs.close()
        request = demo("BLOB", {"bytes": 500_000})

        def send() -> None:
            for _ in range(20):
                ours.sendall(request)
                time.sleep(0.002)
            ours.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        received = b""
        while data := ours.recv(1 << 20):
            received += data
        sender.join()
        assert process.wait(10) == 0
    assert len(replies(received)) == 20


def test_it_ends_quietly_when_nobody_reads_its_replies(serve: Serve) -> None:
    host = serve()
    assert host.process.stdout
    assert host.process.stderr
    host.process.stdout.close()
    host.send(ECHO)
    assert host.process.wait(10) == 0
    assert host.process.stderr.read() == b""


def test_a_signal_in_between_does_not_disturb_it(serve: Serve) -> None:
    host = serve()
    for _ in range(20):
        os.kill(host.process.pid, signal.SIGSTOP)
        os.kill(host.process.pid, signal.SIGCONT)
        host.send(ECHO)
        assert host.raw_line() == OK_EMPTY
