"""A request object that came in one piece, read by the same scanner as the lines of connections."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from broker import errors
from broker._native import ffi, lib
from broker.errors import Refusal
from broker.faces.machina.lines import AID, TIMEOUT_MS, Asked, Members, problem_of, wrong_type
from broker.settings import Limits
from broker.wire import is_json

LONGEST_TIMEOUT = 12  # digits; more are a long time, too


class Line(NamedTuple):
    aid: str
    text: bytes  # for the toolhost, `ds_state` aside
    ids: bytes | None  # the caller's own, with its line end
    asked: Asked

    def timeout_ms(self) -> int | Refusal | None:
        digits = self.asked.timeout
        if digits is None:
            return None
        if not digits.isdigit() or not digits.strip(b"0"):
            return wrong_type(TIMEOUT_MS)
        return int(digits) if len(digits) <= LONGEST_TIMEOUT else 10**LONGEST_TIMEOUT


class Reader:
    def __init__(self, tools: Any, limits: Limits) -> None:
        self._tools = tools  # the table that knows all names, and lets nothing pass without a look
        self._limits = limits
        self._framer = ffi.gc(lib.tb_framer_new(limits.request_bytes), lib.tb_framer_free)
        self._batch = ffi.gc(lib.tb_batch_new(), lib.tb_batch_free)
        self._view = ffi.new("tb_view *")

    def read(self, text: bytes, aid: str) -> tuple[Line | Refusal, bytes | None]:
        """`aid` is meant where it names none. Its ids beside it: also a refusal has them."""
        limits = self._limits
        if len(text) > limits.request_bytes:
            return problem_of(lib.TB_TOO_LONG, 0, limits), None
        text = text.strip()
        if b"\n" in text or b"\r" in text:  # between its members only, else it is no JSON
            if not is_json(text, limits.depth):
                return Refusal(errors.BAD_REQUEST, "invalid JSON"), None
            text = text.replace(b"\n", b" ").replace(b"\r", b" ")
        found = self._scan(text)
        if found is None:
            return Refusal(errors.BAD_REQUEST, "invalid JSON", detail="the message is empty"), None
        item, ids = found
        if item[lib.TB_I_PROBLEM] == lib.TB_NO_AID and aid:
            rest = text[1:].lstrip()
            return self.read(b'{"aid":' + msgspec.json.encode(aid) + (b"," if rest != b"}" else b"") + rest, "")
        if item[lib.TB_I_PROBLEM] != lib.TB_OK:
            return problem_of(item[lib.TB_I_PROBLEM], item[lib.TB_I_MEMBER], limits), ids
        members = Members(item, self._view.lines, lib.TB_I_SPANS)
        at, size = item[lib.TB_I_OUT], item[lib.TB_I_OUT_LEN]
        out: bytes = ffi.buffer(self._view.out + at, size)[:] if size else b""
        return Line(members.text(AID), out, ids, members.asked()), ids

    def _scan(self, text: bytes) -> tuple[list[int], bytes | None] | None:
        if lib.tb_framer_feed(self._framer, text + b"\n", len(text) + 1):
            raise MemoryError
        if lib.tb_scan(self._framer, self._tools, self._batch, 1, self._limits.depth, self._view):
            raise MemoryError
        if not text or not self._view.count:
            return None
        item = ffi.unpack(self._view.items, lib.TB_ITEM)
        at, size = item[lib.TB_I_IDS], item[lib.TB_I_IDS_LEN]
        return item, ffi.buffer(self._view.ids + at, size)[:] if size else None
