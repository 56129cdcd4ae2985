"""The HTTP face: an ASGI app on uvicorn, in the broker's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn

from broker.errors import ConfigError
from broker.faces.caller import Caller
from broker.faces.http import page
from broker.faces.http.app import App
from broker.faces.http.autosage import AutoSage
from broker.faces.http.jobfiles import JobFiles
from broker.faces.http.namel3ss import Namel3ss
from broker.faces.http.openapi import OpenApi
from broker.faces.http.operating import Operating
from broker.faces.http.protocol import Rules, guarded
from broker.faces.http.queue import QueueRoutes
from broker.faces.http.request import Request, Response, answered
from broker.faces.http.sessions import SessionRoutes
from broker.faces.tcp import bind

if TYPE_CHECKING:
    from broker.policy.rights import Book
    from broker.server import Broker

BACKLOG = 1024
LOOK_SECONDS = 0.5
LAST_WORDS_SECONDS = 1.0


class _Server(uvicorn.Server):
    """Signals are the broker's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpFace:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._settings = broker.settings.http
        trusted = broker.settings.server.insecure or broker.door.locked()
        self._listener, self._loopback = bind(self._settings.listen, "--http", trusted=trusted)
        self._listener.listen(BACKLOG)
        self.host, self.port = self._listener.getsockname()[:2]
        self.caller = Caller(broker, "http")
        self.app = App(broker, self._settings, self._loopback)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._next_look = 0.0
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"http://{shown}:{self.port}"
        self._autosage: AutoSage | None = None
        self._namel3ss: Namel3ss | None = None
        self._operating = Operating(broker)

    async def start(self) -> str:
        """Once the tools are there. Where it listens."""
        broker, settings = self._broker, self._settings
        assert broker.jobs is not None
        self._autosage = AutoSage(broker, self.caller, broker.jobs)
        self._autosage.add_routes(self.app)
        JobFiles(broker.jobs).add_routes(self.app)
        SessionRoutes(broker).add_routes(self.app)
        QueueRoutes(broker).add_routes(self.app)
        self._namel3ss = Namel3ss(broker, self.caller)
        self._namel3ss.add_routes(self.app)
        self._operating.add_routes(self.app)
        page.add_routes(self.app)
        self.app.route("GET", "/healthz", self._health)
        if broker.management is not None:
            try:
                from broker.faces.http.projects import Projects
            except ImportError as error:
                raise ConfigError(f"UTP needs {error.name}: pip install 'toolhost-broker[utp]'") from None
            manage = broker.settings.utp.manage
            Projects(broker.management, manage, self._loopback, broker.log).add_routes(self.app)
        document = OpenApi(
            broker.registry,
            settings.tools_path,
            management=broker.management is not None,
            durable=broker.cluster is not None,
        )
        self.app.route("GET", "/openapi.json", document.json)
        self.app.route("GET", "/openapi.yaml", document.yaml)
        rules = Rules(self.app, self.caller, settings, broker.settings.limits)
        config = uvicorn.Config(
            self.app,
            http=guarded(rules),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
        )
        logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())
        logging.getLogger("uvicorn.error").propagate = False
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        return self.url

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        from broker import __version__

        return answered({"name": "toolhost-broker", "status": "ok", "version": __version__})

    def use_rights(self, rights: Book) -> None:
        self.app.use_rights(rights)

    def expire(self, now: float) -> None:
        """Who is too slow has to come again."""
        if self._server is None or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        loop_now = asyncio.get_running_loop().time()
        for connection in list(self._server.server_state.connections):
            connection.look(loop_now)  # type: ignore[union-attr]

    def connections(self) -> int:
        return len(self._server.server_state.connections) if self._server is not None else 0

    def stop_accepting(self) -> None:
        self._operating.end()
        for server in getattr(self._server, "servers", ()):
            server.close()

    def _busy(self) -> bool:
        """There are answers that have not been written, or that nobody has taken yet."""
        state = self._server.server_state if self._server is not None else None
        return state is not None and bool(
            state.tasks or any(link.transport.get_write_buffer_size() for link in state.connections)
        )

    async def close(self) -> None:
        """All calls have their answers: they are given a moment to be written."""
        if self._autosage is not None:
            await self._autosage.close(LAST_WORDS_SECONDS)
        if self._server is None or self._serving is None:
            self._listener.close()
            return
        if self._namel3ss is not None:
            self._namel3ss.close()
        deadline = asyncio.get_running_loop().time() + LAST_WORDS_SECONDS
        while self._busy() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.002)
        self._server.should_exit = self._server.force_exit = True
        await asyncio.wait((self._serving,), timeout=LAST_WORDS_SECONDS)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
