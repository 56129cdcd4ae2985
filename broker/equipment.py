"""What tools there are: all that the configuration names, what runs it, and what of it waits."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path

from broker import errors
from broker.assets import Assets
from broker.dispatch import Dispatcher
from broker.errors import ConfigError, Refusal
from broker.manifest import cards, described, options
from broker.model import Caller, Tool, ToolInfo
from broker.observe.log import Log
from broker.policy.pauses import EVERYTHING, Pauses
from broker.pool.core import Core
from broker.pool.pool import Pool
from broker.pool.process import Spawner, Spec
from broker.pool.rules import STARTUP_SECONDS
from broker.registry import Registry
from broker.runtimes.commands import Commands
from broker.runtimes.events.program import Program as EventProgram
from broker.runtimes.events.program import describe as describe_events
from broker.runtimes.events.tool import EventTool
from broker.runtimes.jina import Jina
from broker.runtimes.oneshot import describe
from broker.runtimes.program import programs
from broker.runtimes.python.app import App
from broker.runtimes.remote import Remote
from broker.runtimes.serve import ServeRuntime
from broker.settings import Card, Config

OUT = Refusal(errors.NOT_FOUND, "the tool has just been taken out of the configuration")


class Equipment:
    def __init__(
        self, settings: Config, core: Core, registry: Registry, dispatcher: Dispatcher, private: Path, log: Log
    ):
        self.runtimes: list[ServeRuntime] = []
        self.commands: list[Commands | EventTool] = []
        self.apps: list[App] = []
        self.jina: Jina | None = None
        self.remote: Remote | None = None
        self.assets = Assets()
        self.pauses = Pauses()
        self.spawner = Spawner()
        self._settings = settings
        self._core = core
        self._registry = registry
        self._dispatcher = dispatcher
        self._private = private  # where copies of plugins are
        self._log = log
        self._retired: list[ServeRuntime] = []  # removed by a reload, with calls still running
        self._old_commands: list[Commands | EventTool] = []
        self._old_apps: list[App] = []

    # --- start and change ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        for runtime, spec, tools in await self._learn(self._settings):
            self._add(runtime, spec, tools)
        self._use_commands(self._settings)
        self._use_apps(self._settings)

    async def reload(self, settings: Config) -> str:
        """What has not changed keeps its processes; a mistake changes nothing. What has been done, in words."""
        learned = await self._learn(settings)
        _no_doubles(learned, settings)
        before = {runtime.program.identity: runtime for runtime in self.runtimes}
        kept: list[ServeRuntime] = []
        added = []
        for runtime, spec, tools in learned:
            same = before.pop(runtime.program.identity, None)
            if same is None:
                added.append((runtime, spec, tools))
            else:
                kept.append(same)
                if [tool.info for tool in self._registry.of(same)] != tools or same.problem:
                    same.start(spec, self._tools_changed(same, tools))
        for runtime in before.values():
            for tool in self._registry.of(runtime):
                self._registry.remove(tool)
        self.runtimes = list(kept)
        for runtime, spec, tools in added:
            self._add(runtime, spec, tools)
        for runtime in before.values():
            self._retired.append(runtime)
            runtime.drain(OUT)
        self._registry.use_options(options(settings))
        self._use_commands(settings)
        self._use_apps(settings)
        mine = self._settings
        mine.toolhost, mine.oneshot, mine.events = settings.toolhost, settings.oneshot, settings.events
        mine.python, mine.tool = settings.python, settings.tool
        return f"{len(kept)} kept, {len(added)} added, {len(before)} removed, {len(self._registry)} tools"

    async def _learn(self, settings: Config) -> list[tuple[ServeRuntime, Spec, list[ToolInfo]]]:
        """Asks every toolhost for its tools, all at once."""
        runtimes = [
            ServeRuntime(program, self._core, self.spawner, self._log) for program in programs(settings, self._private)
        ]
        learned = await asyncio.gather(*(asyncio.to_thread(runtime.program.learn, self._log) for runtime in runtimes))
        return [(runtime, spec, tools) for runtime, (spec, tools) in zip(runtimes, learned, strict=True)]

    def _add(self, runtime: ServeRuntime, spec: Spec, tools: list[ToolInfo]) -> None:
        for info in tools:
            self._registry.add(info, runtime)
        runtime.on_tools = lambda tools: self._tools_changed(runtime, tools)
        self.runtimes.append(runtime)
        self.settle_pauses()
        runtime.start(spec, self._registry.of(runtime))

    def _use_commands(self, settings: Config) -> None:
        """[[oneshot]] and [[events]]: they have no processes to keep, so all of them are made anew."""
        for command in self.commands:
            for tool in self._registry.of(command):
                self._registry.remove(tool)
        old, self.commands = self.commands, []
        for one in settings.oneshot:
            self._add_command(Commands(one, settings.limits, self._core, self._log), describe(one), settings)
        for events in settings.events:
            program = EventProgram(events, settings.limits, self.assets, self._log)
            self._add_command(
                EventTool(program, settings.limits, self._core, self._log), describe_events(events), settings
            )
        self.settle_pauses()  # before those that waited for the old ones go to the new ones
        for command in old:
            command.drain(OUT)
        self._old_commands = [command for command in (*self._old_commands, *old) if command.alive()]

    def _add_command(self, command: Commands | EventTool, info: ToolInfo, settings: Config) -> None:
        self._registry.add(described([info], cards(settings))[0], command)
        self.commands.append(command)

    def _use_apps(self, settings: Config) -> None:
        """[[python]]: what has not changed stays warm."""
        cards = {card.name: card for card in settings.tool}
        before = {app.root: app for app in self.apps}
        self.apps = []
        for one in settings.python:
            app = before.get(os.path.realpath(one.app_root))
            if app is None or app.settings != one:
                app = App(one, settings.limits, self._core, self.spawner, self._log)
                app.prepare()
            self.apps.append(app)
        old = [app for app in before.values() if app not in self.apps]
        for app in old:
            for tool in self._registry.of(app):
                self._registry.remove(tool)
        for app in self.apps:
            self._tools_of(app, cards)
        self.settle_pauses()
        for app in old:
            app.drain(OUT)
        self._old_apps = [app for app in (*self._old_apps, *old) if app.alive()]

    def _tools_of(self, app: App, cards: dict[str, Card]) -> None:
        self._registry.replace(app, described(app.tools(), cards))
        for tool in self._registry.of(app):
            tool.timeout = tool.stats.timeout = app.timeout_of(tool.name)

    def _tools_changed(self, runtime: ServeRuntime, infos: list[ToolInfo]) -> list[Tool]:
        gone = self._registry.replace(runtime, infos)
        tools = self._registry.of(runtime)
        self.settle_pauses()
        self._dispatcher.changed(tools, gone)
        return tools

    def use_jina(self, jina: Jina) -> None:
        self.jina = jina
        for info in described(jina.tools, cards(self._settings)):
            self._registry.add(info, jina)

    # --- names --------------------------------------------------------------------------------------------------------

    def entry(self, app_root: str, entry: str) -> Tool | tuple[str, str] | None:
        """The tool that a namel3ss app means by it, or the class and the words of an error; none: not our app."""
        root = os.path.realpath(app_root)
        app = next((app for app in self.apps if app.root == root), None)
        if app is None:
            return None
        tool = self._registry.get(app.name_of(entry))
        if tool is not None:
            return tool
        kind, words = app.problem(entry)
        if kind:
            return kind, words
        if app.full() and not self._make_room_for_an_entry(app):
            return "PermissionError", f"{app.root} has too many tools that were asked for by their entry; name this one"
        cards = {card.name: card for card in self._settings.tool}
        self._registry.add(described([app.ask_for(entry)], cards)[0], app)
        self.settle_pauses()
        return self._registry.get(app.name_of(entry))

    def _make_room_for_an_entry(self, app: App) -> bool:
        """Names that have never been good for anything go first."""
        for tool in self._registry.of(app):
            self._dispatcher.catch_up(tool)
            if app.asked_for(tool.name) and tool.calls == tool.failed:
                app.give_up(tool.name)
                self._registry.remove(tool)
                return True
        return False

    # --- all of it ----------------------------------------------------------------------------------------------------

    def pools(self) -> Iterator[Pool]:
        for runtime in (*self.runtimes, *self._retired):
            yield from runtime.pools.values()

    def everything(self) -> Iterator[Pool | Commands | EventTool | App | Remote | Jina]:
        yield from self.pools()
        if self.jina is not None:
            yield self.jina
        if self.remote is not None:
            yield self.remote
        yield from (*self.commands, *self._old_commands)
        yield from (*self.apps, *self._old_apps)

    def expire(self, now: float) -> None:
        for runtime in (*self.runtimes, *self._retired):
            runtime.expire(now)
        self._retired = [runtime for runtime in self._retired if runtime.alive()]
        for command in (*self.commands, *self._old_commands):
            command.expire(now)
        for app in (*self.apps, *self._old_apps):
            app.expire(now)
        self._old_apps = [app for app in self._old_apps if app.alive()]
        if self.jina is not None:
            self.jina.expire(now)

    def forget_tools(self) -> None:
        """Those that a reload, or a new plugin, has taken out, when the last call of theirs has ended."""
        core, registry = self._core, self._registry
        if len(core.tools) > len(registry):
            core.forget({tool.index for tool in registry}.union(*(pool.uses() for pool in self.pools())))

    def forget(self, caller: Caller) -> None:
        """It has hung up: what it has waiting is dropped."""
        for one in self.everything():
            one.forget(caller)

    def pump(self) -> None:
        for one in self.everything():
            one.pump()
        self._core.flush()

    def drain(self, refusal: Refusal) -> None:
        """What waits is refused; what runs may end."""
        for runtime in self.runtimes:
            runtime.program.give_up()
        for one in self.everything():
            one.drain(refusal)

    def busy(self) -> bool:
        return any(one.busy() for one in self.everything())

    def close(self, refusal: Refusal) -> None:
        """What still runs ends here."""
        for one in self.everything():
            one.close(refusal)

    def alive(self) -> bool:
        """It has processes."""
        return any(one.alive() for one in self.everything())

    async def warm(self) -> None:
        """Waits until each pool has one toolhost that answers, or has said why not."""
        deadline = time.monotonic() + STARTUP_SECONDS
        waiting = [pool for pool in self.pools() if pool.settings.min]
        while waiting and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
            waiting = [pool for pool in waiting if not pool.ready and not pool.starts.broken]

    def make_room(self) -> None:
        """A pool has no process and none may be started: an idle one of another pool's leaves, one at a time."""
        if not any(host.asked_to_leave for pool in self.pools() for host in pool.leaving):
            any(pool.spare() for pool in self.pools())

    def refreshed(self) -> Awaitable[object] | None:
        """Plugins that are being read anew, if any; their files are looked at now."""
        tasks = [task for runtime in self.runtimes if (task := runtime.refreshing()) is not None]
        return asyncio.gather(*tasks, return_exceptions=True) if tasks else None

    # --- pauses -------------------------------------------------------------------------------------------------------

    def pause(self, name: str) -> str:
        """From now on calls of this tool or pool (`*`: of all) wait, those that run finish. Or which ones there are."""
        pools = self._pool_of_tools()
        if name != EVERYTHING and name not in {*pools.values(), *(tool.name for tool in pools)}:
            known = ", ".join(sorted({pool for tool, pool in pools.items() if pool != tool.name}))
            return f"there is no pool or tool called {name!r}; pools: {known}; `broker tools` shows the tools"
        self.pauses.names.add(name)
        self.settle_pauses()
        return ""

    def resume(self, name: str) -> str:
        """They go on. Or why not."""
        wrong = self.pauses.resume(name)
        if not wrong:
            self.settle_pauses()
            self.pump()
        return wrong

    def _pool_of_tools(self) -> dict[Tool, str]:
        """Of all that can be made to wait. What the broker runs itself is done at once; a command is its own pool."""
        serving = {tool: one.program.name for one in self.runtimes for tool in self._registry.of(one)}
        serving |= {tool: app.root for app in self.apps for tool in self._registry.of(app)}
        if self.remote is not None:
            serving |= dict.fromkeys(self._registry.of(self.remote), "remote")
        if self.jina is not None:
            serving |= {tool: tool.name for tool in self._registry.of(self.jina)}
        return serving | {tool: tool.name for one in self.commands for tool in self._registry.of(one)}

    def settle_pauses(self) -> None:
        """Each tool is told whether its calls wait: names may mean others than before."""
        for tool, pool in self._pool_of_tools().items():
            tool.pause(self.pauses.hold(tool.name, pool))


def _no_doubles(learned: list[tuple[ServeRuntime, Spec, list[ToolInfo]]], settings: Config) -> None:
    seen: dict[str, str] = {one.name: " ".join(one.command) for one in settings.oneshot}
    seen |= {one.name: " ".join(one.command) for one in settings.events}
    seen |= {tool.name: app.app_root for app in settings.python for tool in app.tools}
    for runtime, _, tools in learned:
        for tool in tools:
            if tool.aid in seen:
                sources = f"one from {seen[tool.aid]}, one from {runtime.source}"
                raise ConfigError(f"two tools are called {tool.aid}: {sources}")
            seen[tool.aid] = runtime.source
