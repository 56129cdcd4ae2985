"""The daemon: configuration in, listeners open, and everything that it started gone when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from broker import addresses, errors
from broker._native import lib
from broker.assets import Assets
from broker.bus import Bus
from broker.cluster.cluster import Cluster
from broker.control import Control
from broker.dispatch import Dispatcher
from broker.errors import ConfigError, Refusal
from broker.faces.machina.listener import MachinaFace
from broker.jobs import Jobs
from broker.manifest import advice, cards, described, options
from broker.model import Caller, Tool, ToolInfo
from broker.observe.audit import Audit, default_path, default_state
from broker.observe.log import Log
from broker.policy.pauses import EVERYTHING, Pauses
from broker.policy.rights import Book
from broker.pool import process
from broker.pool.core import Core
from broker.pool.janitor import Janitor
from broker.pool.pool import Pool
from broker.pool.process import Spawner, Spec
from broker.pool.rules import STARTUP_SECONDS
from broker.registry import Registry
from broker.runtimes.builtin import Builtin
from broker.runtimes.commands import Commands
from broker.runtimes.events.program import Program as EventProgram
from broker.runtimes.events.program import describe as describe_events
from broker.runtimes.events.tool import EventTool
from broker.runtimes.jina import Jina
from broker.runtimes.oneshot import describe
from broker.runtimes.program import private_directory, programs, remove_directory
from broker.runtimes.python.app import App
from broker.runtimes.remote import Remote
from broker.runtimes.serve import ServeRuntime
from broker.secrets import Lent, Secrets
from broker.settings import Card, Config, Utp
from broker.statefile import StateFile
from broker.tokens import Door, Tokens
from broker.tokens import default_path as tokens_path
from broker.utp import args

if TYPE_CHECKING:
    from broker.faces.http.face import HttpFace
    from broker.faces.utp.face import UtpFace
    from broker.utp.management import Management

RATE_SECONDS = 2.0
REAP_SECONDS = 5.0  # for killed processes to be gone at the end


class Broker:
    def __init__(self, loop: asyncio.AbstractEventLoop, settings: Config, socket: str, log: Log) -> None:
        self.settings = settings
        self.socket = socket
        self.log = log
        self.core = Core(loop, settings.limits)
        self.registry = Registry(settings.breaker, settings.lease.enforce, self.core.learn)
        self.registry.use_options(options(settings))
        self.secrets = Secrets(os.environ, log.hidden)
        self.lent = Lent(self.secrets, settings.utp.variables)
        self.audit = Audit(settings.lease.audit or default_path(os.environ), log)
        self.door = Door(Tokens(tokens_path()), log)
        self.dispatcher = Dispatcher(self.registry, settings, self.audit, self._soon, self.secrets)
        self.core.policy = self.dispatcher
        self.core.make_room = self._make_room
        self.core.waiting_bytes = lambda: sum(room.size for room in self.dispatcher.rooms)
        self.runtimes: list[ServeRuntime] = []
        self._retired: list[ServeRuntime] = []  # removed by a reload, with calls still running
        self.commands: list[Commands | EventTool] = []
        self._old_commands: list[Commands | EventTool] = []
        self.assets = Assets()
        self._state: StateFile | None = None
        self.apps: list[App] = []
        self._old_apps: list[App] = []
        self.control = Control(self)
        self.face: MachinaFace = MachinaFace(
            self.core,
            self.dispatcher,
            settings.limits,
            settings.server.max_connections,
            Book(settings.principal),
            log,
            self.control,
            self.forget,
            self._pump,
            self.refreshed,
            self.door,
        )
        self.http: HttpFace | None = None
        self.bus = Bus(settings.nats.url, "toolhost-broker", log) if settings.nats.url else None
        self._joining: asyncio.Task[None] | None = None  # until NATS is there for the first time
        self.cluster = Cluster(self, self.bus) if self.bus is not None else None
        if self.cluster is None:  # else no key is looked up without asking the others
            lib.tb_board_cache(self.core.board, self.dispatcher.cache.table)
        self.utp: UtpFace | None = None
        self.jina: Jina | None = None
        self.management: Management | None = None  # of CommonGround's definitions of tools
        self._builtin: Builtin | None = None
        self._pumping = False
        self.jobs: Jobs | None = None
        self.started = time.monotonic()
        self.pauses = Pauses()
        self.rate = 0.0  # calls a second, recently
        self._rated = (self.started, 0)
        self.reload_config: Callable[[], Config] | None = None
        self._private = private_directory(_runtime_directory(socket))
        self._spawner = Spawner()
        self._janitor: Janitor | None = None
        self.serving = False
        self._reloading = asyncio.Lock()

    # --- start ------------------------------------------------------------------------------------------------------

    async def start(self) -> list[str]:
        """Tools first, then listeners. Where it listens."""
        process.adopt_orphans()
        for runtime, spec, tools in await self._learn(self.settings):
            self._add(runtime, spec, tools)
        self._use_commands(self.settings)
        self._use_apps(self.settings)
        self._use_jina()
        if self.settings.http.listen:
            self._open_http()
        if self.settings.utp.targets:
            await self._open_utp()
        elif self.settings.utp != Utp():
            await self._open_management()
        self._mind_names()
        if self.settings.lease.enforce or self.settings.lease.audit:
            self.audit.open()
        if self.settings.server.state_file:
            state = StateFile(self.settings.server.state_file, self.dispatcher.sessions, self.log)
            state.read()
            self._state = state  # what could not be read is not written over
        self._janitor = Janitor(self.core, [self._expire], self.pools)
        await self._warm()
        self.face.listen_unix(addresses.operator_socket(self.socket), operator=True)
        self.face.listen_unix(self.socket, operator=False, group=self.settings.server.socket_group)
        places = [f"unix:{self.socket}"]
        if self.settings.server.tcp:
            trusted = self.settings.server.insecure or self.door.locked()
            host, port = self.face.listen_tcp(self.settings.server.tcp, trusted=trusted)
            places.append(f"tcp:{host}:{port}")
        if self.http is not None:
            places.append(await self.http.start())
        if self.bus is not None:
            self._joining = asyncio.create_task(self.bus.start())
        self.serving = True
        return places

    def _open_http(self) -> None:
        """The listener, the folder of jobs, and the tools that come with it; nobody is answered yet."""
        try:
            from broker.faces.http.face import HttpFace
        except ImportError as error:
            raise ConfigError(f"HTTP needs {error.name}: pip install 'toolhost-broker[http]'") from None
        self.http = HttpFace(self)
        settings = self.settings.http
        folder = Path(settings.jobs or default_state(os.environ) / f"jobs-{self.http.port}")
        self.jobs = Jobs(folder, settings.job_seconds, settings.job_bytes, self.log)
        self.jobs.open()
        self._builtin = Builtin(self.core, self.jobs, self.settings.limits.reply_bytes)
        for info in described(self._builtin.tools, cards(self.settings)):
            self.registry.add(info, self._builtin)

    async def _open_utp(self) -> None:
        """CommonGround's commands: its store is there, or is looked for."""
        try:
            from broker.faces.utp.face import UtpFace
            from broker.utp.management import Management
        except ImportError as error:
            raise _no_utp(error) from None
        assert self.bus is not None  # else the configuration would have been refused
        self.utp = UtpFace(self, self.bus)
        await self.utp.start()
        self.management = Management(self.utp.stores, shared=True)

    async def _open_management(self) -> None:
        """A store, and nothing to execute: definitions of tools can be written all the same."""
        try:
            from broker.utp.management import Management
            from broker.utp.stores import make_stores
        except ImportError as error:
            raise _no_utp(error) from None
        self.management = Management(make_stores(self.settings.utp), shared=False)
        await self.management.open()

    def _mind_names(self) -> None:
        """What is not as AutoSage's users expect, and what is said of tools that are not there."""
        for tool in self.registry:
            if said := advice(tool.name):
                self.log.warning("unusual name of a tool", aid=tool.name, advice=said)
            for variable in args.read(tool.options).envs.values():
                if self.secrets.get(variable) is None:
                    self.log.warning("a tool's variable has no value", aid=tool.name, variable=variable)
        for card in self.settings.tool:
            if self.registry.get(card.name) is None:
                self.log.warning("[[tool]] is about a tool that is not there", aid=card.name)

    async def _learn(self, settings: Config) -> list[tuple[ServeRuntime, Spec, list[ToolInfo]]]:
        """Asks every toolhost for its tools, all at once."""
        runtimes = [
            ServeRuntime(program, self.core, self._spawner, self.log) for program in programs(settings, self._private)
        ]
        learned = await asyncio.gather(*(asyncio.to_thread(runtime.program.learn, self.log) for runtime in runtimes))
        return [(runtime, spec, tools) for runtime, (spec, tools) in zip(runtimes, learned, strict=True)]

    def _add(self, runtime: ServeRuntime, spec: Spec, tools: list[ToolInfo]) -> None:
        for info in tools:
            self.registry.add(info, runtime)
        runtime.on_tools = lambda tools: self._tools_changed(runtime, tools)
        self.runtimes.append(runtime)
        self.settle_pauses()
        runtime.start(spec, self.registry.of(runtime))

    def _use_commands(self, settings: Config) -> None:
        """[[oneshot]] and [[events]]: they have no processes to keep, so all of them are made anew."""
        for command in self.commands:
            for tool in self.registry.of(command):
                self.registry.remove(tool)
        old, self.commands = self.commands, []
        for one in settings.oneshot:
            self._add_command(Commands(one, settings.limits, self.core, self.log), describe(one), settings)
        for events in settings.events:
            program = EventProgram(events, settings.limits, self.assets, self.log)
            self._add_command(
                EventTool(program, settings.limits, self.core, self.log), describe_events(events), settings
            )
        self.settle_pauses()  # before those that waited for the old ones go to the new ones
        for command in old:
            command.drain(Refusal(errors.NOT_FOUND, "the tool has just been taken out of the configuration"))
        self._old_commands = [command for command in (*self._old_commands, *old) if command.alive()]

    def _add_command(self, command: Commands | EventTool, info: ToolInfo, settings: Config) -> None:
        self.registry.add(described([info], cards(settings))[0], command)
        self.commands.append(command)

    def _use_apps(self, settings: Config) -> None:
        """[[python]]: what has not changed stays warm."""
        cards = {card.name: card for card in settings.tool}
        before = {app.root: app for app in self.apps}
        self.apps = []
        for one in settings.python:
            app = before.get(os.path.realpath(one.app_root))
            if app is None or app.settings != one:
                app = App(one, settings.limits, self.core, self._spawner, self.log)
                app.prepare()
            self.apps.append(app)
        old = [app for app in before.values() if app not in self.apps]
        for app in old:
            for tool in self.registry.of(app):
                self.registry.remove(tool)
        for app in self.apps:
            self._tools_of(app, cards)
        self.settle_pauses()
        for app in old:
            app.drain(Refusal(errors.NOT_FOUND, "the tool has just been taken out of the configuration"))
        self._old_apps = [app for app in (*self._old_apps, *old) if app.alive()]

    def _use_jina(self) -> None:
        settings = self.settings.jina
        if settings.tools:
            self.jina = Jina(settings, self.settings.limits, self.core, self.secrets, self.lent, self.log)
            for info in described(self.jina.tools, cards(self.settings)):
                self.registry.add(info, self.jina)

    def _tools_of(self, app: App, cards: dict[str, Card]) -> None:
        self.registry.replace(app, described(app.tools(), cards))
        for tool in self.registry.of(app):
            tool.timeout = tool.stats.timeout = app.timeout_of(tool.name)

    def entry(self, app_root: str, entry: str) -> Tool | tuple[str, str] | None:
        """The tool that a namel3ss app means by it, or the class and the words of an error; none: not our app."""
        root = os.path.realpath(app_root)
        app = next((app for app in self.apps if app.root == root), None)
        if app is None:
            return None
        tool = self.registry.get(app.name_of(entry))
        if tool is not None:
            return tool
        kind, words = app.problem(entry)
        if kind:
            return kind, words
        if app.full() and not self._make_room_for_an_entry(app):
            return "PermissionError", f"{app.root} has too many tools that were asked for by their entry; name this one"
        cards = {card.name: card for card in self.settings.tool}
        self.registry.add(described([app.ask_for(entry)], cards)[0], app)
        self.settle_pauses()
        return self.registry.get(app.name_of(entry))

    def _make_room_for_an_entry(self, app: App) -> bool:
        """Names that have never been good for anything go first."""
        for tool in self.registry.of(app):
            self.dispatcher.catch_up(tool)
            if app.asked_for(tool.name) and tool.calls == tool.failed:
                app.give_up(tool.name)
                self.registry.remove(tool)
                return True
        return False

    async def _warm(self) -> None:
        """Waits until each pool has one toolhost that answers, or has said why not."""
        deadline = time.monotonic() + STARTUP_SECONDS
        waiting = [pool for pool in self.pools() if pool.settings.min]
        while waiting and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
            waiting = [pool for pool in waiting if not pool.ready and not pool.starts.broken]

    def pools(self) -> Iterator[Pool]:
        for runtime in (*self.runtimes, *self._retired):
            yield from runtime.pools.values()

    def everything(self) -> Iterator[Pool | Commands | EventTool | App | Remote | Jina]:
        yield from self.pools()
        if self.jina is not None:
            yield self.jina
        if self.cluster is not None and self.cluster.remote is not None:
            yield self.cluster.remote
        yield from (*self.commands, *self._old_commands)
        yield from (*self.apps, *self._old_apps)

    def _expire(self, now: float) -> None:
        for runtime in (*self.runtimes, *self._retired):
            runtime.expire(now)
        self._retired = [runtime for runtime in self._retired if runtime.alive()]
        for command in (*self.commands, *self._old_commands):
            command.expire(now)
        for app in (*self.apps, *self._old_apps):
            app.expire(now)
        if self.jina is not None:
            self.jina.expire(now)
        self._old_apps = [app for app in self._old_apps if app.alive()]
        self.dispatcher.expire(now)
        self.face.expire(now)
        if self.http is not None:
            self.http.expire(now)
        if self.cluster is not None:
            self.cluster.expire(now)
        if self.utp is not None:
            self.utp.expire(now)
        if self._state is not None:
            self._state.expire(now)
        since, before = self._rated
        if now - since >= RATE_SECONDS:
            self.dispatcher.catch_up_all()
            self._forget_tools()
            calls = self.registry.calls()
            self.rate = (calls - before) / (now - since)
            self._rated = (now, calls)

    def _forget_tools(self) -> None:
        """Those that a reload, or a new plugin, has taken out, when the last call of theirs has ended."""
        if len(self.core.tools) > len(self.registry):
            self.core.forget({tool.index for tool in self.registry}.union(*(pool.uses() for pool in self.pools())))

    def _make_room(self) -> None:
        """A pool has no process and none may be started: an idle one of another pool's leaves, one at a time."""
        if not any(host.asked_to_leave for pool in self.pools() for host in pool.leaving):
            any(pool.spare() for pool in self.pools())

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            function(*arguments)
            self.core.flush()

        self.core.loop.call_soon(run)

    def forget(self, caller: Caller) -> None:
        """It has hung up: what it has waiting is dropped."""
        for pool in self.everything():
            pool.forget(caller)

    def refreshed(self) -> Awaitable[object] | None:
        """Plugins that are being read anew, if any; their files are looked at now."""
        tasks = [task for runtime in self.runtimes if (task := runtime.refreshing()) is not None]
        return asyncio.gather(*tasks, return_exceptions=True) if tasks else None

    def _pump(self) -> None:
        for pool in self.everything():
            pool.pump()
        self.core.flush()

    def pump_soon(self) -> None:
        """Some of what waits may go on, from within anything."""
        if not self._pumping:
            self._pumping = True
            self.core.loop.call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pumping = False
        if self._builtin is not None:
            self._builtin.pump()
        self._pump()

    # --- change -----------------------------------------------------------------------------------------------------

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
            for pool in self.everything():
                pool.pump()
            self.core.flush()
        return wrong

    def _pool_of_tools(self) -> dict[Tool, str]:
        """Of all that can be made to wait. What the broker runs itself is done at once; a command is its own pool."""
        serving = {tool: one.program.name for one in self.runtimes for tool in self.registry.of(one)}
        serving |= {tool: app.root for app in self.apps for tool in self.registry.of(app)}
        if self.cluster is not None and self.cluster.remote is not None:
            serving |= dict.fromkeys(self.registry.of(self.cluster.remote), "remote")
        if self.jina is not None:
            serving |= {tool: tool.name for tool in self.registry.of(self.jina)}
        return serving | {tool: tool.name for one in self.commands for tool in self.registry.of(one)}

    def settle_pauses(self) -> None:
        """Each tool is told whether its calls wait: names may mean others than before."""
        for tool, pool in self._pool_of_tools().items():
            tool.pause(self.pauses.hold(tool.name, pool))

    def _tools_changed(self, runtime: ServeRuntime, infos: list[ToolInfo]) -> list[Tool]:
        gone = self.registry.replace(runtime, infos)
        tools = self.registry.of(runtime)
        self.settle_pauses()
        self.dispatcher.changed(tools, gone)
        return tools

    async def reload(self) -> str:
        """Reads the configuration again. What has not changed keeps its processes; a mistake changes nothing."""
        async with self._reloading:
            settings = self.reload_config() if self.reload_config else self.settings
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
                    if [tool.info for tool in self.registry.of(same)] != tools or same.problem:
                        same.start(spec, self._tools_changed(same, tools))
            for runtime in before.values():
                for tool in self.registry.of(runtime):
                    self.registry.remove(tool)
            self.runtimes = list(kept)
            for runtime, spec, tools in added:
                self._add(runtime, spec, tools)
            for runtime in before.values():
                self._retired.append(runtime)
                runtime.drain(Refusal(errors.NOT_FOUND, "the tool has just been taken out of the configuration"))
            self.registry.use_options(options(settings))
            self._use_commands(settings)
            self._use_apps(settings)
            self.settings.toolhost = settings.toolhost
            self.settings.oneshot = settings.oneshot
            self.settings.events = settings.events
            self.settings.python = settings.python
            self.settings.tool = settings.tool
            self._mind_names()
            rights = Book(settings.principal)
            self.face.use_rights(rights)
            if self.http is not None:
                self.http.use_rights(rights)
            if self.cluster is not None:
                self.cluster.face.use_rights()
            self.dispatcher.revise()
            self.core.flush()
            text = f"{len(kept)} kept, {len(added)} added, {len(before)} removed, {len(self.registry)} tools"
            self.log.info("reloaded", result=text)
            return text

    async def reload_quietly(self) -> None:
        """On SIGHUP there is nobody to tell but the log."""
        try:
            await self.reload()
        except ConfigError as error:
            self.log.error("reload refused, everything stays as it was", reason=str(error))

    # --- end --------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stops accepting, finishes what runs within the drain time, answers the rest, leaves no process behind."""
        if self.serving:
            self.log.info(
                "draining", seconds=self.settings.server.drain_seconds, connections=len(self.face.connections)
            )
        self.face.stop_accepting()
        if self.http is not None:
            self.http.stop_accepting()
        if self.cluster is not None:
            await self.cluster.stop_accepting()
        if self.utp is not None:
            await self.utp.stop_accepting()
        self.dispatcher.draining = True
        self.core.board.draining = True
        for runtime in self.runtimes:
            runtime.program.give_up()
        refusal = self.dispatcher.refusal()
        assert refusal is not None
        for pool in self.everything():
            pool.drain(refusal)
        self.dispatcher.refuse_waiting()
        for connection in list(self.face.connections):
            connection.drain()
        self.core.flush()
        deadline = time.monotonic() + self.settings.server.drain_seconds
        while time.monotonic() < deadline and any(pool.busy() for pool in self.everything()):
            await asyncio.sleep(0.01)
        killed = Refusal(errors.DRAINING, "the broker stopped while this call was running; it may have run", ran=True)
        for pool in self.everything():
            pool.close(killed)
        self.core.flush()
        await self._last_replies()
        if self.http is not None:
            await self.http.close()
        self.face.close()
        if self.utp is not None:
            await self.utp.close()
        if self.management is not None:
            await self.management.close()
        if self.bus is not None and self._joining is not None:
            self._joining.cancel()
            if self.cluster is not None:
                await self.cluster.stop()
            await self.bus.stop()
        if self._janitor:
            self._janitor.stop()
        deadline = time.monotonic() + REAP_SECONDS
        while time.monotonic() < deadline and any(pool.alive() for pool in self.everything()):
            await asyncio.sleep(0.002)
        self.core.close()
        self._spawner.stop()
        process.end_orphans()
        if self.jobs is not None:
            self.jobs.close()
        if self._state is not None:
            self._state.close()
        self.audit.close()
        remove_directory(self._private)

    async def _last_replies(self) -> None:
        """Callers that read get what is theirs."""
        deadline = time.monotonic() + 1.0
        while self.face.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.002)


def _no_utp(error: ImportError) -> ConfigError:
    return ConfigError(f"UTP needs {error.name}: pip install 'toolhost-broker[utp]'")


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


def _runtime_directory(socket: str) -> Path:
    """Private copies of plugins live beside the socket where that is our own place, else where temporary files do."""
    directory = Path(socket).parent
    if directory.name.startswith("toolhost-broker"):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.stat(directory).st_uid == os.getuid() and os.access(directory, os.W_OK):
                return directory
        except OSError as error:
            raise ConfigError(f"cannot make {directory}: {error.strerror}; choose another --socket") from None
    return Path(tempfile.gettempdir())


def _raise_descriptor_limit() -> None:
    """As many connections as the system allows us, not as many as the shell happened to set."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else 65536, hard))


async def serve(
    settings: Config,
    socket: str,
    log: Log,
    ready: Callable[[Broker, list[str]], None],
    reload_config: Callable[[], Config],
) -> None:
    """Runs until SIGTERM or SIGINT; a second one does not wait for what runs."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    _raise_descriptor_limit()
    broker = Broker(loop, settings, socket, log)
    broker.reload_config = reload_config

    def stop() -> None:
        if stopped.is_set():
            settings.server.drain_seconds = 0.0
            for pool in broker.everything():
                pool.close(Refusal(errors.DRAINING, "the broker was stopped at once; this call may have run", ran=True))
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(broker.reload_quietly()))
    try:
        places = await broker.start()
        gc.freeze()  # what is there now stays: no collection need look at it again
        gc.set_threshold(50_000, 20, 20)
        ready(broker, places)
        await stopped.wait()
    finally:
        await broker.stop()
        for number in (signal.SIGTERM, signal.SIGINT):  # one more of them must not change how we end
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
