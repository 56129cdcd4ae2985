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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from broker import addresses, errors
from broker._native import lib
from broker.bus import Bus
from broker.cluster.cluster import Cluster
from broker.control import Control
from broker.dispatch import Dispatcher
from broker.equipment import Equipment
from broker.errors import ConfigError, Refusal
from broker.faces.machina.listener import MachinaFace
from broker.jobs import Jobs
from broker.manifest import advice, cards, described, options
from broker.observe.audit import Audit, default_path, default_state
from broker.observe.log import Log
from broker.policy.rights import Book
from broker.pool import process
from broker.pool.core import Core
from broker.pool.janitor import Janitor
from broker.registry import Registry
from broker.runtimes.builtin import Builtin
from broker.runtimes.jina import Jina
from broker.runtimes.program import private_directory, remove_directory
from broker.secrets import Lent, Secrets
from broker.settings import Config, Utp
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
        self._private = private_directory(_runtime_directory(socket))
        self.equipment = Equipment(settings, self.core, self.registry, self.dispatcher, self._private, log)
        self.core.make_room = self.equipment.make_room
        self.core.waiting_bytes = lambda: sum(room.size for room in self.dispatcher.rooms)
        self._state: StateFile | None = None
        self.control = Control(self)
        self.face: MachinaFace = MachinaFace(
            self.core,
            self.dispatcher,
            settings.limits,
            settings.server.max_connections,
            Book(settings.principal),
            log,
            self.control,
            self.equipment.forget,
            self.equipment.pump,
            self.equipment.refreshed,
            self.door,
        )
        self.http: HttpFace | None = None
        self.bus = Bus(settings.nats.url, "toolhost-broker", log) if settings.nats.url else None
        self._joining: asyncio.Task[None] | None = None  # until NATS is there for the first time
        self.cluster = Cluster(self, self.bus) if self.bus is not None else None
        if self.cluster is not None:
            self.equipment.remote = self.cluster.remote
        else:  # in a cluster, no key is looked up without asking the others
            lib.tb_board_cache(self.core.board, self.dispatcher.cache.table)
        self.utp: UtpFace | None = None
        self.management: Management | None = None  # of CommonGround's definitions of tools
        self._builtin: Builtin | None = None
        self._pumping = False
        self.jobs: Jobs | None = None
        self.started = time.monotonic()
        self.rate = 0.0  # calls a second, recently
        self._rated = (self.started, 0)
        self.reload_config: Callable[[], Config] | None = None
        self._janitor: Janitor | None = None
        self.serving = False
        self._reloading = asyncio.Lock()

    # --- start ------------------------------------------------------------------------------------------------------

    async def start(self) -> list[str]:
        """Tools first, then listeners. Where it listens."""
        process.adopt_orphans()
        await self.equipment.start()
        if self.settings.jina.tools:
            settings = self.settings
            self.equipment.use_jina(Jina(settings.jina, settings.limits, self.core, self.secrets, self.lent, self.log))
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
        self._janitor = Janitor(self.core, [self._expire], self.equipment.pools)
        await self.equipment.warm()
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

    def _expire(self, now: float) -> None:
        self.equipment.expire(now)
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
            self.equipment.forget_tools()
            calls = self.registry.calls()
            self.rate = (calls - before) / (now - since)
            self._rated = (now, calls)

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            function(*arguments)
            self.core.flush()

        self.core.loop.call_soon(run)

    def pump_soon(self) -> None:
        """Some of what waits may go on, from within anything."""
        if not self._pumping:
            self._pumping = True
            self.core.loop.call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pumping = False
        if self._builtin is not None:
            self._builtin.pump()
        self.equipment.pump()

    # --- change -----------------------------------------------------------------------------------------------------

    async def reload(self) -> str:
        """Reads the configuration again: tools and rights. A mistake changes nothing."""
        async with self._reloading:
            settings = self.reload_config() if self.reload_config else self.settings
            text = await self.equipment.reload(settings)
            self._mind_names()
            rights = Book(settings.principal)
            self.face.use_rights(rights)
            if self.http is not None:
                self.http.use_rights(rights)
            if self.cluster is not None:
                self.cluster.face.use_rights()
            self.dispatcher.revise()
            self.core.flush()
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
        refusal = self.dispatcher.refusal()
        assert refusal is not None
        self.equipment.drain(refusal)
        self.dispatcher.refuse_waiting()
        for connection in list(self.face.connections):
            connection.drain()
        self.core.flush()
        deadline = time.monotonic() + self.settings.server.drain_seconds
        while time.monotonic() < deadline and self.equipment.busy():
            await asyncio.sleep(0.01)
        killed = Refusal(errors.DRAINING, "the broker stopped while this call was running; it may have run", ran=True)
        self.equipment.close(killed)
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
        while time.monotonic() < deadline and self.equipment.alive():
            await asyncio.sleep(0.002)
        self.core.close()
        self.equipment.spawner.stop()
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
            killed = Refusal(errors.DRAINING, "the broker was stopped at once; this call may have run", ran=True)
            broker.equipment.close(killed)
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
