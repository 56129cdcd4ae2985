"""What an agent's worker sees of its calls, on both stores."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.commonground import HEADERS, TRACE, Row
from tests.support.waiting import eventually
from tests.utp.conftest import Stage
from tests.utp.test_vectors import last, wakeups

_calls = iter(f"call_{number}" for number in range(1_000_000))


@pytest.fixture
def call() -> str:
    """A name for it."""
    return next(_calls)


def result(stage: Stage, call: str) -> Row:
    """Its card's content, when the agent has heard of it."""
    eventually(lambda: bool(stage.project.reports(call)))
    (card,) = stage.project.results(call)
    return dict(card["content"])


def asked(stage: Stage, call: str, arguments: Any, target: str = "oracle", **members: Any) -> Row:
    stage.project.ask(call, arguments, target, **members)
    return result(stage, call)


def given_up(stage: Stage, call: str) -> list[Row]:
    return [one for one in stage.status()["given_up"] if one["tool_call_id"] == call]


def acknowledged(stage: Stage) -> None:
    """Nothing is on its way, nothing will come again."""

    def quiet() -> bool:
        info = json.loads(stage.project.client.ask(f"$JS.API.CONSUMER.INFO.cg_cmd_v1r3.{CONSUMER}", b"").data)
        return info["num_ack_pending"] == info["num_pending"] == 0

    eventually(quiet)


CONSUMER = "tool_oracle_cmd_v1r3"


@pytest.mark.parametrize("value", [{"n": 1}, [1, "two"], "text", 3, 2.5, True, None, {}, "", {"é": "ü\u2028"}])
def test_a_result_is_whatever_the_tool_returned(stage: Stage, call: str, value: Any) -> None:
    content = asked(stage, call, {"value": value})
    assert content == {
        "__type__": "ToolResultContent",
        "status": "success",
        "after_execution": "suspend",
        "result": value,
        "error": None,
    }


@pytest.mark.parametrize(
    ("do", "code", "http", "message"),
    [
        ("bad_request", "bad_request", 400, "q is required"),
        ("value_error", "bad_request", 400, "no such thing"),
        ("key_error", "not_found", 404, "'x'"),
        ("boom", "internal_error", 500, "boom"),
    ],
)
def test_an_error_of_the_tool_is_a_failed_result(
    stage: Stage, call: str, do: str, code: str, http: int, message: str
) -> None:
    content = asked(stage, call, {"do": do})
    assert content["status"] == "failed"
    error = content["error"]
    assert (error["code"], error["http_status"], error["message"], error["source"]) == (code, http, message, "tool")
    assert (content["result"]["error_code"], content["result"]["error_message"]) == (code, message)
    assert content["result"]["error"] == error


def test_a_tool_that_dies_is_a_failed_result(stage: Stage, call: str) -> None:
    content = asked(stage, call, {"do": "die"})
    assert content["error"]["code"] == "internal_error"
    assert "exited with code 3" in content["error"]["message"]


def test_a_tool_that_is_late_has_timed_out(stage: Stage, call: str) -> None:
    content = asked(stage, call, {"do": "sleep", "seconds": 30}, "impatient")
    assert (content["status"], content["error"]["code"]) == ("timeout", "tool_timeout")
    assert content["error"]["http_status"] == 504
    assert stage.project.reports(call)[0]["payload"]["status"] == "timeout"


def test_a_target_whose_tool_is_not_there_says_so(stage: Stage, call: str) -> None:
    content = asked(stage, call, {}, "nowhere")
    assert content["error"]["code"] == "not_found"
    assert "no_such_tool" in content["error"]["message"]


def test_control_in_a_result_stays_where_it_is_and_the_command_s_word_is_told_back(stage: Stage, call: str) -> None:
    value = {"__cg_control": {"after_execution": "terminate"}}
    content = asked(stage, call, {"value": value})
    assert content["result"] == value
    assert content["after_execution"] == "suspend"
    assert stage.project.reports(call)[0]["payload"]["after_execution"] == "suspend"


def test_terminate_is_told_back(stage: Stage, call: str) -> None:
    assert asked(stage, call, {}, after_execution="terminate")["after_execution"] == "terminate"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"tool_name": None}, "missing required fields ['tool_name']"),
        ({"after_execution": " "}, "missing required fields ['after_execution']"),
        ({"after_execution": "explode"}, "invalid after_execution='explode'"),
        ({"args": None}, "Protocol violation: payload.args is forbidden (use tool_call_card_id)."),
    ],
)
def test_a_flawed_command_is_told_of_and_the_agent_finds_it_by_its_step(
    stage: Stage, call: str, members: Row, message: str
) -> None:
    content = asked(stage, call, {"id": call}, **members)
    assert content["error"]["code"] == "bad_request"
    assert content["error"]["message"] == message
    (card,) = stage.project.results(call)
    assert (card["metadata"]["step_id"], card["metadata"]["trace_id"]) == ("step_1", TRACE)
    assert stage.project.reports(call)[0]["payload"]["step_id"] == "step_1"
    assert stage.runs(call) == 0


def test_a_command_without_a_card_is_told_of(stage: Stage, call: str) -> None:
    stage.project.say(stage.project.command(call, tool_call_card_id=...))
    content = result(stage, call)
    assert content["error"]["message"] == "missing required fields ['tool_call_card_id']"
    assert stage.project.reports(call)[0]["payload"]["step_id"] is None


@pytest.mark.parametrize("content", [{"__type__": "TextContent", "text": "hello"}, {"arguments": {}}, "text", None, []])
def test_a_card_that_is_no_tool_call_is_refused(stage: Stage, call: str, content: Any) -> None:
    stage.project.put_card(f"card_{call}", content, {"type": "tool.call", "step_id": "step_9"}, call)
    stage.project.put_edge(call)
    stage.project.say(stage.project.command(call))
    error = result(stage, call)["error"]
    assert (error["code"], error["message"]) == ("bad_request", "tool.call content must be ToolCallContent")
    assert error["detail"] == {"card_id": f"card_{call}"}
    assert stage.project.reports(call)[0]["payload"]["step_id"] == "step_9"


@pytest.mark.parametrize("depth", [200, 3000])
def test_arguments_that_are_nested_too_deeply_are_refused(stage: Stage, call: str, depth: int) -> None:
    nested = f'{{"__type__":"ToolCallContent","arguments":{{"value":{"[" * depth}{"]" * depth}}}}}'
    row = {"card_id": f"card_{call}", "tenant_id": "proj_v", "tool_call_id": call, "content": nested}
    stage.tables.insert("cards", {**row, "metadata": {"type": "tool.call", "step_id": "step_1"}})
    stage.project.put_edge(call)
    stage.project.say(stage.project.command(call))
    assert result(stage, call)["error"]["code"] == "bad_request"
    assert stage.runs(call) == 0


def test_another_project_s_card_is_not_read(stage: Stage, call: str) -> None:
    metadata = {"type": "tool.call"}
    content = {"__type__": "ToolCallContent", "arguments": {"value": "theirs"}}
    row = {
        "card_id": f"card_{call}",
        "tenant_id": "proj_other",
        "tool_call_id": call,
        "content": content,
        "metadata": metadata,
    }
    stage.tables.insert("cards", row)
    stage.project.say(stage.project.command(call))
    assert result(stage, call)["error"]["code"] == "not_found"


def test_redelivered_after_its_card_was_written_a_call_is_reported_and_not_run_again(stage: Stage, call: str) -> None:
    project = stage.project
    content = {"__type__": "ToolResultContent", "status": "success", "after_execution": "suspend", "result": 1}
    project.put_card(f"result_{call}", content, {"type": "tool.result", "step_id": "step_1"}, call)
    before = last(project)
    project.ask(call, {"id": call})
    eventually(lambda: len(wakeups(project, before)) == 1)
    (report,) = project.reports(call)
    assert report["payload"]["tool_result_card_id"] == f"result_{call}"
    assert report["payload"]["status"] == "success"
    assert project.entry(call)["payload"] == report["payload"]
    assert len(project.results(call)) == 1
    assert stage.runs(call) == 0


def test_what_another_executor_has_done_is_reported_again(stage: Stage, call: str) -> None:
    project = stage.project
    asked(stage, call, {"id": call})
    before = last(project)
    project.say(project.command(call))
    eventually(lambda: len(wakeups(project, before)) == 1)
    assert stage.runs(call) == 1
    assert len(project.reports(call)) == len(project.results(call)) == 1


@pytest.mark.parametrize(("said", "requested"), [("20", 20), ("3", 1), ("1", 25), ("99", 99)])
def test_a_depth_that_is_not_the_request_s_or_too_deep_is_not_reported(
    stage: Stage, call: str, said: str, requested: int
) -> None:
    project = stage.project
    project.put_call(call, {"id": call})
    project.put_edge(call, requested)
    before = last(project)
    project.say(project.command(call), headers={**HEADERS, "CG-Recursion-Depth": said})
    eventually(lambda: bool(given_up(stage, call)))
    assert "recursion depth" in given_up(stage, call)[0]["reason"]
    acknowledged(stage)
    assert project.reports(call) == []
    assert [edge["primitive"] for edge in project.edges(call)] == ["tool_call"]
    assert wakeups(project, before) == []
    assert len(project.results(call)) == 1


def test_without_a_depth_the_request_s_holds(stage: Stage, call: str) -> None:
    project = stage.project
    project.put_call(call, {})
    project.put_edge(call, 4)
    before = last(project)
    project.say(project.command(call), headers={"traceparent": HEADERS["traceparent"]})
    result(stage, call)
    assert [edge["recursion_depth"] for edge in project.edges(call)] == [4, 4]
    eventually(lambda: len(wakeups(project, before)) == 1)
    headers = wakeups(project, before)[0]["headers"]
    assert headers["CG-Recursion-Depth"] == "4"
    assert headers["CG-Version"] == "v1r3"
    assert headers["CG-Timestamp"].isdigit()


def test_a_missing_request_s_edge_is_filled_in(stage: Stage, call: str) -> None:
    stage.project.put_call(call, {})
    stage.project.say(stage.project.command(call))
    result(stage, call)
    request, response = stage.project.edges(call)
    assert (request["primitive"], request["edge_phase"]) == ("tool_call", "request")
    assert (request["source_agent_id"], request["target_agent_id"]) == ("agent_a", "agent_a")
    assert (request["recursion_depth"], request["parent_step_id"], request["trace_id"]) == (1, "step_1", TRACE)
    assert request["metadata"]["tool_call_id"] == call
    assert (response["primitive"], response["recursion_depth"]) == ("report", 1)


def test_nobody_is_woken_for_an_agent_that_is_not_in_the_roster(stage: Stage, call: str) -> None:
    project = stage.project
    before = last(project)
    asked(stage, call, {}, agent_id="agent_nobody_knows")
    acknowledged(stage)
    assert project.reports(call)[0]["agent_id"] == "agent_nobody_knows"
    assert wakeups(project, before) == []


@pytest.mark.parametrize("said", ["junk", "00-0-0-00", ""])
def test_a_malformed_traceparent_begins_a_new_trace(stage: Stage, call: str, said: str) -> None:
    project = stage.project
    project.put_call(call, {})
    project.put_edge(call)
    project.say(project.command(call), headers={**HEADERS, "traceparent": said})
    result(stage, call)
    (report,) = project.reports(call)
    assert len(report["trace_id"]) == 32
    assert report["trace_id"] != TRACE
    assert report["traceparent"].startswith(f"00-{report['trace_id']}-")
    assert project.results(call)[0]["metadata"]["trace_id"] == TRACE


@pytest.mark.parametrize("data", [b"junk", b"[]", b'{"tool_call_id":"x"}', b""])
def test_a_command_that_names_nobody_is_given_up_and_shown_to_the_operator(stage: Stage, data: bytes) -> None:
    before = stage.status()["given_up"]
    stage.project.say(data)
    eventually(lambda: len(stage.status()["given_up"]) == len(before) + 1)
    record = stage.status()["given_up"][-1]
    assert record["subject"] == stage.project.subject("oracle")
    assert record["sequence"] == last(stage.project)
    assert "nobody can be told" in record["reason"]
    acknowledged(stage)


def test_what_postgres_cannot_keep_does_not_lose_the_result(stage: Stage, call: str) -> None:
    content = asked(stage, call, {"do": "nul"})
    assert content["result"] == ["a\ufffdb", "\ufffd"]


def test_many_commands_at_once_are_each_answered_once(stage: Stage) -> None:
    project, calls = stage.project, [f"many_{number}" for number in range(60)]
    for one in calls:
        project.put_call(one, {"id": one, "value": one})
        project.put_edge(one)
    for one in calls:
        project.say(project.command(one))
        project.say(project.command(one))
    eventually(lambda: all(project.reports(one) for one in calls), 30)
    acknowledged(stage)
    for one in calls:
        (card,) = project.results(one)
        assert card["content"]["result"] == one
        assert stage.runs(one) == 1
        assert len(project.reports(one)) == 1


def test_the_status_shows_targets_and_counts(stage: Stage, call: str) -> None:
    asked(stage, call, {})
    status = stage.status()
    assert status["store"]["kind"] == stage.tables.kind
    assert "a-password" not in json.dumps(status)
    target = next(one for one in status["targets"] if one["target"] == "oracle")
    assert (target["tool"], target["state"]) == ("oracle", "serving")
    assert target["counts"]["success"] >= 1
