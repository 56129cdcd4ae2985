"""Who is there: each broker of the cluster says so every second, and hears the others.

Nobody's clock is compared with another's: whoever has been silent for long enough, while we were listening, is gone.
That we were listening is known by our own words, which come back to us as everybody's do: a server or a broker that was
frozen has heard nobody, and says nothing about who is there.
What follows from that is decided by compare-and-set, so that a broker which was only cut off can do no harm when it is
back.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from broker.bus import Bus

if TYPE_CHECKING:
    from nats.aio.msg import Msg

BEAT_SECONDS = 1.0
GONE_SECONDS = 5.0
DEAF_SECONDS = 2.5  # without our own words
FORGET_SECONDS = 60.0
GOODBYE = b"goodbye"


class Members:
    def __init__(self, bus: Bus, cluster: str) -> None:
        self.me = secrets.token_hex(8)  # of this start: whoever starts again is somebody else
        self._bus = bus
        self._subject = f"broker_members.{cluster}"
        self._heard: dict[str, float] = {}
        self._left: dict[str, float] = {}
        self.words: dict[str, bytes] = {}  # what each has said of itself, last
        self.about_me: Callable[[], bytes] = bytes
        self._since = float("inf")  # we have been listening,
        self._echo = float("-inf")  # as our own words have shown, last
        self._beating: asyncio.Task[None] | None = None
        bus.on_connect(self._listen)

    async def _listen(self) -> None:
        """After each connection: what was said meanwhile was not heard."""
        self._since = time.monotonic()
        if self._beating is None:
            await self._bus.client.subscribe(f"{self._subject}.*", cb=self._hear)
            self._beating = asyncio.create_task(self._beat())

    async def _hear(self, message: Msg) -> None:
        who = message.subject.rpartition(".")[2]
        if who == self.me:
            self._hear_ourselves(time.monotonic())
        elif message.data == GOODBYE:
            self._heard.pop(who, None)
            self.words.pop(who, None)
            self._left[who] = time.monotonic()
        elif who not in self._left:
            self._heard[who] = time.monotonic()
            self.words[who] = message.data

    def _hear_ourselves(self, now: float) -> None:
        if now - self._echo > DEAF_SECONDS:
            self._since = now
        self._echo = now

    async def _beat(self) -> None:
        while True:
            if self._bus.connected:
                self.say()
            else:
                self._since = float("inf")
            now = time.monotonic()
            for people in (self._heard, self._left):
                for who in [who for who, when in people.items() if now - when > FORGET_SECONDS]:
                    del people[who]
                    self.words.pop(who, None)
            await asyncio.sleep(BEAT_SECONDS)

    def say(self) -> None:
        """That we are there, and how we are."""
        self._bus.say(f"{self._subject}.{self.me}", self.about_me())

    def gone(self, who: str) -> bool:
        """It has said goodbye, or nothing for so long that it is not there any more, as far as we can hear."""
        if who == self.me:
            return False
        if who in self._left:
            return True
        now = time.monotonic()
        if now - self._echo > DEAF_SECONDS:  # we hear nobody
            return False
        return now - max(self._heard.get(who, 0.0), self._since) > GONE_SECONDS

    def others(self) -> list[str]:
        """Those who are there, beside us."""
        return sorted(who for who in self._heard if who != self.me and not self.gone(who))

    async def stop(self) -> None:
        """Those who wait for us need not wait."""
        from nats.errors import Error

        if self._beating is not None:
            self._beating.cancel()
        if self._bus.connected:
            self._bus.say(f"{self._subject}.{self.me}", GOODBYE)
            with contextlib.suppress(Error, OSError, TimeoutError):
                async with asyncio.timeout(1):
                    await self._bus.flush()
