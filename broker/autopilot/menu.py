"""What a selector can pick from: SIDs, each for one tool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

MOST = 9999


class Menu:
    """SID ↔ AID, in the order of the tools' names.

    >>> menu = Menu([{"aid": "AID.B.v1"}, {"aid": "AID.A.v1"}])
    >>> menu["SID0001"]["aid"], menu.sid("AID.B.v1")
    ('AID.A.v1', 'SID0002')
    """

    def __init__(self, tools: Iterable[dict[str, Any]]) -> None:
        listed = sorted(tools, key=lambda tool: tool["aid"])
        if len(listed) > MOST:
            raise ValueError(f"a menu has at most {MOST} tools, and there are {len(listed)}; leave some out")
        self._tools = {f"SID{number:04}": tool for number, tool in enumerate(listed, 1)}
        self._sids = {tool["aid"]: sid for sid, tool in self._tools.items()}

    def __len__(self) -> int:
        return len(self._tools)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __contains__(self, sid: object) -> bool:
        return sid in self._tools

    def __getitem__(self, sid: str) -> dict[str, Any]:
        """What is known of the tool."""
        return self._tools[sid]

    def sid(self, aid: str) -> str:
        return self._sids[aid]

    def rows(self) -> list[dict[str, Any]]:
        """As a selector is told."""
        return [
            {"sid": sid, "aid": tool["aid"], "name": tool.get("name", ""), "tags": list(tool.get("tags", ()))}
            for sid, tool in self._tools.items()
        ]
