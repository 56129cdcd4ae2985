"""Every rule of the event protocol as a table: each member of each event in every wrong way, each line that is none,
and patches of every shape."""

from __future__ import annotations

import json

import pytest

from broker.policy.story import Story
from broker.runtimes.events.protocol import Asset, Stream, Violation, understood
from broker.runtimes.events.report import Report
from tests.support.event_tools import DONE, event, line, played

TEXT, OBJECT, FLAG = "text", {}, True
REQUIRED = {
    "log": {"level": TEXT, "message": TEXT},
    "state_patch": {"patch": OBJECT},
    "asset": {"assetId": TEXT, "kind": TEXT, "mediaType": TEXT, "path": TEXT},
    "ui_event": {"event": TEXT},
    "error": {"errorCode": TEXT, "errorMessage": TEXT},
    "done": {"ok": FLAG},
}
OPTIONAL = {
    "log": {"fields": OBJECT},
    "state_patch": {},
    "asset": {"metadata": OBJECT},
    "ui_event": {"payload": OBJECT},
    "error": {"details": OBJECT},
    "done": {"summary": TEXT},
}
ENVELOPE = {"requestId": TEXT, "timestamp": TEXT}
WRONG = (None, 0, 1, 1.5, "text", "", [], ["a"], {}, {"a": 1}, True, False)


def whole(kind):
    """An event with every member that it may have."""
    members = {**REQUIRED[kind], **OPTIONAL[kind], **ENVELOPE}
    return event(kind, **members | ({"level": "info"} if kind == "log" else {}))


def is_event(value):
    try:
        understood(json.dumps(value).encode(), 128)
    except Violation:
        return False
    return True


@pytest.mark.parametrize("kind", REQUIRED)
def test_each_member_missing_null_or_of_another_type(kind):
    good = whole(kind)
    assert is_event(good)
    assert is_event(good | {"more": [None], "ok2": 1})
    for name, right in {**REQUIRED[kind], **OPTIONAL[kind], **ENVELOPE}.items():
        without = {key: value for key, value in good.items() if key != name}
        assert is_event(without) is (name not in REQUIRED[kind]), name
        for value in WRONG:
            if name != "level":
                assert is_event(good | {name: value}) is (type(value) is type(right)), (name, value)


@pytest.mark.parametrize("kind", REQUIRED)
def test_members_of_other_kinds_are_ignored_whatever_they_are(kind):
    """A log that also has `ok` is a log."""
    own = whole(kind)
    others = {name: 5 for known in (REQUIRED, OPTIONAL) for one in known.values() for name in one if name not in own}
    assert is_event(own | others)
    assert type(understood(json.dumps(own | others).encode(), 128).body).__struct_config__.tag == kind


@pytest.mark.parametrize("level", ["debug", "info", "warn", "error"])
def test_levels_of_a_log(level):
    assert is_event(event("log", level=level, message=""))
    assert not is_event(event("log", level=level.upper(), message=""))


# What a line is: the words of its violation, or none where it is an event, or nothing at all.
LINES = {
    b"": "",
    b" \t \r": "",
    b'{"version":"0",\r"type":"log",\t"level":"info","message":"m"}': "",
    b'{"version":"0","t\\u0079pe":"log","level":"info","message":"m"}': "",
    b'{"version":"0","type":"log","level":"info","message":"\\ud83d\\ude00"}': "",
    b'{"version":"0","type":"state_patch","patch":{"a":-0,"b":1E5,"c":1e-400}}': "",
    b'\xef\xbb\xbf{"version":"0","type":"done","ok":true}': "not JSON",
    b'{"version":"0","type":"log","level":"info","message":"\xff"}': "not JSON",
    b'{"version":"0","type":"log","level":"info","message":"a\rb"}': "not JSON",
    b'{"version":"0","type":"log","level":"info","message":"a\0b"}': "not JSON",
    b'{"version":"0","type":"log","level":"info","message":"a\tb"}': "not JSON",
    b'{"version":"0","type":"log","level":"info","message":"\\ud800"}': "not JSON",
    b'{"version":"0","type":"state_patch","patch":{"a":NaN}}': "not JSON",
    b'{"version":"0","type":"state_patch","patch":{"a":1e999}}': "not JSON",
    b'{"version":"0","type":"done","ok":true},': "not JSON",
    b'{"version":"0","type":"done","ok":true} x': "not JSON",
    b'{"version":"0","type":"done","ok":true}{}': "not JSON",
    b'{"version":"0","type":"done","ok":true}\r{"version":"0","type":"done","ok":true}': "not JSON",
    b"{'version':'0'}": "not JSON",
    b"\0": "not JSON",
    b"\x0c": "not JSON",
    b"\xc2\xa0": "not JSON",
    b"data: {}": "not JSON",
    b"[]": "not a JSON object",
    b"null": "not a JSON object",
    b"0": "not a JSON object",
    b'"done"': "not a JSON object",
    b"{}": "no version",
    b'{"version":"0"}': "no type",
    b'{"version":"0","type":[]}': "Unknown event type: []",
    b'{"version":"0","type":""}': 'Unknown event type: ""',
    b'{"version":"1","type":"zzz"}': 'must be "0", not "1"',
    b'{"version":"0","type":"log","level":"info","message":"m","type":"done","ok":true}': "more than one type",
    b'{"version":"0","type":"ui_event","event":"e","payload":%b}' % (b'{"a":' * 125 + b"1" + b"}" * 125): "deeper",
}


@pytest.mark.parametrize("text", LINES, ids=lambda text: repr(text)[:60])
def test_what_a_line_is(text):
    words = LINES[text]
    before = line("state_patch", patch={"before": 1})
    stream = before + b"\n" + text + b"\n" + DONE
    for pieces in ([stream], [stream[i : i + 1] for i in range(len(stream))]):
        events, verdict = played(pieces)
        assert (verdict.name, words in verdict.reason) == ("protocol_failure" if words else "success", True), verdict
        assert "before" in str(events[0].line)
        assert len(events) == (1 if words else 2 + bool(text.strip()))


def test_an_event_as_it_is_passed_on_has_no_line_break_in_it():
    """A lone CR would end a line of a stream of server-sent events."""
    events, _ = played([b'{"version":"0",\r"type":"done",\r\t"ok":true}\r\n'])
    assert events[0].line == b'{"version":"0", "type":"done", \t"ok":true}'


MERGES = {
    "null inside of a new object": ({}, [{"a": {"b": None, "c": {"d": None}}}], {"a": {"c": {}}}),
    "null of what is not there": ({"a": 1}, [{"b": None}], {"a": 1}),
    "null below": ({"a": {"b": 1, "c": 2}}, [{"a": {"b": None}}], {"a": {"c": 2}}),
    "the last one leaves an empty object": ({"a": {"b": 1}}, [{"a": {"b": None}}], {"a": {}}),
    "nulls in arrays stay": ({}, [{"a": [None, {"b": None}]}], {"a": [None, {"b": None}]}),
    "an array of objects is replaced": ({"a": [{"x": 1}, {"y": 2}]}, [{"a": [{"z": 3}]}], {"a": [{"z": 3}]}),
    "an object over a scalar": ({"a": 1}, [{"a": {"b": 2, "c": None}}], {"a": {"b": 2}}),
    "an object over an array": ({"a": [1]}, [{"a": {"b": 2}}], {"a": {"b": 2}}),
    "a scalar over an object": ({"a": {"b": 2}}, [{"a": 1}], {"a": 1}),
    "an array over an object": ({"a": {"b": 2}}, [{"a": []}], {"a": []}),
    "an empty object changes nothing": ({"a": {"b": 2}}, [{"a": {}}, {}], {"a": {"b": 2}}),
    "an empty object is made": ({}, [{"a": {}}], {"a": {}}),
    "an empty object over a scalar": ({"a": 1}, [{"a": {}}], {"a": {}}),
    "odd keys": (
        {"": 1, "ä": {"\u2028": 1}},
        [{"": 2, "ä": {"\u2028": None, "😀": 1}, "__proto__": {"x": 1}, "a.b": 1, "a": {"b": 2}}],
        {"": 2, "ä": {"😀": 1}, "__proto__": {"x": 1}, "a.b": 1, "a": {"b": 2}},
    ),
    "removed and made again": ({"a": {"b": 1}}, [{"a": None}, {"a": {"c": 2}}], {"a": {"c": 2}}),
    "false, zero and empty are no null": ({"a": 1}, [{"a": False, "b": 0, "c": ""}], {"a": False, "b": 0, "c": ""}),
}


@pytest.mark.parametrize("name", MERGES)
def test_merges(name):
    base, patches, expected = MERGES[name]
    story = Story(json.dumps(base).encode())
    for patch in patches:
        assert story.patch(json.dumps(patch, ensure_ascii=False).encode(), 1 << 20) == ""
    assert json.loads(story.text) == expected
    assert Story(story.text).text == story.text


def test_merging_keeps_the_order_of_keys_and_takes_the_last_of_two():
    story = Story(b'{"z":1,"a":{"y":1,"b":2}}')
    story.patch(b'{"n":1,"a":{"x":0,"y":3},"z":2}', 999)
    assert story.text == b'{"z":2,"a":{"y":3,"b":2,"x":0},"n":1}'
    story.patch(b'{"z":{"first":1},"z":{"second":2}}', 999)
    assert story.text.startswith(b'{"z":{"second":2}')


def test_a_state_is_never_nested_deeper_than_what_it_is_answered_in_may_be():
    deep = b'{"a":' * 124 + b"1" + b"}" * 124
    lines = b'{"version":"0","type":"state_patch","patch":%b}\n' % deep
    lines += b'{"version":"0","type":"ui_event","event":"odd","payload":%b}\n' % deep
    events, verdict = played([lines + DONE])
    assert verdict.name == "success"
    report = Report(1 << 20)
    for one in events:
        report.add(one)
    text = report.output(verdict, "", deep, b"", 1 << 20).encode()
    assert max_depth(text) <= 128


def max_depth(text):
    depth = deepest = 0
    for one in text:
        depth += (one in b"{[") - (one in b"}]")
        deepest = max(deepest, depth)
    return deepest


def test_the_ids_of_many_assets_are_not_kept_whole():
    stream = Stream(1 << 20, 128)
    for number in range(200):
        (one,) = stream.feed(line("asset", assetId=f"{number}" * 100_000, kind="", mediaType="", path="") + b"\n")
        assert isinstance(one.body, Asset)
    assert sum(map(len, stream._assets)) < 10_000


def test_what_a_long_summary_leaves_of_a_reply():
    report = Report(100_000)
    events, verdict = played([line("done", ok=False, summary="s" * 90_000)])
    report.add(events[0])
    text = report.output(verdict, "s" * 90_000, b"{}", b"", 100_000)
    output = json.loads(text)
    assert output["summary"].endswith("… (90000 characters)")
    assert output["reason"] == output["summary"]
    assert output["cut"] == {"done": 1}
    assert len(text) < 50_000
