"""The event protocol, without a process: which lines are events, and what a stream of them comes to."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from broker.policy.story import Story
from broker.runtimes.events.protocol import Asset, Log, StatePatch, Stream, Violation, understood
from broker.runtimes.events.report import Report
from broker.runtimes.events.shown import shown
from tests.support.event_tools import event, line, played

VECTORS = Path(__file__).parent.parent / "vectors"
STREAMS = json.loads((VECTORS / "narratoria_streams.json").read_text())
MERGES = json.loads((VECTORS / "narratoria_merge.json").read_text())


@pytest.mark.parametrize("vector", MERGES, ids=lambda vector: vector["id"])
def test_recorded_merges(vector):
    story = Story(json.dumps(vector["base"]).encode())
    for patch in vector["patches"]:
        assert story.patch(json.dumps(patch).encode(), 1 << 20) == ""
    assert json.loads(story.text) == vector["expect"]


CUTS = {
    "as it is": lambda data: [data],
    "byte by byte": lambda data: [data[i : i + 1] for i in range(len(data))],
    "CRLF": lambda data: [data.replace(b"\n", b"\r\n")],
    "without its last line end": lambda data: [data.rstrip(b"\n")],
    "with empty lines": lambda data: [data.replace(b"\n", b"\n\n \r\n")],
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("vector", STREAMS, ids=lambda vector: vector["id"])
def test_recorded_streams(vector, cut):
    data = "".join(one + "\n" for one in vector["stdout_lines"]).encode()
    events, verdict = played(CUTS[cut](data), vector["exit_code"])
    story = Story(json.dumps(vector["initial_state"]).encode())
    for one in events:
        if isinstance(one.body, StatePatch):
            story.patch(bytes(one.body.patch), 1 << 20)
    assert verdict.name == vector["expect"]["verdict"]
    assert json.loads(story.text) == vector["expect"]["final_state"]


GOOD = [
    event("log", level="debug", message=""),
    event("log", level="error", message="m", fields={"a": [1]}, ok=False),
    event("state_patch", patch={}),
    event("asset", assetId="a", kind="k", mediaType="image/png", path="/x", metadata={"w": 1}),
    event("asset", assetId="", kind="", mediaType="odd", path=""),
    event("ui_event", event="anything"),
    event("ui_event", event="narrative_choice", payload={"choices": []}),
    event("error", errorCode="E", errorMessage="m", details={}),
    event("done", ok=True),
    event("done", ok=False, summary="s", requestId="r", timestamp="2026-01-24T00:00:00Z", more=[None]),
]


@pytest.mark.parametrize("good", GOOD, ids=json.dumps)
def test_what_an_event_is(good):
    text = json.dumps(good).encode()
    assert understood(text, 128).line == text


BAD = [
    ({"type": "done", "ok": True}, "an event has no version"),
    ({"version": None, "type": "done", "ok": True}, 'version of an event must be "0", not null'),
    ({"version": 0, "type": "done", "ok": True}, 'must be "0", not 0'),
    ({"version": "1", "type": "done", "ok": True}, 'must be "0", not "1"'),
    ({"version": "0", "ok": True}, "an event has no type"),
    ({"version": "0", "type": None}, "Unknown event type: null"),
    ({"version": "0", "type": 1}, "Unknown event type: 1"),
    (event("progress"), 'Unknown event type: "progress"'),
    (event("Done", ok=True), 'Unknown event type: "Done"'),
    (event("done"), "missing required field `ok`"),
    (event("done", ok=1), "expected `bool`, got `int` - at `$.ok`"),
    (event("done", ok="true"), "expected `bool`"),
    (event("done", ok=True, summary=5), "$.summary"),
    (event("log", level="info"), "missing required field `message`"),
    (event("log", message="m"), "missing required field `level`"),
    (event("log", level="fatal", message="m"), "$.level"),
    (event("log", level="info", message=None), "$.message"),
    (event("log", level="info", message="m", fields=[]), "$.fields"),
    (event("state_patch"), "missing required field `patch`"),
    (event("state_patch", patch=[]), "$.patch"),
    (event("state_patch", patch=None), "$.patch"),
    (event("asset", kind="k", mediaType="m", path="/x"), "missing required field `assetId`"),
    (event("asset", assetId=1, kind="k", mediaType="m", path="/x"), "$.assetId"),
    (event("asset", assetId="a", kind="k", path="/x"), "missing required field `mediaType`"),
    (event("asset", assetId="a", kind="k", mediaType="m"), "missing required field `path`"),
    (event("ui_event", payload={}), "missing required field `event`"),
    (event("ui_event", event="e", payload="p"), "$.payload"),
    (event("error", errorMessage="m"), "missing required field `errorCode`"),
    (event("error", errorCode="E"), "missing required field `errorMessage`"),
    (event("error", errorCode="E", errorMessage="m", details=1), "$.details"),
    (event("done", ok=True, requestId=7), "$.requestId"),
    ([event("done", ok=True)], "not a JSON object"),
    ("text", "not a JSON object"),
]


@pytest.mark.parametrize(("bad", "words"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_what_no_event_is_and_why(bad, words):
    with pytest.raises(Violation) as violation:
        understood(json.dumps(bad).encode(), 128)
    assert words in str(violation.value)


@pytest.mark.parametrize("junk", [b"hello", b"{", b'{"version":"0"', b"\xff\xfe", b"{}{}", b"NaN"])
def test_a_line_that_is_not_json_ends_the_invocation(junk):
    events, verdict = played([line("state_patch", patch={"a": 1}) + b"\n" + junk + b"\n" + line("done", ok=True)])
    assert len(events) == 1
    assert verdict.name == "protocol_failure"
    assert "a line is not JSON" in verdict.reason


def test_nothing_after_done_counts_whatever_it_is():
    after = [line("done", ok=False), line("state_patch", patch={"a": 1}), b"junk", line("progress")]
    events, verdict = played([b"\n".join([line("done", ok=True), *after])])
    assert [one.body.ok for one in events] == [True]
    assert verdict.name == "success"


def test_a_repeated_asset_id_is_a_violation_in_one_invocation_only():
    asset = line("asset", assetId="a", kind="k", mediaType="image/png", path="/x")
    _, verdict = played([asset + b"\n" + asset + b"\n" + line("done", ok=True)])
    assert verdict.name == "protocol_failure"
    assert "assetId a is used twice" in verdict.reason
    assert played([asset + b"\n" + line("done", ok=True)])[1].name == "success"


def test_a_line_over_the_cap_is_a_violation_before_it_has_ended():
    stream = Stream(1000, 128)
    assert stream.feed(b"x" * 900) == []
    assert not stream.violation
    assert stream.feed(b"x" * 200) == []
    assert "over 1000 bytes (limits.reply_bytes)" in stream.violation
    fits = line("log", level="info", message="m").ljust(1000)
    assert len(played([fits + b"\r\n"], most=1000)[0]) == 1


def test_how_a_process_ends_decides_over_done():
    done = [line("done", ok=True)]
    assert played(done, 7)[1] == ("protocol_failure", "Process exited with code 7", True)
    assert played(done, None)[1] == ("protocol_failure", "Process was killed by SIGKILL", True)
    assert played([line("done", ok=False)])[1] == ("failed", "Tool reported failure", False)
    assert played([line("done", ok=False, summary="no")])[1].reason == "no"
    assert played([])[1].reason == "Missing done event (protocol violation)"


def test_values_stay_as_they_were_written():
    story = Story()
    numbers = b'"n":1.0,"big":123456789012345678901234567890,"tiny":1e-400'
    assert story.patch(b"{" + numbers + b', "a": [ {"x": null} ]}', 999) == ""
    assert story.patch(b'{"o": {"gone": null, "k": {"deep": null}}}', 999) == ""
    assert numbers in story.text
    assert json.loads(story.text)["a"] == [{"x": None}]
    assert json.loads(story.text)["o"] == {"k": {}}


def test_a_patch_that_would_make_the_state_too_large_changes_nothing():
    story = Story(b'{"a":1}')
    assert "over 50 bytes (limits.state_bytes)" in story.patch(json.dumps({"a": 2, "b": "x" * 60}).encode(), 50)
    assert story.text == b'{"a":1}'
    assert story.patch(b'{"a":null}', 50) == ""
    assert story.text == b"{}"


def test_choices_have_one_form_and_what_is_unknown_a_placeholder():
    def of(type_, **members):
        return json.loads(msgspec.json.encode(shown(understood(line(type_, **members), 128).body)))

    both = {"prompt": "Where?", "choices": ["north", {"id": "s", "label": "south", "hint": "cold"}]}
    assert of("ui_event", event="narrative_choice", payload=both) == {
        "choice": {
            "prompt": "Where?",
            "choices": [{"id": "north", "label": "north"}, {"id": "s", "label": "south", "hint": "cold"}],
        }
    }
    for payload in ({}, {"choices": "north"}, {"choices": [1]}):
        found = of("ui_event", event="narrative_choice", payload=payload)["placeholder"]
        assert (found["event"], found["payload"]) == ("narrative_choice", payload)
    found = of("ui_event", event="shake", payload={"by": 3})["placeholder"]
    assert (found["event"], found["payload"]) == ("shake", {"by": 3})
    asset = {"assetId": "m", "kind": "model", "mediaType": "model/obj", "path": "/x", "metadata": {"faces": 3}}
    found = of("asset", **asset)["placeholder"]
    assert (found["mediaType"], found["payload"]) == ("model/obj", {"faces": 3})
    assert of("asset", **asset | {"mediaType": "Image/PNG"}) == {}


def test_a_flood_of_logs_leaves_room_for_what_matters():
    report = Report(10_000)
    for number in range(1000):
        report.add(understood(line("log", level="info", message=f"log {number}"), 128))
    report.add(understood(line("error", errorCode="E", errorMessage="m"), 128))
    _, verdict = played([line("done", ok=True)])
    text = report.output(verdict, "", b"{}", b"", 10_000)
    output = json.loads(text)
    assert len(json.dumps(text)) < 10_000
    assert output["events"][-1]["type"] == "error"
    assert output["cut"]["log"] == 1000 - (len(output["events"]) - 1)
    assert isinstance(understood(line("log", level="info", message=""), 128).body, Log)
    assert isinstance(understood(line("asset", assetId="", kind="", mediaType="", path=""), 128).body, Asset)


def test_events_that_do_not_fit_beside_the_state_are_left_out_with_a_note():
    report = Report(2000)
    report.add(understood(line("error", errorCode="E", errorMessage="m" * 500), 128))
    _, verdict = played([line("done", ok=True)])
    output = json.loads(report.output(verdict, "", json.dumps({"s": "x" * 1500}).encode(), b"noise", 2000))
    assert output["events"] == []
    assert output["cut"] == {"error": 1}
    assert output["state"]["s"] == "x" * 1500
