"""The C scanner as tests ask it: what became of each line of a stream; and whether msgspec and the twin agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from broker._native import ffi, lib
from tests.support import twin

KNOWN = {name: number for number, name in enumerate(twin.KNOWN)}
TO_TOOLHOST = ("aid", "input_json")
CAP, DEPTH = 512, 6
TOOLS = {"T": 0, "C": 1, "Tü": 2, "N\0": 3}
OPEN = {0, 2, 3}
KINDS = {getattr(lib, f"TB_{name.upper()}"): name for name in ("plain", "keyed", "call", "bad", "close")}
WRONG = (
    "invalid_json",
    "not_an_object",
    "too_deep",
    "too_long",
    "twice",
    "wrong_type",
    "both_inputs",
    "no_aid",
    "nul_name",
)
PROBLEMS = {getattr(lib, f"TB_{name.upper()}"): name for name in ("ok", *WRONG)}


class Scan:
    """One line through the scanner. No tool is open, so every good line is one call with its members' places."""

    def __init__(self, line: bytes, depth: int = 128) -> None:
        framer = ffi.gc(lib.tb_framer_new(1 << 20), lib.tb_framer_free)
        tools = ffi.gc(lib.tb_tools_new(), lib.tb_tools_free)
        batch = ffi.gc(lib.tb_batch_new(), lib.tb_batch_free)
        view = ffi.new("tb_view *")
        assert lib.tb_framer_feed(framer, line + b"\n", len(line) + 1) == 0
        assert lib.tb_scan(framer, tools, batch, 10, depth, view) == 0
        assert view.count == 1
        item = ffi.unpack(view.items, lib.TB_ITEM)
        self.kind = item[lib.TB_I_KIND]
        self.problem = item[lib.TB_I_PROBLEM]
        self.out = piece(view.out, item[lib.TB_I_OUT], item[lib.TB_I_OUT_LEN])
        self.members = {name: text.encode() for name, text in members_of(view, item).items()}

    @property
    def is_json(self) -> bool:
        return self.problem not in (lib.TB_INVALID_JSON, lib.TB_TOO_DEEP)


def piece(text: object, at: int, size: int) -> bytes:
    return ffi.buffer(text + at, size)[:] if size else b""


def members_of(view: object, item: Sequence[int]) -> dict[str, str]:
    places = {name: item[lib.TB_I_SPANS + 2 * number :][:2] for name, number in KNOWN.items()}
    return {name: piece(view.lines, at, size).decode() for name, (at, size) in places.items() if at >= 0}


def by_msgspec(line: bytes) -> object:
    """What msgspec makes of it; raises where it is not JSON."""
    return msgspec.json.decode(line)


def agree(line: bytes) -> None:
    """Scanner and msgspec, about one line."""
    scan = Scan(line)
    if scan.problem == lib.TB_TOO_DEEP:
        return
    try:
        value = by_msgspec(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        assert not scan.is_json, f"only the scanner takes {line!r}"
        return
    assert scan.is_json, f"only msgspec takes {line!r}"
    if scan.kind != lib.TB_CALL:
        return
    assert isinstance(value, dict)
    assert {name: msgspec.json.decode(raw) for name, raw in scan.members.items()} == {
        name: value[name] for name in KNOWN if name in value
    }
    sent = msgspec.json.decode(scan.out)
    expected = {name: content for name, content in value.items() if name not in KNOWN or name in TO_TOOLHOST}
    if "inputs" in value:
        assert msgspec.json.decode(sent.pop("input_json")) == value["inputs"]
    if "ds_state" not in value:
        assert sent.pop("ds_state") == {"slots": {}}
    assert sent == expected
    assert scan.out.endswith(b"}\n")
    assert scan.out.count(b"\n") == 1


def single_lines(text: bytes, count: int) -> list[str | None]:
    """The lines of a run's ids, keys or calls; as many nothings where there are none."""
    if not text:
        return [None] * count
    lines = text.decode().split("\n")
    assert len(lines) == count + 1, f"{text!r} has no {count} lines"
    assert not lines[-1]
    return [*lines[:-1]]


def items_of(view: object) -> Iterator[twin.Item]:
    """What a scan found, each run as its single calls."""
    for row in range(view.count):
        item = ffi.unpack(view.items + row * lib.TB_ITEM, lib.TB_ITEM)
        count = item[lib.TB_I_COUNT]
        out, ids, keys = (
            single_lines(piece(text, item[at], item[at + 1]), count)
            for text, at in ((view.out, lib.TB_I_OUT), (view.ids, lib.TB_I_IDS), (view.keys, lib.TB_I_KEYS))
        )
        about = item[lib.TB_I_MEMBER]
        for line, name, key in zip(out, ids, keys, strict=True):
            yield twin.Item(
                KINDS[item[lib.TB_I_KIND]],
                item[lib.TB_I_TOOL],
                PROBLEMS[item[lib.TB_I_PROBLEM]],
                None if about < 0 else list(KNOWN)[about],
                name,
                key,
                members_of(view, item),
                None if line is None else twin.members(line.encode(), DEPTH),
            )


def scanned(chunks: Sequence[bytes], at_once: int = 100, cap: int = CAP) -> list[twin.Item]:
    """Every line of a stream that arrives in these chunks and then ends, up to the caller's wish to close."""
    framer = ffi.gc(lib.tb_framer_new(cap), lib.tb_framer_free)
    tools = ffi.gc(lib.tb_tools_new(), lib.tb_tools_free)
    batch = ffi.gc(lib.tb_batch_new(), lib.tb_batch_free)
    view = ffi.new("tb_view *")
    for name, index in TOOLS.items():
        lib.tb_tools_put(tools, name.encode(), len(name.encode()), index)
        lib.tb_tools_open(tools, index, index in OPEN)
    items: list[twin.Item] = []
    for i in range(len(chunks) + 1):
        if i < len(chunks):
            assert lib.tb_framer_feed(framer, chunks[i], len(chunks[i])) == 0
        else:
            lib.tb_framer_end(framer)
        more = True
        while more:
            assert lib.tb_scan(framer, tools, batch, at_once, DEPTH, view) == 0
            more = view.more
            items += items_of(view)
            if items and items[-1].kind == "close":
                return items
    return items


def agree_with_twin(chunks: Sequence[bytes], at_once: int = 100, cap: int = CAP) -> None:
    """Scanner and twin, about every line of a stream."""
    found = scanned(chunks, at_once, cap)
    expected = twin.scanned(b"".join(chunks), cap, DEPTH, TOOLS, OPEN)
    assert found == expected, f"{b''.join(chunks)!r} in {len(chunks)} chunks, {at_once} lines at once"
