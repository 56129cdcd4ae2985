"""The connection to NATS: made once, made again with back-off, and in words when it is not there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from broker.errors import ConfigError
from broker.observe.log import Log

if TYPE_CHECKING:
    from nats.aio.client import Client

RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)  # then the last one for ever


class Bus:
    """One client. A server that is away at the start, or goes away, is looked for until it is there."""

    def __init__(self, url: str, name: str, log: Log) -> None:
        try:
            import nats.errors
            from nats.aio.client import Client
        except ImportError:
            raise ConfigError("NATS needs nats-py: pip install 'toolhost-broker[nats]'") from None
        self._troubles: tuple[type[Exception], ...] = (nats.errors.Error, OSError, TimeoutError)
        self.url = url
        self.client: Client = Client()
        self._name = name
        self._log = log
        self._told = ""  # the last problem that was logged
        self._listeners: list[Callable[[], Awaitable[object]]] = []

    def on_connect(self, listener: Callable[[], Awaitable[object]]) -> None:
        """Called each time that a connection has been made."""
        self._listeners.append(listener)

    @property
    def connected(self) -> bool:
        return bool(self.client.is_connected)

    async def start(self) -> None:
        """Until the server is there. nats-py itself connects again after that."""
        attempt = 0
        while True:
            try:
                await self.client.connect(
                    self.url,
                    name=self._name,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1,
                    connect_timeout=5,
                    error_cb=self._problem,
                    disconnected_cb=self._disconnected,
                    reconnected_cb=self._connected,
                )
                break
            except self._troubles as error:
                await self._problem(error)
                await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
                attempt += 1
        await self._connected()

    async def stop(self) -> None:
        with contextlib.suppress(*self._troubles):
            await self.client.close()

    async def _connected(self) -> None:
        self._told = ""
        self._log.info("nats connected", url=self.url)
        for listener in self._listeners:
            await listener()

    async def _disconnected(self) -> None:
        self._log.warning("nats is away", url=self.url)

    async def _problem(self, error: Exception) -> None:
        """Once, as long as it is the same."""
        text = str(error) or type(error).__name__
        if text != self._told:
            self._told = text
            self._log.warning("nats", url=self.url, reason=text)
