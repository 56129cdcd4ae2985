"""The last things that went wrong, for an operator's eyes: no payload, no token, so many and not one more."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

MOST = 64
LONGEST = 200  # characters of a reason


class Trouble:
    """One of them; or several that were the same, one after the other."""

    __slots__ = ("code", "count", "reason", "time", "tool")

    def __init__(self, tool: str, code: str, reason: str) -> None:
        self.time = 0.0  # of the last one, by the wall's clock
        self.tool = tool  # or the pool
        self.code = code
        self.reason = reason
        self.count = 0


class Recent:
    def __init__(self) -> None:
        self._troubles: deque[Trouble] = deque(maxlen=MOST)

    def add(self, tool: str, code: str, reason: str) -> None:
        """`reason` quotes nobody: whoever writes it down leaves out what a tool has said (verdicts.unquoted)."""
        shown = reason[:LONGEST]
        last = self._troubles[-1] if self._troubles else None
        if last is None or (last.tool, last.code, last.reason) != (tool, code, shown):
            last = Trouble(tool, code, shown)
            self._troubles.append(last)
        last.time = time.time()
        last.count += 1

    def report(self) -> list[dict[str, Any]]:
        """The newest one last."""
        return [
            {"time": one.time, "tool": one.tool, "code": one.code, "reason": one.reason, "count": one.count}
            for one in self._troubles
        ]
