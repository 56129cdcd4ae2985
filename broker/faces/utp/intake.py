"""Takes messages from a pull consumer: no more than there is room for, and none is lost when it stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from broker.bus import Bus

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

EXPIRES_SECONDS = 30.0  # of one request for messages
MARGIN_SECONDS = 2.0
PAUSE_SECONDS = 1.0  # after a request that NATS has turned down
MOST_AT_ONCE = 256
OVER = ("404", "408")  # no messages; the request has expired


class Intake:
    def __init__(
        self, bus: Bus, stream: str, consumer: str, room: Callable[[], int], take: Callable[[Msg], None]
    ) -> None:
        self._bus = bus
        self._api = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._room = room
        self._take = take
        self._inbox = bus.client.new_inbox()
        self._request = 0  # its number,
        self._open = 0  # and the messages that it may still bring
        self._wake = asyncio.Event()
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.trouble = ""  # what NATS has said last, instead of a message

    async def start(self) -> None:
        self._subscription = await self._bus.client.subscribe(f"{self._inbox}.*", cb=self._hear)
        self._task = asyncio.create_task(self._ask())

    def wake(self) -> None:
        """There is room."""
        self._wake.set()

    def begin_anew(self) -> None:
        """NATS knows of no request any more."""
        self._open = 0
        self._wake.set()

    async def stop(self) -> None:
        """What comes yet goes back at once."""
        from nats.errors import Error

        self._stopping = True
        if self._task is not None:
            self._task.cancel()
        if self._subscription is not None and self._bus.connected:
            with contextlib.suppress(Error, OSError, TimeoutError):
                await asyncio.wait_for(self._subscription.drain(), MARGIN_SECONDS)  # type: ignore[no-untyped-call]

    async def _ask(self) -> None:
        while True:
            self._wake.clear()
            room = min(self._room(), MOST_AT_ONCE)
            if room > 0 and self._open <= 0 and self._bus.connected:
                self._request += 1
                self._open = room
                about = b'{"batch":%d,"expires":%d}' % (room, int(EXPIRES_SECONDS * 1e9))
                self._bus.say(self._api, about, reply=f"{self._inbox}.{self._request}")
            try:
                await asyncio.wait_for(self._wake.wait(), EXPIRES_SECONDS + MARGIN_SECONDS)
            except TimeoutError:  # neither messages nor the end of the request
                self._open = 0
            if self.trouble:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _hear(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status", "")
        if status and not message.reply:  # NATS' own word, about a request
            if message.subject == f"{self._inbox}.{self._request}":
                said = f"NATS says {status} {headers.get('Description', '')}".strip()
                self.trouble = "" if status in OVER else said
                self.begin_anew()
            return
        self.trouble = ""
        self._open -= 1
        if self._stopping:
            await message.nak()
            return
        self._take(message)
        if self._open <= 0:
            self._wake.set()
