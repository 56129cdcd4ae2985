"""Pooled `--serve` toolhosts: a pool for a program, or one for each principal; the plugin's replacement."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import msgspec

from broker._native import ffi
from broker.errors import ConfigError, Refusal
from broker.model import Judge, Tool, ToolInfo, Work
from broker.observe.log import Log
from broker.pool.core import Core
from broker.pool.pool import Pool
from broker.pool.process import Spawner, Spec
from broker.runtimes.program import Program

MOST_READS = 8  # of a plugin that changes while it is read


class ServeRuntime:
    def __init__(self, program: Program, core: Core, spawner: Spawner, log: Log) -> None:
        self.program = program
        self.source = program.source
        self.timeout = program.settings.timeout_seconds or program.limits.timeout_seconds
        self.pools: dict[str, Pool] = {}  # by principal where callers are isolated, else one, called ""
        self.problem = ""  # why the newest plugin is not the one that is used
        self.on_tools: Callable[[list[ToolInfo]], list[Tool]] | None = None  # of a replaced plugin, before it is used
        self._core = core
        self._spawner = spawner
        self._log = log
        self._spec: Spec | None = None
        self._tools: list[Tool] = []
        self._looked = -1  # at the plugin's file, in which round
        self._path = ffi.new("char[]", os.fsencode(program.plugin.source)) if program.plugin else None
        self._refreshing: asyncio.Task[None] | None = None
        self._drained = False

    def start(self, spec: Spec, tools: list[Tool]) -> None:
        """From now on this is what runs; toolhosts of before finish what they have."""
        self._spec = spec
        self._tools = tools
        self.problem = ""
        if self.program.settings.isolate == "none" and not self.pools:
            self._new_pool("")
        else:
            for pool in self.pools.values():
                pool.use(spec)
        if self.program.settings.isolate == "none":  # else whose pool it is depends on the caller
            self.pools[""].attach(tools)
            self._trust()

    def _trust(self) -> None:
        """The board need not ask while the plugin's file is what it was when it was read."""
        if self._path is not None and "" in self.pools:
            file = self.pools[""].board.file
            file.path = self._path
            file.stamp = self.program.stamp()
            file.watch = -1  # what a watch does not see (a link, or a folder, that was switched) counts as well

    def _new_pool(self, principal: str) -> Pool:
        assert self._spec is not None
        settings, name = self.program.settings, self.program.name
        if principal:
            settings = msgspec.structs.replace(settings, min=0)
            name = f"{name}@{principal}"
        pool = Pool(name, settings, self.program.limits, self._core, self._spawner, self._log)
        self.pools[principal] = pool
        pool.use(self._spec)
        pool.hold(self._refreshing is not None)
        return pool

    def submit(self, work: Work, now: float) -> None:
        if self._looked != self._core.board.round:
            self._looked = self._core.board.round
            self._look()
        principal = "" if self.program.settings.isolate == "none" else work.caller.principal
        (self.pools.get(principal) or self._new_pool(principal)).submit(work, now)

    def _look(self) -> None:
        """Once a read: has the plugin been replaced? Then calls wait until the new one is loaded."""
        if self._refreshing is not None:
            return
        if self.program.changed():
            self._refreshing = self._core.loop.create_task(self._refresh())
            for pool in self.pools.values():
                pool.hold(True)

    def refreshing(self) -> asyncio.Task[None] | None:
        """Whoever knows its tools only from before has to wait for this."""
        self._look()
        return self._refreshing

    async def _learn(self) -> tuple[Spec, list[ToolInfo]]:
        """What is written while it is read is read again: calls that came meanwhile wait for the whole of it."""
        for _ in range(MOST_READS):
            try:
                learned = await asyncio.to_thread(self.program.learn, self._log)
            except ConfigError:
                if self._drained or not self.program.changed():
                    raise
            else:
                if self._drained or not self.program.changed():
                    return learned
        return await asyncio.to_thread(self.program.learn, self._log)

    async def _refresh(self) -> None:
        """The plugin's file has changed. If the new one is no good, the old one goes on, and we say why."""
        try:
            spec, tools = await self._learn()
            if self._drained:
                return
            if self.on_tools is not None:
                self._tools = self.on_tools(tools)
        except Exception as error:  # a ConfigError says it well; anything else must not hold the calls either
            if self._drained:
                return
            self.problem = str(error) if isinstance(error, ConfigError) else repr(error)
            self._log.error("new plugin refused, the old one goes on", plugin=self.source, reason=self.problem)
            self._refreshing = None
            self._trust()
            for pool in self.pools.values():
                pool.hold(False)
                pool.pump()
        else:
            self._log.info("plugin replaced", plugin=self.source, tools=len(tools))
            self._refreshing = None
            self.start(spec, self._tools)
        self._core.flush()

    def expire(self, now: float) -> None:
        for principal, pool in list(self.pools.items()):
            pool.expire(now)
            if principal and not pool.alive() and not pool.queue:
                del self.pools[principal]

    def alive(self) -> bool:
        return any(pool.alive() for pool in self.pools.values())

    def drain(self, refusal: Refusal) -> None:
        """For good: also a plugin that is being read will not be used."""
        self._drained = True
        self.program.give_up()
        for pool in self.pools.values():
            pool.drain(refusal)

    def revise(self, judge: Judge, index: int | None = None) -> None:
        for pool in self.pools.values():
            pool.revise(judge, index)
