"""The C scanner against msgspec: what one takes the other takes, and they see the same members."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker._native import ffi, lib
from tests.support.scanner import KNOWN, Scan, agree

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from([*KNOWN, "x", "aid ", "Aid", "", "é", "a\u0301id", "in_put"]) | st.text(max_size=12)


def written(value: object, rng: random.Random) -> str:
    """JSON with the freedom that JSON has: white space anywhere, escapes anywhere."""
    gap = lambda: rng.choice(["", "", " ", "\t", " \r "])  # noqa: E731

    def string(text: str) -> str:
        out = []
        for char in text:
            if rng.random() < 0.2 or ord(char) < 0x20 or char in '"\\':
                for unit in (char.encode("utf-16-be")[i : i + 2] for i in range(0, len(char.encode("utf-16-be")), 2)):
                    out.append(f"\\u{unit.hex()}")
            else:
                out.append(char)
        return '"' + "".join(out) + '"'

    def write(node: object) -> str:
        if isinstance(node, str):
            return string(node)
        if isinstance(node, dict):
            inside = ",".join(f"{gap()}{string(k)}{gap()}:{gap()}{write(v)}{gap()}" for k, v in node.items())
            return "{" + (inside or gap()) + "}"
        if isinstance(node, list):
            return "[" + (",".join(f"{gap()}{write(v)}{gap()}" for v in node) or gap()) + "]"
        return json.dumps(node)

    return gap() + write(value) + gap()


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(names, values, max_size=6), st.booleans(), st.randoms(use_true_random=False))
@example({"aid": "A", "\x00": 1}, True, random.Random(0))
def test_objects_are_read_as_msgspec_reads_them(value, with_aid, rng):
    if with_aid:
        value = {**value, "aid": "AID.X.v1"}
    agree(written(value, rng).encode("utf-8", "surrogatepass"))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40).filter(lambda b: b"\n" not in b and b.strip(b"\r")))
def test_bytes_that_are_not_json_are_refused_by_both(line):
    agree(line)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_changed_byte_is_judged_alike(data):
    line = bytearray(
        b'{"id":-1.5e3,"aid":"A\\u00e9\\ud83d\\ude00","input_json":"{\\"a\\":[1,2]}","x":[{},[],null,true,false,"\xc3\xa9"]}'
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(line) - 1))
        line[at] = data.draw(st.sampled_from(b'{}[]:,"\\0123456789eE+-.tfnu \t\x00\x1f\x7f\x80\xc3\xed\xf4\xff'))
    agree(bytes(line))


NUMBERS = ["01", "1.", ".5", "-", "1e", "1e+", "+1", "1e309", "-1e400", "0e999999", "NaN", "1" * 400, "1" * 400 + ".5"]
LONG = ["1" * 4300, "1" * 4301, "-" + "1" * 4299, "-" + "1" * 4300, "0." + "1" * 5000]
STRINGS = ['"\\x"', '"\\u12"', '"\\ud800x"', '"\\udc00"', '"\\ud800\\u0041"', '"\t"', '"', "'a'", "tru", "nul"]
SHAPES = ["[1,]", "[,1]", "{,}", '{"a"}', '{"a":1,}', "[1 2]", "/**/1", "1 1", '{"a":1}{"b":2}', "[[[]]", "[]]", "[{]"]


@pytest.mark.parametrize("text", [*NUMBERS, *LONG, *STRINGS, *SHAPES, "\ufeff1"], ids=lambda text: text[:20])
def test_the_fine_print_of_json(text):
    agree(text.encode())
    agree(b'{"aid":"A","x":' + text.encode() + b"}")


def test_a_line_is_scanned_alike_however_its_bytes_arrive():
    line = b'{"id":"\xc3\xa9","aid":"AID.X.v1","inputs":{"a":"\\u00e9 \xf0\x9f\x98\x80"},"unknown":[1,{"b":null}]}\n'
    whole = Scan(line[:-1])
    for step in (1, 2, 3, 7):
        framer = ffi.gc(lib.tb_framer_new(4096), lib.tb_framer_free)
        batch = ffi.gc(lib.tb_batch_new(), lib.tb_batch_free)
        tools = ffi.gc(lib.tb_tools_new(), lib.tb_tools_free)
        view = ffi.new("tb_view *")
        for at in range(0, len(line), step):
            assert lib.tb_framer_feed(framer, line[at : at + step], len(line[at : at + step])) == 0
            assert lib.tb_scan(framer, tools, batch, 10, 128, view) == 0
            assert view.count == (1 if at + step >= len(line) else 0)
        item = ffi.unpack(view.items, lib.TB_ITEM)
        assert ffi.buffer(view.out, item[lib.TB_I_OUT_LEN])[:] == whole.out
