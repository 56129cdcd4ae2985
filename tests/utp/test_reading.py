"""Commands, headers and replies, as they are understood."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from broker import errors
from broker.errors import Refusal
from broker.faces.caller import Said
from broker.utp import command, outcome, span, subjects

PLACE = subjects.Place("proj_v", "public", "oracle")
WHOLE = {
    "tool_call_id": "tc",
    "agent_turn_id": "turn",
    "agent_id": "agent",
    "turn_epoch": 7,
    "tool_call_card_id": "card",
    "tool_name": "oracle",
    "after_execution": "suspend",
}


def read(**changes: Any) -> command.Read:
    said = {name: value for name, value in {**WHOLE, **changes}.items() if value is not ...}
    return command.read(json.dumps(said).encode(), PLACE)


def flaw(**changes: Any) -> str:
    found = read(**changes).flaw
    assert found is not None
    return found.message


@pytest.mark.parametrize("epoch", [7, "7", 7.0, "7.0", " 7 "])
def test_a_turn_s_epoch_may_be_said_in_several_ways(epoch: Any) -> None:
    found = read(turn_epoch=epoch)
    assert found.flaw is None
    assert found.command.turn_epoch == 7


def test_a_command_that_is_right_has_no_flaw_and_others_members_are_tolerated() -> None:
    found = read(step_id="step", channel="public", context_box_id="box", dispatch_requested_at=1)
    assert found.flaw is None
    assert (found.command.tool_name, found.command.context_box_id) == ("oracle", "box")


@pytest.mark.parametrize("name", ["tool_call_id", "agent_turn_id", "agent_id", "turn_epoch"])
@pytest.mark.parametrize("value", [..., None, " ", "", {}, [], "a\0b", "\ud800"])
def test_without_one_of_its_names_nobody_can_be_told(name: str, value: Any) -> None:
    with pytest.raises(command.Nameless, match=name):
        read(**{name: value})


@pytest.mark.parametrize("data", [b"", b"junk", b"[1]", b"7", b"\xff\xfe", b"null", b"[" * 100_000])
def test_what_is_no_object_has_no_name(data: bytes) -> None:
    with pytest.raises(command.Nameless, match="not"):
        command.read(data, PLACE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tool_call_card_id": ...}, "missing required fields ['tool_call_card_id']"),
        ({"tool_name": " "}, "missing required fields ['tool_name']"),
        ({"tool_name": None, "after_execution": ""}, "missing required fields ['tool_name', 'after_execution']"),
        ({"after_execution": "explode"}, "invalid after_execution='explode'"),
        ({"args": {}}, "Protocol violation: payload.args is forbidden (use tool_call_card_id)."),
        ({"arguments": None}, "Protocol violation: payload.arguments is forbidden (use tool_call_card_id)."),
        ({"result": None}, "Protocol violation: payload.result is forbidden (use tool_call_card_id)."),
        ({"agent_id": 5}, "missing required fields ['agent_id']"),
        ({"turn_epoch": 7.5}, "missing required fields ['turn_epoch']"),
        ({"tool_call_card_id": 5}, "missing required fields ['unknown']"),
        ({"tool_name": None, "args": 1}, "missing required fields ['tool_name']"),
    ],
)
def test_each_flaw_has_its_words(changes: dict[str, Any], message: str) -> None:
    assert flaw(**changes) == message


@pytest.mark.parametrize(
    ("subject", "place"),
    [
        ("cg.v1r3.p.c.cmd.tool.t.call", subjects.Place("p", "c", "t")),
        ("cg.v1r3.p.c.cmd.tool.t.a.b", subjects.Place("p", "c", "t")),
        ("cg.v1r4.p.c.cmd.tool.t.call", None),
        ("cg.v1r3.p.c.cmd.tool.t", None),
        ("cg.v1r3.p.c.cmd.sys.t.call", None),
        ("cg.v1r3.p.c.evt.tool.t.call", None),
    ],
)
def test_a_subject_says_where_a_command_belongs(subject: str, place: Any) -> None:
    assert subjects.place(subject) == place


@pytest.mark.parametrize("worker", ["", "a b", "*", "a.>", "a..b", ".a", "a\r\nPUB x"])
def test_nobody_is_woken_whose_name_is_no_subject(worker: str) -> None:
    assert subjects.wakeup(PLACE, worker) is None


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.mark.parametrize("said", [PARENT, PARENT.upper(), f" {PARENT} ", f"cc-{TRACE}-00f067aa0ba902b7-00-more"])
def test_a_child_span_is_of_its_parent_s_trace(said: str) -> None:
    child = span.child({"traceparent": said, "tracestate": "a=1"})
    assert (child.trace_id, child.tracestate) == (TRACE, "a=1")
    assert child.traceparent != PARENT
    assert child.traceparent.startswith(f"00-{TRACE}-")
    assert child.traceparent.endswith("-01")


@pytest.mark.parametrize(
    "said",
    ["", "junk", PARENT[:-1], f"ff-{PARENT[3:]}", f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{TRACE}-{'0' * 16}-01"],
)
def test_without_a_parent_that_can_be_understood_there_is_a_new_trace(said: str) -> None:
    child = span.child({"traceparent": said})
    assert len(child.trace_id) == 32
    assert child.trace_id != TRACE


@pytest.mark.parametrize(("said", "depth"), [("3", 3), (" 0 ", 0), ("-1", None), ("x", None), ("", None), ("²", None)])
def test_a_depth_that_cannot_be_understood_is_not_said(said: str, depth: int | None) -> None:
    assert span.depth({"CG-Recursion-Depth": said}) == depth


def test_the_case_of_a_header_s_name_does_not_matter() -> None:
    known = span.known({"Traceparent": PARENT, "cg-recursion-depth": "3", "Tracestate": "a=1", "CG-Sender": "me"})
    assert known == {"traceparent": PARENT, "CG-Recursion-Depth": "3", "tracestate": "a=1", "CG-Sender": "me"}
    assert span.known(None) == {}


def test_what_goes_on_is_what_came_in_the_new_span_and_nothing_of_nats_own() -> None:
    child = span.child({"traceparent": PARENT, "tracestate": "a=1"})
    came = {"traceparent": PARENT, "tracestate": "a=1", "CG-Sender": "me", "Nats-Msg-Id": "1", "CG-Timestamp": "5"}
    onwards = span.onwards(came, child, 2)
    assert onwards == {
        "traceparent": child.traceparent,
        "tracestate": "a=1",
        "CG-Sender": "me",
        "CG-Timestamp": "5",
        "CG-Recursion-Depth": "2",
        "CG-Version": "v1r3",
        "CG-Msg-Type": "dict",
    }


# --- what came of a call ----------------------------------------------------------------------------------------------


def told(**said: Any) -> outcome.Outcome:
    return outcome.of_reply(Said(**{"status": "TOOL_ERROR", **said}), 128)


def test_a_result_is_kept_as_the_tool_wrote_it() -> None:
    found = told(status="OK", ok=True, output_json='{"a":1.10,"b":123456789012345678901234567890}')
    assert found == ("success", Raw(b'{"a":1.10,"b":123456789012345678901234567890}'), None)


def test_what_a_database_cannot_keep_is_replaced_and_all_else_stays() -> None:
    text = r'["\u0000","\\u0000","\ud83d\ude00","\ud83d!","\ude00"]'
    found = told(status="OK", output_json=text).result
    assert bytes(found).decode() == r'["\ufffd","\\u0000","\ud83d\ude00","\ufffd!","\ufffd"]'


@pytest.mark.parametrize(
    "said",
    [
        {"output_json": '{"code":"conflict","message":"taken","detail":[1],"retryable":true}'},
        {"output_json": '{"error":{"code":"conflict","message":"taken","detail":[1],"retryable":true}}'},
        {"error": '{"code":"conflict","message":"taken","detail":[1],"retryable":true}'},
        {"output_json": '{"error_code":"conflict","error_message":"taken","error_detail":[1],"retryable":true}'},
    ],
)
def test_an_error_in_commonground_s_words_is_found_wherever_a_tool_says_it(said: dict[str, Any]) -> None:
    found = told(**said)
    error = {
        "code": "conflict",
        "message": "taken",
        "source": "tool",
        "detail": [1],
        "retryable": True,
        "http_status": 409,
    }
    assert found.status == "failed"
    assert found.error == error
    assert found.result == {
        "error_code": "conflict",
        "error_message": "taken",
        "error": error,
        "error_detail": [1],
    }


@pytest.mark.parametrize(
    ("said", "code", "http"),
    [
        ({"error": "no"}, "internal_error", 500),
        ({"error": "no", "code": "ValueError"}, "bad_request", 400),
        ({"error": "no", "code": "KeyError"}, "not_found", 404),
        ({"error": "no", "code": "PolicyDeniedError"}, "auth_failed", 403),
        ({"error": "no", "code": "RuntimeError"}, "internal_error", 500),
        ({"error": "no", "status": "INVALID_PICK"}, "bad_request", 400),
    ],
)
def test_other_errors_have_the_code_that_fits(said: dict[str, Any], code: str, http: int) -> None:
    assert told(**said).error == {"code": code, "message": "no", "source": "tool", "http_status": http}


def test_what_a_tool_put_out_although_it_failed_is_not_lost() -> None:
    assert told(error="no", output_json='{"half":1}').result["output"] == {"half": 1}


@pytest.mark.parametrize(
    ("kind", "ran", "status", "code", "retryable"),
    [
        (errors.TIMEOUT, True, "timeout", "tool_timeout", None),
        (errors.CRASH, True, "failed", "internal_error", None),
        (errors.OVERLOADED, False, "failed", "upstream_unavailable", True),
        (errors.BREAKER_OPEN, False, "failed", "upstream_unavailable", True),
        (errors.DRAINING, True, "failed", "internal_error", None),
        (errors.FORBIDDEN, False, "failed", "auth_failed", None),
        (errors.LEASE_REQUIRED, False, "failed", "auth_failed", None),
        (errors.BAD_REQUEST, False, "failed", "bad_request", None),
        (errors.NOT_FOUND, False, "failed", "not_found", None),
        (errors.TOO_LARGE, False, "failed", "bad_request", None),
    ],
)
def test_each_refusal_of_the_broker_has_its_code(
    kind: errors.Kind, ran: bool, status: str, code: str, retryable: bool | None
) -> None:
    found = outcome.of_refusal(Refusal(kind, "words", ran=ran), 128)
    assert found.status == status
    assert found.error is not None
    assert found.error["code"] == code
    assert found.error["http_status"] == errors.UTP[code]
    assert found.error.get("retryable") is retryable
