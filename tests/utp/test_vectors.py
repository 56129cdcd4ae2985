"""Recorded exchanges of CommonGround's own executors, said again to ours: what it writes has to be the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.commonground import Project, Row
from tests.support.waiting import eventually
from tests.utp.conftest import Stage

VECTORS = Path(__file__).parent.parent / "vectors"
NAMES = ["01_success_word_count", "04_error_bad_request_detail", "09_card_not_found", "14_duplicate_delivery"]
PLACEHOLDERS = {
    "<RESULT_CARD_ID>": r"[0-9a-f]{32}",
    "<INBOX_ID>": r"inbox_[0-9a-f]{32}",
    "<NEW_SPAN_ID>": r"(?!00f067aa0ba902b7)[0-9a-f]{16}",
    "<ISO8601_UTC>": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\+00:00",
    "<MS_EPOCH>": r"\d{13}",
    "<EPOCH_S>": r"\d{10}(\.\d+)?",
}


def same(expected: Any, found: Any, at: str = "") -> None:
    """Members beside the expected ones are columns that the recording leaves out."""
    if isinstance(expected, str) and "<" in expected:
        pattern = re.escape(expected)
        for name, form in PLACEHOLDERS.items():
            pattern = pattern.replace(re.escape(name), form)
        assert re.fullmatch(pattern, str(found)), f"{at}: {found!r} is no {expected}"
    elif isinstance(expected, dict):
        assert isinstance(found, dict), f"{at}: {found!r}"
        for name, one in expected.items():
            assert name in found, f"{at}.{name} is missing"
            same(one, found[name], f"{at}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), f"{at}: {found}"
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            same(one, other, f"{at}[{number}]")
    else:
        assert found == expected, f"{at}: {found!r}, expected {expected!r}"


def wakeups(project: Project, after: int) -> list[Row]:
    """What the stream has of them since then."""

    async def read() -> list[Row]:
        js = project.client.nats.jetstream()
        info = await js.stream_info("cg_cmd_v1r3")
        found = []
        for number in range(after + 1, info.state.last_seq + 1):
            message = await js.get_msg("cg_cmd_v1r3", number)
            if message.subject.endswith(".wakeup"):
                said = {"subject": message.subject, "headers": message.headers, "payload": json.loads(message.data)}
                found.append(said)
        return found

    return project.client.run(read())


def last(project: Project) -> int:
    return int(project.client.run(project.client.nats.jetstream().stream_info("cg_cmd_v1r3")).state.last_seq)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_commonground_s_own_executor_wrote(stage: Stage, name: str) -> None:
    vector = json.loads((VECTORS / f"utp_{name}.json").read_text())
    given, expected = vector["input"], vector["expect"]
    project, command = stage.project, given["command"]
    call, target, before = command["tool_call_id"], command["tool_name"], last(project)
    if given["tool_call_card_row"] is not None:
        project.tables.insert("cards", given["tool_call_card_row"])
    project.put_edge(call)
    do = given["tool_call_card_row"]["content"]["arguments"].get("do", "") if given["tool_call_card_row"] else ""
    runs = stage.runs(do)
    for _ in range(given["published_times"]):
        project.say(command, target)
    eventually(lambda: len(wakeups(project, before)) >= len(expected["wakeups"]))
    cards = project.results(call)
    same(expected["tool_result_card_rows"], cards)
    assert set(cards[0]["metadata"]) == set(expected["tool_result_card_rows"][0]["metadata"])
    assert cards[0]["content"] == expected["tool_result_card_rows"][0]["content"]
    same(expected["inbox_rows"], project.reports(call))
    same(expected["execution_edges"], project.edges(call))
    same(expected["wakeups"], wakeups(project, before))
    same(expected["idempotency_kv"]["value"], project.entry(call, target))
    payload = project.reports(call)[0]["payload"]
    assert payload == project.entry(call, target)["payload"]
    assert payload["tool_result_card_id"] == cards[0]["card_id"]
    if expected["tool_runs"] is not None:
        assert stage.runs(do) - runs == expected["tool_runs"]


def test_streams_consumers_and_bucket_are_made_as_recorded(stage: Stage) -> None:
    """Without what newer servers say of themselves."""
    vector = json.loads((VECTORS / "utp_00_jetstream_config.json").read_text())
    client = stage.project.client
    stage.project.ask("for the bucket", {})
    eventually(lambda: bool(stage.project.results("for the bucket")))

    def config(subject: str) -> Row:
        return json.loads(client.ask(f"$JS.API.{subject}", b"").data)["config"]

    for name in ("cmd_stream", "evt_stream", "kv_stream"):
        found = config(f"STREAM.INFO.{vector[name]['name']}")
        assert {key: found.get(key, value) for key, value in vector[name].items()} == vector[name]
    expected = {key: value for key, value in vector["consumer"].items() if value}
    found = config(f"CONSUMER.INFO.cg_cmd_v1r3.{expected['name']}")
    assert {key: found.get(key) for key in expected} == expected
