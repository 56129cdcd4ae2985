"""What a principal may do: which tools, which tiers, operator or not. Pure."""

from __future__ import annotations

import fnmatch

from broker.model import Tool
from broker.settings import Principal


class Rights:
    """Shared by all who have the same: the scanner has a table for each."""

    __slots__ = ("__weakref__", "_patterns", "_tiers", "operator")

    def __init__(self, settings: Principal | None) -> None:
        self._patterns = tuple(settings.tools) if settings else ("*",)
        self._tiers = frozenset(settings.tiers if settings else range(4))
        self.operator = bool(settings and settings.operator)

    def allow(self, tool: Tool) -> bool:
        return tool.tier in self._tiers and any(fnmatch.fnmatchcase(tool.name, pattern) for pattern in self._patterns)

    def allow_any(self, name: str) -> bool:
        """A tool of this name, whatever its tier, which is not known here."""
        return len(self._tiers) == 4 and any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)


class Book:
    """Whose rights are which. A name may be a pattern; an exact one wins, then the first that fits. Whoever is not
    named may call everything, and is no operator."""

    def __init__(self, principals: list[Principal]) -> None:
        self._by_name = {settings.name: Rights(settings) for settings in principals}
        self._usual = Rights(None)

    def of(self, principal: str) -> Rights:
        found = self._by_name.get(principal)
        if found is not None:
            return found
        fitting = (rights for name, rights in self._by_name.items() if fnmatch.fnmatchcase(principal, name))
        return next(fitting, self._usual)
