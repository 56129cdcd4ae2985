"""What JSON on a wire must be before anything recursive reads it."""

from __future__ import annotations

from broker._native import lib


def is_json(text: bytes, depth: int) -> bool:
    return bool(lib.tb_json_check(text, len(text), depth) == lib.TB_OK)
