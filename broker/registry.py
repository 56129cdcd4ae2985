"""The tools that can be called, by name; the C scanner routes by the same table."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from broker._native import ffi, lib
from broker.errors import ConfigError
from broker.model import Runtime, Tool, ToolInfo
from broker.policy.breaker import Breaker, Settings, State
from broker.policy.rights import Rights
from broker.settings import Breaker as BreakerSettings


class Source(Runtime, Protocol):
    """A runtime that brings tools along."""

    source: str
    timeout: float


class Registry:
    """The scanner's tables: `strict` knows all names and lets nothing through without a look; for each kind of rights
    there is one that lets plain calls of open tools through."""

    def __init__(
        self, breaker: BreakerSettings, enforce_leases: bool, on_tool: Callable[[Tool], None] | None = None
    ) -> None:
        self.strict = ffi.gc(lib.tb_tools_new(), lib.tb_tools_free)
        self._tables: WeakKeyDictionary[Rights, Any] = WeakKeyDictionary()
        self._plain: WeakKeyDictionary[Rights, dict[str, Tool]] = WeakKeyDictionary()
        self._enforce_leases = enforce_leases
        self._on_tool = on_tool
        self._breaker = Settings(
            breaker.in_a_row,
            breaker.least_calls,
            breaker.share,
            breaker.window_seconds,
            breaker.open_seconds,
            breaker.max_open_seconds,
        )
        self._counted = breaker.count_tool_errors
        self._options: dict[str, dict[str, Any]] = {}
        self._count = 0  # of tools so far: an index is never used again
        self.changes = 0  # times that a tool has come, gone, or become another
        self._by_name: dict[str, Tool] = {}
        self._sources: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Tool]:
        return iter(sorted(self._by_name.values(), key=lambda tool: tool.name))

    def get(self, name: str) -> Tool | None:
        return self._by_name.get(name)

    def add(self, info: ToolInfo, runtime: Source) -> Tool:
        """Two tools of one name are a mistake in the configuration, never a choice of ours."""
        known = self._by_name.get(info.aid)
        if known is not None:
            if not known.info.elsewhere:
                raise self._double(info, runtime)
            self.remove(known)  # our own comes first
        self.changes += 1
        tool = Tool(self._count, info, runtime, runtime.timeout, Breaker(self._breaker))
        self._count += 1
        tool.counts_errors = any(fnmatch.fnmatchcase(tool.name, pattern) for pattern in self._counted)
        tool.stats.counted = tool.counts_errors
        tool.options = self._options_of(tool)
        self._by_name[tool.name] = tool
        if self._on_tool is not None:
            self._on_tool(tool)
        self._sources[tool.name] = runtime.source
        for table in (self.strict, *self._tables.values()):
            _put(table, tool.name, tool.index)
        self.gate(tool)
        return tool

    def use_options(self, options: dict[str, dict[str, Any]]) -> None:
        """By tool: what the configuration makes of its callers' arguments."""
        self._options = options
        for tool in self:
            tool.options = self._options_of(tool)
            self.gate(tool)

    def _options_of(self, tool: Tool) -> dict[str, Any] | None:
        return None if tool.info.elsewhere else self._options.get(tool.name)  # the broker that runs it has its own

    def _double(self, info: ToolInfo, runtime: Source) -> ConfigError:
        sources = f"one from {self._sources[info.aid]}, one from {runtime.source}"
        return ConfigError(f"two tools are called {info.aid}: {sources}; take one of the two out of the configuration")

    def table_of(self, rights: Rights) -> Any:
        """The table for callers with these rights; they share it."""
        table = self._tables.get(rights)
        if table is None:
            table = self._tables[rights] = ffi.gc(lib.tb_tools_new(), lib.tb_tools_free)
            for tool in self:
                _put(table, tool.name, tool.index)
                self.gate(tool)
        return table

    def plain_of(self, rights: Rights) -> dict[str, Tool]:
        """The tools whose plain calls need no look, for callers with these rights. It changes with them."""
        if rights not in self._plain:
            self._plain[rights] = {}
            for tool in self:
                self.gate(tool)
        return self._plain[rights]

    def gate(self, tool: Tool) -> None:
        """Plain calls need no look while the breaker is closed, no lease is asked for, no schema has to be fitted, no
        argument is added, it does not tell of itself while it runs, and the caller has the right."""
        closed = tool.breaker.state is not State.CLOSED or (self._enforce_leases and tool.tier > 0)
        closed = closed or tool.schema is not None or tool.options is not None or tool.info.live
        for rights, table in self._tables.items():
            lib.tb_tools_open(table, tool.index, not closed and rights.allow(tool))
        for rights, plain in self._plain.items():
            if not closed and rights.allow(tool):
                plain[tool.name] = tool
            else:
                plain.pop(tool.name, None)

    def remove(self, tool: Tool) -> None:
        """Its calls in flight go on; nobody finds it any more."""
        self.changes += 1
        del self._by_name[tool.name], self._sources[tool.name]
        tool.stats.pool = ffi.NULL
        for table in (self.strict, *self._tables.values()):
            _put(table, tool.name, -1)
        for plain in self._plain.values():
            plain.pop(tool.name, None)

    def calls(self) -> int:
        """Answered so far, by the tools that there are."""
        return sum(tool.calls for tool in self._by_name.values())

    def of(self, runtime: Runtime) -> list[Tool]:
        return [tool for tool in self._by_name.values() if tool.runtime is runtime]

    def replace(self, runtime: Source, infos: list[ToolInfo]) -> list[Tool]:
        """A runtime has these tools now. What it no longer has is returned, and gone. A double changes nothing."""
        for info in infos:
            known = self._by_name.get(info.aid)
            if known is not None and known.runtime is not runtime and not known.info.elsewhere:
                raise self._double(info, runtime)
        now = {info.aid: info for info in infos}
        gone = []
        for tool in self.of(runtime):
            if tool.name in now:
                self.changes += tool.info != now[tool.name]
                tool.describe(now.pop(tool.name))
                self.gate(tool)
                tool.forget()
            else:
                gone.append(tool)
                self.remove(tool)
        for info in now.values():
            self.add(info, runtime)
        return gone


def _put(table: Any, text: str, index: int) -> None:
    name = text.encode()
    if lib.tb_tools_put(table, name, len(name), index):
        raise MemoryError
