"""What a waiting child calls while it waits, so that the first call of its own finds everything at hand."""

from __future__ import annotations

from typing import Any


def run(payload: Any) -> Any:
    return payload
