"""What a principal may do: which tools, which tiers, operator or not. Pure."""

from __future__ import annotations

import fnmatch

from broker.config import Principal
from broker.model import Tool


class Rights:
    """`everything` is the usual case, and lets plain calls pass without a look."""

    __slots__ = ("_patterns", "_tiers", "everything", "operator")

    def __init__(self, settings: Principal | None) -> None:
        self._patterns = tuple(settings.tools) if settings else ("*",)
        self._tiers = frozenset(settings.tiers if settings else range(4))
        self.operator = bool(settings and settings.operator)
        self.everything = "*" in self._patterns and len(self._tiers) == 4

    def allow(self, tool: Tool) -> bool:
        if self.everything:
            return True
        if tool.tier not in self._tiers:
            return False
        return any(fnmatch.fnmatchcase(tool.name, pattern) for pattern in self._patterns)


class Book:
    """Whose rights are which; whoever is not named may call everything, and is no operator."""

    def __init__(self, principals: list[Principal]) -> None:
        self._by_name = {settings.name: Rights(settings) for settings in principals}
        self._usual = Rights(None)

    def of(self, principal: str) -> Rights:
        return self._by_name.get(principal, self._usual)
