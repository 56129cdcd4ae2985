"""What a waiting child calls while it waits, so that the first call of its own finds everything at hand."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def run(payload: Any) -> Any:
    return payload
