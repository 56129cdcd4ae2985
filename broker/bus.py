"""The connection to NATS: made once, made again with back-off, and in words when it is not there."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from broker.errors import ConfigError
from broker.observe.log import Log

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)  # then the last one for ever; not all brokers at the same moment
PING_SECONDS = 5  # a server that has not answered two of these is away
BEHIND = 1024 * 1024  # bytes that NATS has not taken yet
MOST_UNSENT = 1024  # messages
MOST_TOLD = 50  # different problems that are logged while it is away
NO_RESPONDERS = "503"  # NATS' own answer for whoever is not there


class Message(NamedTuple):
    subject: str
    payload: bytes
    headers: dict[str, str] | None
    reply: str


class Bus:
    """One client. A server that is away at the start, or goes away, is looked for until it is there."""

    def __init__(self, url: str, name: str, log: Log) -> None:
        try:
            import nats.errors

            from broker.busclient import LastingClient
        except ImportError:
            raise ConfigError("NATS needs nats-py: pip install 'toolhost-broker[nats]'") from None
        self._troubles: tuple[type[Exception], ...] = (nats.errors.Error, OSError, TimeoutError)
        self.url = url
        self.place = without_secrets(url)
        self.client: Client = LastingClient()
        self._name = name
        self._log = log
        self._told: set[str] = set()  # problems that have been logged since it was last there
        self._attempts = 0  # since it was last there
        self._stopping = False
        self.connections = 0  # that have been made
        self._listeners: list[Callable[[], Awaitable[object]]] = []
        self._listening = asyncio.Lock()
        self._inbox = ""  # of answers,
        self._answers: Subscription | None = None
        self._asked = 0
        self._waiting: dict[str, asyncio.Future[Msg]] = {}  # by the last part of where they go
        self._outgoing: deque[Message] = deque()
        self._sending: asyncio.Task[None] | None = None

    def on_connect(self, listener: Callable[[], Awaitable[object]]) -> None:
        """Called each time that a connection has been made."""
        self._listeners.append(listener)

    @property
    def connected(self) -> bool:
        return bool(self.client.is_connected)

    async def start(self) -> None:
        """Until the server is there. Then nats-py connects again itself, and waits while it tells of a problem."""
        while True:
            try:
                await self.client.connect(
                    [one.strip() for one in self.url.split(",")],
                    name=self._name,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0,
                    connect_timeout=5,
                    ping_interval=PING_SECONDS,
                    max_outstanding_pings=2,
                    error_cb=self._problem,
                    disconnected_cb=self._disconnected,
                    reconnected_cb=self._connected,
                )
                break
            except Exception as error:  # whatever it is: without another attempt there would be no NATS for ever
                await self._problem(error)
        await self._connected()

    # --- messages out of whatever runs in the loop ------------------------------------------------------------------

    def say(self, subject: str, payload: bytes, headers: dict[str, str] | None = None, reply: str = "") -> None:
        """In order. While the server is away, as much waits as the client keeps; the rest is lost, and logged."""
        self._outgoing.append(Message(subject, payload, headers, reply))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send())

    async def ask(self, subject: str, payload: bytes, headers: dict[str, str], seconds: float) -> Msg:
        """The one answer. As nats-py's `request`, at less than half its price: a call with a key asks three times."""
        if self._answers is None:
            self._inbox = self._inbox or self.client.new_inbox()
            self._answers = await self.client.subscribe(f"{self._inbox}.*", cb=self._hear)
        self._asked += 1
        name = str(self._asked)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Msg] = loop.create_future()
        self._waiting[name] = answer
        late = loop.call_later(seconds, _give_up, answer)
        try:
            await self.client.publish(subject, payload, f"{self._inbox}.{name}", headers)
            return await answer
        finally:
            late.cancel()
            del self._waiting[name]

    async def _hear(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject.rpartition(".")[2])
        if answer is not None and not answer.done():
            answer.set_result(message)

    @property
    def largest(self) -> int:
        """Bytes of one message, headers and all."""
        return int(self.client.max_payload)

    def behind(self) -> bool:
        """NATS does not take what it is told as fast as we say it."""
        return len(self._outgoing) > MOST_UNSENT or bool(self.client.pending_data_size > BEHIND)

    async def _send(self) -> None:
        while self._outgoing:
            message = self._outgoing.popleft()
            try:
                await self.client.publish(message.subject, message.payload, message.reply, message.headers)
            except Exception as error:  # the others are to be sent all the same
                self._log.warning("nats: a message is lost", subject=message.subject, reason=_words(error))

    async def flush(self) -> None:
        """What has been said is at the server."""
        if self._sending is not None:
            await self._sending
        if self.connected:
            await self.client.flush()

    async def stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(*self._troubles, RuntimeError):  # uvloop's, of a transport that has just broken
            await self.client.close()

    async def _connected(self) -> None:
        self._told.clear()
        self._attempts = 0
        self.connections += 1
        self._log.info("nats connected", url=self.place)
        async with self._listening:  # those of the next connection come after those of this one
            for listener in self._listeners:
                try:
                    await listener()
                except Exception as error:  # none of them may keep the others, or the next connection, from coming
                    self._log.warning("nats", url=self.place, reason=_words(error))

    async def _disconnected(self) -> None:
        if not self._stopping:
            self._log.warning("nats is away", url=self.place)

    async def _problem(self, error: Exception) -> None:
        """Each once, until it has passed. While the server is away, the next attempt waits for this."""
        text = _words(error)
        if text not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(text)
            self._log.warning("nats", url=self.place, reason=text)
        if not self.connected:
            seconds = RETRY_SECONDS[min(self._attempts, len(RETRY_SECONDS) - 1)]
            self._attempts += 1
            await asyncio.sleep(seconds * random.uniform(0.5, 1.0))


def _give_up(answer: asyncio.Future[Msg]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


def without_secrets(url: str) -> str:
    """As it may be shown: names, passwords and tokens of servers (a,b,…) stand in front of the @, or behind a ?."""
    servers = (one.strip().partition("?")[0].rpartition("://") for one in url.split(","))
    return ",".join(scheme + colon + place.rpartition("@")[2] for scheme, colon, place in servers)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
