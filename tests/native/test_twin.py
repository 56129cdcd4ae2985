"""The scanner against its twin in Python: streams of lines, good and bad, in whatever pieces they arrive."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.scanner import CAP, DEPTH, agree_with_twin, scanned
from tests.support.twin import KNOWN

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
escaped = text.map(
    lambda t: '"' + "".join(json.dumps(c)[1:-1] if ord(c) > 126 else f"\\u{ord(c):04X}" for c in t) + '"'
)
strings = st.one_of(text.map(json.dumps), text.map(lambda t: json.dumps(t, ensure_ascii=False)), escaped)
numbers = st.sampled_from(["0", "-0", "7", "-1", "01", "1.", "1.5e3", "1e309", "-", "1" * 300, "0." + "1" * 301])
nested = st.integers(1, DEPTH + 1).map(
    lambda n: '{"a":' * (n // 2) + "[" * (n - n // 2) + "]" * (n - n // 2) + "}" * (n // 2)
)
objects = st.dictionaries(text, st.integers() | text, max_size=2).map(json.dumps)
words = st.sampled_from(["true", "false", "null", "tru", '"\\ud83d\\ude00"', '"\\ud83d"', '"\x01"', '"', "[1,]"])
values = st.one_of(strings, strings, numbers, nested, objects, objects, words)
names = st.sampled_from(
    [f'"{name}"' for name in KNOWN] + ['"x"', '"\\u0061id"', '"i\\u0064"', '"a\\u0000"', '"a\\\\u0000"']
)
right = {"": values, '"': strings, "{": objects, "0123456789": st.integers(-1, 9).map(str), "tf": st.just("true")}
members = names.flatmap(
    lambda name: st.tuples(st.just(name), st.one_of(*3 * [right.get(KNOWN.get(name.strip('"'), ""), values)], values))
) | strings.flatmap(lambda name: st.tuples(st.just(name), values))
tool_names = st.sampled_from(['"T"', '"T"', '"T"', '"\\u0054"', '"Tü"', '"C"', '"N\\u0000"', '"N"', '"other"', '""'])
gaps = st.sampled_from(["", "", "", "", " ", "\t", "\r "])
ends = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b" \n"])


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Most are a call; some of these have lost, got or changed a byte."""
    found = draw(st.lists(members, max_size=5))
    if draw(st.integers(0, 9)):
        found.insert(draw(st.integers(0, len(found))), ('"aid"', draw(tool_names)))
    gap = draw(gaps)
    text = "{" + gap + ",".join(f"{gap}{name}{gap}:{value}{gap}" for name, value in found) + "}"
    line = bytearray(text.encode("utf-8", "surrogatepass").replace(b"\n", b" "))
    if draw(st.integers(0, 7)) == 0:
        at = draw(st.integers(0, len(line)))
        line[at : at + draw(st.integers(0, 1))] = draw(st.binary(max_size=2))
    if draw(st.integers(0, 15)) == 0:
        line += b" " * (CAP + draw(st.integers(-2, 2)) - len(line))
    return bytes(line)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Often the same line again, now and then nothing where a line should be; the last one may have no end."""
    stream = b""
    for line in draw(st.lists(lines(), min_size=1, max_size=4)):
        for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
            stream += line + draw(ends)
    if draw(st.integers(0, 9)) == 0:
        stream += draw(ends) + draw(lines())
    return stream[: len(stream) - draw(st.sampled_from([0, 0, 0, 1, 2]))]


def in_pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    return [stream[a:b] for a, b in pairwise(places)]


@settings(max_examples=300, deadline=None)
@given(streams(), st.lists(st.integers(1, 3 * CAP), max_size=8), st.sampled_from([1, 2, 100]))
@example(b'{"aid":"T","id":1,"id":2,"aid":"C"}\n', [], 100)
@example(b'{"aid":"T","aid":"C"}}\n', [], 100)
@example(b'{"id":1,"aid":"T"}' + b" " * CAP + b"\r\n{}\n", [CAP + 1], 100)
@example(b'{"id":1,"aid":""}' + b" " * CAP + b"\n", [], 100)
def test_scanner_and_twin_see_the_same_in_every_stream(stream, cuts, at_once):
    agree_with_twin(in_pieces(stream, cuts), at_once)


@pytest.mark.parametrize("size", range(CAP - 3, CAP + 4))
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\r", b"\r\r\n"])
def test_a_line_about_as_long_as_the_cap_is_judged_by_its_length_alone(size, end):
    for line in (b'{"id":1,"aid":"T"}'.ljust(size), b'{"aid":"T","id":'.ljust(size, b"1")):
        stream = line + end
        for step in (1, 7, size, size + 1, len(stream)):
            agree_with_twin([stream[at : at + step] for at in range(0, len(stream), step)])


def test_the_twin_knows_what_the_scanner_does_with_usual_lines():
    stream = (
        b'{"aid":"T","id":1}\r\n{"aid":"T","id":2}\n{"aid":"T","stream":true}\n{"aid":"T","idempotency_key":"k"}\n\n{}'
    )
    assert [item.kind for item in scanned([stream])] == ["plain", "plain", "call", "keyed", "close"]
