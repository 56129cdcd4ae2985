"""A tool's answer, read: its output, or the failure that it stands for."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from broker.client.failures import BY_CODE, BadReply, CallFailed, NotFound, ToolError

_decode_any = msgspec.json.decode


class Reply(Struct, frozen=True):
    """What a tool has said."""

    aid: str
    output_json: str
    ds_state: Any = None  # the state's delta, as the toolhost reports it
    idempotent_hit: bool = False  # repeated from an earlier call under the same key

    @property
    def output(self) -> Any:
        """The output as Python has it. A Python tool's may have numbers that only Python's own JSON knows (NaN)."""
        try:
            return _decode_any(self.output_json)
        except msgspec.DecodeError:
            import json

            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(self.output_json)
            raise


class Wire(Struct):
    """A reply line's members."""

    ok: bool = False
    status: str | UnsetType = UNSET
    output_json: Any = ""
    error: str | None = ""
    type: str = ""
    ds_state: Any = None
    idempotent_hit: bool = False

    def succeeded(self) -> bool:
        """`status` is read first: Machina's own toolhost says `ok` for every tool that ran."""
        return self.ok if self.status is UNSET else self.status == "OK"

    def text(self) -> str:
        """`output_json` is a string; a toolhost that writes it as an object means the same."""
        output = self.output_json
        return output if isinstance(output, str) else msgspec.json.encode(output).decode()


class Output(Struct):
    """The least that tells a usual reply from all others, and its output."""

    status: str = ""
    output_json: Any = None


decode = msgspec.json.Decoder(Wire).decode
decode_output = msgspec.json.Decoder(Output).decode


def read(aid: str, line: bytes) -> Reply:
    """The reply, or raises the failure."""
    try:
        wire = decode(line)
    except msgspec.DecodeError as error:
        raise BadReply(aid, f"the reply cannot be read: {error}") from None
    if wire.succeeded():
        return Reply(aid, wire.text(), wire.ds_state, wire.idempotent_hit)
    raise failed(aid, wire, line)


def failed(aid: str, wire: Wire, line: bytes) -> CallFailed:
    """The failure that a reply without success stands for."""
    text = wire.error or ""
    if wire.type in BY_CODE:
        more = _decode_any(line)
        for known in ("id", "ok", "status", "error", "type", "aid"):
            more.pop(known, None)
        return BY_CODE[wire.type](aid, text, more=more)
    if wire.status is UNSET and text.startswith("tool not found"):
        return NotFound(aid, text)
    return ToolError(aid, text or f"status {wire.status}", more={"output_json": wire.text()})
