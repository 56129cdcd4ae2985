"""CONTRACT §2 and §3: the Machina line protocol as the broker speaks it, from outside."""

from __future__ import annotations

import json
import socket

import pytest

ECHO = "AID.DEMO.ECHO.v1"
STATE = "AID.DEMO.STATE.v1"
MB = 1024 * 1024


def echo(n, **more):
    return {"aid": ECHO, "input_json": json.dumps({"n": n}), **more}


def output(reply):
    assert reply["status"] == "OK", reply
    return json.loads(reply["output_json"])


def test_a_reply_has_the_members_of_the_seed(shared):
    with shared.wire() as wire:
        wire.send(echo(1))
        assert wire.raw() == (
            b'{"ok":true,"status":"OK","output_json":"{\\"n\\": 1}","error":"",'
            b'"ds_state":{"delta":true,"slots":{},"removed_slots":[]}}'
        )


@pytest.mark.parametrize("value", [0, -1.5, "x", "ü\n", None, True, [1, {"a": None}], {"a": [1]}, ""])
def test_any_json_value_is_an_id_and_comes_back_first_and_unchanged(shared, value):
    with shared.wire() as wire:
        wire.send(echo(1, id=value))
        line = wire.raw()
    assert line.startswith(b'{"id":' + json.dumps(value).encode() + b",")
    assert json.loads(line)["id"] == value


def test_replies_without_id_keep_the_order_of_their_requests(shared):
    with shared.wire() as wire:
        wire.send(
            {"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":150}'},
            b"junk\n",
            echo(1),
            {"aid": "NOPE"},
            {"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":1}'},
            echo(2),
        )
        replies = wire.replies(6)
    assert [reply.get("error") for reply in replies] == ["", "invalid JSON", "", "tool not found: NOPE", "", ""]
    assert output(replies[2]) == {"n": 1}
    assert output(replies[5]) == {"n": 2}


def test_a_reply_with_an_id_may_overtake_and_execution_is_concurrent(shared):
    with shared.wire() as wire:
        wire.send({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":400}', "id": "slow"}, echo(1, id="fast"))
        assert [wire.reply()["id"], wire.reply()["id"]] == ["fast", "slow"]


def test_mixed_ids_and_order_on_one_connection(shared):
    with shared.wire() as wire:
        wire.send(*(echo(n, **({"id": n} if n % 3 else {})) for n in range(300)))
        replies = wire.replies(300)
    assert [output(r)["n"] for r in replies if "id" not in r] == [n for n in range(300) if n % 3 == 0]
    assert all(output(r)["n"] == r["id"] for r in replies if "id" in r)


def test_inputs_stand_for_input_json_and_both_are_refused(shared):
    with shared.wire() as wire:
        reply = wire.ask({"aid": ECHO, "inputs": {"text": 'a "quoted" \\ line\n', "x": [1, 2.5, None]}})
        assert output(reply) == {"text": 'a "quoted" \\ line\n', "x": [1, 2.5, None]}
        reply = wire.ask({"aid": ECHO, "inputs": {}, "input_json": "{}", "id": 4})
    assert (reply["id"], reply["type"], reply["status"], reply["ok"]) == (4, "bad_request", "INVALID_PICK", False)


def test_input_json_defaults_to_an_empty_object(shared):
    assert shared.ask({"aid": ECHO})["output_json"] == "{}"


def test_refusals_have_the_words_of_the_seed(shared):
    with shared.wire() as wire:
        assert wire.ask(b"nope\n")["error"] == "invalid JSON"
        assert wire.ask({"input_json": "{}"})["error"] == "missing aid"
        reply = wire.ask({"aid": "AID.NO.SUCH.v1"})
    assert reply == {
        "ok": False,
        "status": "INVALID_PICK",
        "error": "tool not found: AID.NO.SUCH.v1",
        "type": "not_found",
        "aid": "AID.NO.SUCH.v1",
    }


@pytest.mark.parametrize(
    "line",
    [
        b'{"aid":"AID.DEMO.ECHO.v1","aid":"AID.DEMO.FAIL.v1"}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","\\u0061id":"AID.DEMO.FAIL.v1"}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","aid\\u0000":"AID.DEMO.FAIL.v1"}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","input_json":"{}","input_json":"{}"}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","input_json":{}}\n',
        b'{"aid":7}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","ds_state":"x"}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","ds_state":{"delta":1,"slots":{}}}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","ds_state":{"slots":{"256":{}}}}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","timeout_ms":0}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","timeout_ms":-1}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","timeout_ms":1.5}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","timeout_ms":"1"}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","idempotency_key":null}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","session":5}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","stream":true}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","inputs":[]}\n',
        b"[]\n",
        b"null\n",
        b" \n",
        b"\xef\xbb\xbf{}\n",
        b'{"aid":"AID.DEMO.ECHO.v1","x":"\x00"}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","x":"\xff\xfe"}\n',
        b'{"aid":"AID.DEMO.ECHO.v1","x":"\\ud800"}\n',
        b"\x00\x00\x00\n",
        b"[" * 100_000 + b"\n",
        b'{"aid":"AID.DEMO.ECHO.v1","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        b'{"a":' * 100_000 + b"\n",
    ],
    ids=lambda line: line[:60].decode("latin-1"),
)
def test_a_bad_line_gets_one_clear_refusal_and_the_next_line_works(shared, line):
    with shared.wire() as wire:
        wire.send(line, echo(1))
        refusal = wire.reply()
        assert refusal["ok"] is False
        assert refusal["type"] == "bad_request"
        assert output(wire.reply()) == {"n": 1}
        assert wire.quiet()


def test_escaped_names_are_understood_and_what_a_toolhost_must_not_see_is_taken_out(start, tmp_path):
    """The toolhost here repeats the line that it got."""
    spy = tmp_path / "spy"
    spy.write_text(
        """#!/usr/bin/env python3
import json, sys
if sys.argv[1] == "--list":
    print('{"ok":true,"tools":[{"aid":"AID.SPY.v1"}]}', end="")
    sys.exit()
for line in sys.stdin:
    print(json.dumps({"ok": True, "status": "OK", "output_json": line.strip(), "error": "", "id": "mine"}), flush=True)
"""
    )
    spy.chmod(0o755)
    broker = start("--toolhost", str(spy))
    with broker.wire() as wire:
        reply = wire.ask(
            b'{"id":1,"\\u0061id":"AID.SPY.\\u0076\\u0031","idempotency_key":"k","_lease_token":"t","session":"s",'
            b'"timeout_ms":900,"stream":false,"traceparent":"x","run_id":"r","request_id":"q","unknown":{"a":[1]},'
            b'"input_json":"{}"}\n'
        )
        assert reply["id"] == 1
        assert json.loads(reply["output_json"]) == {
            "ds_state": {"slots": {}},
            "aid": "AID.SPY.v1",
            "unknown": {"a": [1]},
            "input_json": "{}",
        }
        assert reply["output_json"].count("aid") == 1
        assert "id" not in wire.ask({"aid": "AID.SPY.v1"})


def test_crlf_is_tolerated_and_an_unterminated_last_line_is_a_line(shared):
    with shared.wire() as wire:
        wire.send(json.dumps(echo(1)).encode() + b"\r\n", json.dumps(echo(2)).encode())
        assert output(wire.reply()) == {"n": 1}
        wire.socket.shutdown(socket.SHUT_WR)
        assert output(wire.reply()) == {"n": 2}
        assert wire.ended()


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", None], ids=["empty line", "empty line, CRLF", "half-close"])
def test_a_graceful_close_sends_what_is_outstanding_first(shared, ending):
    with shared.wire() as wire:
        wire.send({"aid": "AID.DEMO.SLEEP.v1", "input_json": '{"ms":200}'}, echo(1))
        if ending is None:
            wire.socket.shutdown(socket.SHUT_WR)
        else:
            wire.send(ending, echo(2))
        assert [reply["status"] for reply in wire.replies(2)] == ["OK", "OK"]
        assert wire.ended()


def test_half_a_line_and_a_hang_up_disturb_nobody(shared):
    for cut in (1, 10, 30):
        with shared.wire() as wire:
            wire.send(json.dumps(echo(1)).encode()[:cut])
    with shared.wire() as wire:
        wire.send(json.dumps(echo(1)).encode()[:20])
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.reply()["error"] == "invalid JSON"
        assert wire.ended()
    assert output(shared.ask(echo(3))) == {"n": 3}


def padded(size):
    """A request line of exactly `size` bytes."""
    head, tail = b'{"aid":"AID.DEMO.WORD_COUNT.v1","input_json":"{\\"text\\":\\"', b'\\"}"}'
    return head + b"x" * (size - len(head) - len(tail)) + tail


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_request_line_may_have_ten_megabytes_and_not_one_byte_more(shared, end):
    with shared.wire() as wire:
        wire.send(padded(10 * MB) + end)
        reply = wire.reply()
        assert reply["status"] in ("OK", "TOOL_ERROR")  # its result may be too large; the request was taken
        assert reply.get("type") != "too_large"
        wire.send(padded(10 * MB + 1) + end, echo(1))
        reply = wire.reply()
        assert (reply["type"], reply["ok"]) == ("too_large", False)
        assert "10485760" in reply["error"]
        assert "limits.request_bytes" in reply["error"]
        assert output(wire.reply()) == {"n": 1}


def test_the_refusal_of_an_oversize_line_has_its_id_where_the_id_came_first(shared):
    with shared.wire() as wire:
        wire.send(b'{"id":"big","aid":"x","pad":"' + b"x" * (10 * MB) + b'"}\n')
        reply = wire.reply()
    assert (reply["id"], reply["type"]) == ("big", "too_large")


def test_a_reply_line_may_have_one_megabyte_and_not_one_byte_more(shared):
    """The reply around BLOB's output has a fixed size, so its line can be made exact."""
    with shared.wire() as wire:
        wire.send({"aid": "AID.DEMO.BLOB.v1", "input_json": '{"bytes":1000}'})
        around = len(wire.raw()) - 1000
        for extra, verdict in ((0, "OK"), (1, "TOOL_ERROR")):
            size = MB - around + extra
            wire.send({"aid": "AID.DEMO.BLOB.v1", "input_json": json.dumps({"bytes": size}), "id": 1})
            reply = wire.reply()
            assert reply["status"] == verdict
            if verdict == "OK":
                assert len(reply["output_json"]) == size
            else:
                assert reply["type"] == "reply_too_large"
                assert "1048576" in reply["error"]
                assert "limits.reply_bytes" in reply["error"]
            assert output(wire.ask(echo(1))) == {"n": 1}
    assert shared.counts().get("crash", 0) == 0


@pytest.mark.parametrize("piece", [b'\\"', b'","', b"x"])
def test_inputs_may_fill_the_cap_though_they_grow_when_they_become_a_string(shared, piece):
    head, tail = b'{"aid":"AID.DEMO.COUNTER.v1","inputs":{"x":["', b'"]}}'
    room = 10 * MB - len(head) - len(tail)
    body = piece * (room // len(piece))
    with shared.wire() as wire:
        for extra, kind in ((0, None), (len(piece), "too_large")):
            filled = head + body + piece * (extra // len(piece)) + tail
            wire.send(filled + b" " * (10 * MB - len(filled)) + b"\n")
            assert wire.reply().get("type") == kind
        assert output(wire.ask(echo(1))) == {"n": 1}


def test_depth_is_bounded_at_128_levels(shared):
    with shared.wire() as wire:
        for levels, kind in ((127, "OK"), (128, "INVALID_PICK")):
            wire.send(b'{"aid":"AID.DEMO.ECHO.v1","x":' + b"[" * levels + b"]" * levels + b"}\n")
            assert wire.reply()["status"] == kind


def test_a_tool_that_fails_says_so_and_ok_is_false(shared):
    reply = shared.call("AID.DEMO.FAIL.v1", error="no luck")
    assert (reply["ok"], reply["status"], reply["error"]) == (False, "TOOL_ERROR", "no luck")


def test_tcp_speaks_the_same_lines(start, where):
    from tests.conftest import Wire

    broker = start("--plugin", where["demo_plugin"], "--tcp", "127.0.0.1:0")
    port = int(broker.ready.split("tcp:127.0.0.1:")[1].split()[0])
    with Wire(("127.0.0.1", port)) as wire:
        assert wire.ask({"aid": "_auth", "token": "whatever"})["ok"] is True
        assert output(wire.ask(echo(1))) == {"n": 1}


def test_operators_words_are_refused_on_the_callers_socket(shared):
    for aid in ("_status", "_reload"):
        assert shared.ask({"aid": aid})["type"] == "forbidden"
