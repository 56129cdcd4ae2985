"""What JSON on a wire must be before anything recursive reads it."""

from __future__ import annotations

from broker._native import lib


def is_json(text: bytes, depth: int) -> bool:
    return bool(lib.tb_json_check(text, len(text), depth) == lib.TB_OK)


def is_too_deep(text: bytes, depth: int) -> bool:
    """Nothing is wrong with it until it is nested deeper than that."""
    return bool(lib.tb_json_check(text, len(text), depth) == lib.TB_TOO_DEEP)
