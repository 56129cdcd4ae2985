"""Replies as tests take them: what became of each line of a toolhost; and whether msgspec and the twin agree."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from broker._native import ffi, lib
from tests.support import twin
from tests.support.scanner import DEPTH

CAP = 600


class Taken(NamedTuple):
    data: bytes
    succeeded: int
    stops: list[tuple[int, bytes]]
    ids_used: int


def framer_with(text: bytes) -> object:
    framer = ffi.gc(lib.tb_framer_new(CAP), lib.tb_framer_free)
    assert lib.tb_framer_feed(framer, text, len(text)) == 0
    lib.tb_framer_end(framer)
    return framer


def taken(text: bytes, at_once: int, ids: bytes | None) -> Taken:
    """Every reply of a text; past each line that is none."""
    framer = framer_with(text)
    batch = ffi.gc(lib.tb_batch_new(), lib.tb_batch_free)
    got = ffi.new("tb_taken *")
    data, succeeded, stops, used = b"", 0, [], 0
    while True:
        left = ffi.NULL if ids is None else ffi.from_buffer(ids[used:] + b"\0")
        size = 0 if ids is None else len(ids) - used
        assert lib.tb_take(framer, batch, at_once, b"", 0, left, size, DEPTH, got) == 0
        data += ffi.buffer(got.data, got.len)[:] if got.len else b""
        succeeded += got.succeeded
        used += got.ids_used
        if got.stopped:
            stops.append((got.stopped, ffi.buffer(got.junk, got.junk_len)[:]))
        elif got.lines < at_once:
            return Taken(data, succeeded, stops, used)


def by_msgspec(line: bytes) -> dict[str, object] | None:
    """The reply, as msgspec reads it. None: it is no object."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None


def agree(line: bytes, name: bytes | None) -> None:
    """Broker, twin and msgspec, about one reply of at most CAP bytes, and the id that it gets."""
    got = taken(line + b"\n", 1, None if name is None else name + b"\n")
    expected = twin.reply(line.removesuffix(b"\r"), name and name.decode(), DEPTH)
    if expected is None:
        assert [kind for kind, _ in got.stops] == [lib.TB_REPLY_JUNK], f"only the broker takes {line!r}"
        return
    assert not got.stops, f"only the twin takes {line!r}"
    assert (bool(got.succeeded), twin.members(got.data, DEPTH)) == expected, line
    value = by_msgspec(line)
    assert value is not None, f"only msgspec does not take {line!r}"
    value = {key: content for key, content in value.items() if key != "id"}
    if name is not None:
        value = {"id": msgspec.json.decode(name), **value}
    assert list(msgspec.json.decode(got.data).items()) == list(value.items())
    whole = line.strip(b" \t\r")
    if expected[1] == twin.members(line, DEPTH) and whole[1:2] not in (b" ", b"\t", b"\r"):
        assert got.data == whole + b"\n", "what needs no change is not changed"
