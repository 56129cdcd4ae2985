"""Lines that arrive together are read as each would be alone, however alike they are; replies against msgspec."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker._native import ffi, lib
from tests.support.replies import CAP, agree, framer_with, taken
from tests.support.scanner import DEPTH


class Read(NamedTuple):
    """A line on its own: what it is, what goes to the toolhost, and its id."""

    kind: int
    tool: int
    problem: int
    member: int
    out: bytes
    ids: bytes
    key: bytes
    spans: tuple[int, ...]


def scanned(text: bytes, at_once: int) -> list[Read]:
    """Every line of a text, with tool T open and tool C not."""
    framer = framer_with(text)
    tools = ffi.gc(lib.tb_tools_new(), lib.tb_tools_free)
    batch = ffi.gc(lib.tb_batch_new(), lib.tb_batch_free)
    lib.tb_tools_put(tools, b"T", 1, 0)
    lib.tb_tools_put(tools, b"C", 1, 1)
    lib.tb_tools_open(tools, 0, 1)
    view = ffi.new("tb_view *")
    lines: list[Read] = []
    while True:
        assert lib.tb_scan(framer, tools, batch, at_once, DEPTH, view) == 0
        for row in range(view.count):
            item = ffi.unpack(view.items + row * lib.TB_ITEM, lib.TB_ITEM)
            out = ffi.buffer(view.out + item[lib.TB_I_OUT], item[lib.TB_I_OUT_LEN])[:] if view.out else b""
            ids = ffi.buffer(view.ids + item[lib.TB_I_IDS], item[lib.TB_I_IDS_LEN])[:] if view.ids else b""
            keys = ffi.buffer(view.keys + item[lib.TB_I_KEYS], item[lib.TB_I_KEYS_LEN])[:] if view.keys else b""
            count = item[lib.TB_I_COUNT]
            texts = (text.splitlines(True) for text in (out, ids, keys))
            each = list(itertools.zip_longest(*texts, fillvalue=b"")) or [(b"", b"", b"")]
            assert len(each) == count
            head = [item[i] for i in (lib.TB_I_KIND, lib.TB_I_TOOL, lib.TB_I_PROBLEM, lib.TB_I_MEMBER)]
            lines += [Read(*head, *three, tuple(item[lib.TB_I_SPANS :])) for three in each]
        if not view.more:
            return lines


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
strings = text.map(msgspec.json.encode)
integers = st.integers().map(lambda n: b"%d" % n)
scalars = st.one_of(strings, integers, st.sampled_from([b"null", b"true", b"-1.5e3", b"01"]))
objects = st.dictionaries(text, st.integers() | text, max_size=3).map(msgspec.json.encode)
nested = st.integers(1, DEPTH + 1).map(lambda n: b'{"a":' + b"[" * n + b"]" * n + b"}")
values = st.one_of(scalars, objects, nested, st.sampled_from([b'"T"', b'"C"', b'"OK"', b'"TOOL_ERROR"', b'""', b"[]"]))
names = ["id", "aid", "input_json", "inputs", "run_id", "request_id", "traceparent", "x", "session", "idempotency_key"]
names += ["\\u0061id", "i\\u0064"]
reply_names = ["ok", "status", "output_json", "error", "ds_state", "id", "stat\\u0075s", "x"]
gaps = st.sampled_from([b"", b"", b"", b" ", b"\t"])


@st.composite
def batches(draw: st.DrawFn, some_names: list[str]) -> bytes:
    """A few shapes, many lines of each, and now and then a byte that does not belong."""
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.tuples(st.sampled_from(some_names), values, st.booleans(), gaps), max_size=6))
        if draw(st.booleans()):
            shape.insert(draw(st.integers(0, len(shape))), ("aid", b'"T"', False, b""))
        for _ in range(draw(st.integers(1, 4))):
            members = [
                gap + b'"' + name.encode() + b'"' + gap + b":" + (draw(values) if varies else value)
                for name, value, varies, gap in shape
            ]
            line = bytearray(b"{" + b",".join(members) + b"}")
            if draw(st.integers(0, 5)) == 0:
                at = draw(st.integers(0, len(line) - 1))
                line[at : at + draw(st.integers(0, 1))] = draw(st.binary(max_size=2))
            lines.append(bytes(line) + draw(st.sampled_from([b"", b"", b"", b"\r", b" "])))
    return b"\n".join(lines) + draw(st.sampled_from([b"", b"\n"]))


@settings(max_examples=250, deadline=None)
@given(batches(names))
@example(
    b'{"aid":"T","idempotency_key":"a"}\n{"aid":"T","idempotency_key":""}\n{"aid":"T","idempotency_key":"\\u0061"}'
)
@example(b'{"aid":"T","idempotency_key":"a"}\n{"aid":"T","idempotency_key":"' + b"x" * 129 + b'"}')
@example(b'{"id":1,"aid":"T","input_json":"a"}\n{"id":01,"aid":"T","input_json":"a"}')
@example(b'{"aid":"T","input_json":"a"}\n{"aid":"T","input_json":"b","aid":"C"}\n{"aid":"T","input_json":"b"} x\n')
def test_requests_are_read_alike_together_and_alone(lines):
    assert scanned(lines, 100) == scanned(lines, 1)


@settings(max_examples=250, deadline=None)
@given(batches(reply_names), st.none() | st.lists(scalars, max_size=6))
def test_replies_are_taken_alike_together_and_alone(lines, ids):
    joined = None if ids is None else b"".join(one + b"\n" for one in ids)
    assert taken(lines, 100, joined) == taken(lines, 1, joined)


good = st.one_of(strings, integers, st.sampled_from([b"null", b"[4]"]))


@settings(max_examples=250, deadline=None)
@given(batches(reply_names), st.none() | good)
def test_replies_are_judged_as_msgspec_reads_them(lines, name):
    for line in lines.split(b"\n"):
        if len(line) <= CAP:
            agree(line, name)


@pytest.mark.parametrize("size", range(CAP - 40, CAP + 3))
def test_a_reply_up_to_the_cap_passes_among_its_like(size):
    head, tail = b'{"ok":true,"output_json":"', b'","error":""}'
    lines = [head + b"x" * (n - len(head) - len(tail)) + tail for n in (100, size, 101)]
    got = taken(b"\n".join(lines), 100, None)
    assert got.succeeded == (3 if size <= CAP else 2)
    assert got.data == b"".join(line + b"\n" for line in lines if len(line) <= CAP)
