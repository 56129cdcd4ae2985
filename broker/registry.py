"""The tools that can be called, by name; the C scanner routes by the same table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from broker._native import ffi, lib
from broker.errors import ConfigError
from broker.model import Runtime, Tool, ToolInfo


class Source(Runtime, Protocol):
    """A runtime that brings tools along."""

    source: str
    timeout: float


class Registry:
    def __init__(self) -> None:
        self.table = ffi.gc(lib.tb_tools_new(), lib.tb_tools_free)
        self._tools: list[Tool | None] = []  # by index; an index is never used again
        self._by_name: dict[str, Tool] = {}
        self._sources: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Tool]:
        return iter(sorted(self._by_name.values(), key=lambda tool: tool.name))

    def __getitem__(self, index: int) -> Tool:
        tool = self._tools[index]
        assert tool is not None
        return tool

    def get(self, name: str) -> Tool | None:
        return self._by_name.get(name)

    def add(self, info: ToolInfo, runtime: Source) -> Tool:
        """Two tools of one name are a mistake in the configuration, never a choice of ours."""
        if info.aid in self._by_name:
            raise ConfigError(
                f"two tools are called {info.aid}: one from {self._sources[info.aid]}, one from {runtime.source}; "
                "take one of the two out of the configuration"
            )
        tool = Tool(len(self._tools), info, runtime, runtime.timeout)
        self._tools.append(tool)
        self._by_name[tool.name] = tool
        self._sources[tool.name] = runtime.source
        name = tool.name.encode()
        if lib.tb_tools_put(self.table, name, len(name), tool.index):
            raise MemoryError
        lib.tb_tools_open(self.table, tool.index, 1)
        return tool

    def remove(self, tool: Tool) -> None:
        """Its calls in flight go on; nobody finds it any more."""
        del self._by_name[tool.name], self._sources[tool.name]
        self._tools[tool.index] = None
        name = tool.name.encode()
        lib.tb_tools_put(self.table, name, len(name), -1)

    def calls(self) -> int:
        """Answered so far, by the tools that there are."""
        return sum(tool.calls for tool in self._by_name.values())

    def of(self, runtime: Runtime) -> list[Tool]:
        return [tool for tool in self._by_name.values() if tool.runtime is runtime]

    def replace(self, runtime: Source, infos: list[ToolInfo]) -> list[Tool]:
        """A runtime has these tools now. What it no longer has is returned, and gone."""
        now = {info.aid: info for info in infos}
        gone = []
        for tool in self.of(runtime):
            if tool.name in now:
                tool.info = now.pop(tool.name)
                tool.clean = 0
                tool.cost = 0.0
            else:
                gone.append(tool)
                self.remove(tool)
        for info in now.values():
            self.add(info, runtime)
        return gone
