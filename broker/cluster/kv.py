"""A table that the brokers of a cluster share: a KV bucket whose entries are changed by compare-and-set only.

A word that got no answer may have been heard. So whoever writes puts something into the value that nobody else would,
and looks before it writes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from broker.bus import Bus

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.js.kv import KeyValue

T = TypeVar("T")

ASK_SECONDS = 2.0  # for one answer
PAUSE_SECONDS = 0.05  # before one asks again; doubling, up to
LONGEST_PAUSE = 1.0


class Away(Exception):
    """NATS has not answered in time."""


class Found(NamedTuple):
    value: bytes
    revision: int


class Bucket:
    def __init__(self, bus: Bus, name: str, seconds: float, replicas: int, history: int = 1) -> None:
        self.name = name
        self._bus = bus
        self._seconds = seconds  # that an entry lives, from its last change; 0: for ever
        self._replicas = replicas
        self._history = history  # values of a key that are kept
        self._kv: KeyValue | None = None
        self._opening = asyncio.Lock()

    @property
    def largest(self) -> int:
        """Bytes of one message, as NATS has it."""
        return int(self._bus.client.max_payload)

    async def hear(self, key: str, listener: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """Changes of this entry, and attempts at them."""
        return await self._bus.client.subscribe(f"$KV.{self.name}.{key}", cb=listener)

    async def changed(self, key: str, revision: int, seconds: float, patience: float) -> None:
        """Waits until the entry is another one than this, or so long."""
        from nats.errors import Error

        heard = asyncio.Event()

        async def hear(_: object) -> None:
            heard.set()

        try:
            subscription = await self.hear(key, hear)
        except (Error, OSError):
            await asyncio.sleep(seconds)
            return
        try:
            found = await self.get(key, patience)
            if found is not None and found.revision == revision:
                await asyncio.wait_for(heard.wait(), seconds)
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(Error, OSError):
                await subscription.unsubscribe()

    # --- words --------------------------------------------------------------------------------------------------------

    async def create(self, key: str, value: bytes, patience: float) -> int:
        """Its revision; 0 where there is one already."""
        return await self._change(lambda kv: kv.create(key, value), key, value, patience)

    async def update(self, key: str, value: bytes, last: int, patience: float) -> int:
        """Its new revision; 0 where it is not as it was any more."""
        return await self._change(lambda kv: kv.update(key, value, last=last), key, value, patience)

    async def put(self, key: str, value: bytes, patience: float) -> int:
        """Whatever there is."""
        return await self._patiently(lambda kv: kv.put(key, value), patience)

    async def get(self, key: str, patience: float) -> Found | None:
        from nats.js.errors import KeyNotFoundError

        async def get(kv: KeyValue) -> Found | None:
            try:
                entry = await kv.get(key)
            except KeyNotFoundError:
                return None
            return Found(entry.value or b"", entry.revision or 0)

        return await self._patiently(get, patience)

    async def delete(self, key: str, last: int, patience: float) -> bool:
        """False where it is not as it was any more."""
        from nats.js.errors import BadRequestError

        async def delete(kv: KeyValue) -> bool:
            try:
                return await kv.delete(key, last=last)
            except BadRequestError:
                return False

        return await self._patiently(delete, patience)

    async def everything(self, patience: float) -> list[tuple[str, bytes]]:
        """For people: all entries."""

        async def read(kv: KeyValue) -> list[tuple[str, bytes]]:
            watcher: Any = await kv.watchall(ignore_deletes=True)
            found = []
            try:
                while (entry := await watcher.updates(ASK_SECONDS)) is not None:
                    found.append((entry.key, entry.value or b""))
            finally:
                await watcher.stop()
            return found

        return await self._patiently(read, patience)

    # --- patience -----------------------------------------------------------------------------------------------------

    async def _change(
        self, change: Callable[[KeyValue], Awaitable[int]], key: str, value: bytes, patience: float
    ) -> int:
        """An attempt whose answer got lost is found by what it has written."""
        from nats.js.errors import KeyWrongLastSequenceError

        doubtful = False

        async def attempt(kv: KeyValue) -> int:
            nonlocal doubtful
            again, doubtful = doubtful, True
            try:
                return await change(kv)
            except KeyWrongLastSequenceError:
                if again:
                    found = await self.get(key, patience)
                    if found is not None and found.value == value:
                        return found.revision
                return 0

        return await self._patiently(attempt, patience)

    async def _patiently(self, ask: Callable[[KeyValue], Awaitable[T]], patience: float) -> T:
        from nats.errors import Error

        end = time.monotonic() + patience
        pause = PAUSE_SECONDS
        while True:
            try:
                if self._bus.connected:
                    return await ask(self._kv or await self._open())
            except (Error, OSError, TimeoutError) as error:
                _unless_it_passes(error)
                self._kv = None  # perhaps the bucket is gone
            if time.monotonic() + pause > end:
                raise Away(f"NATS ({self._bus.place}) does not answer")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _open(self) -> KeyValue:
        """The bucket, made where there is none; one that forgets too soon is told to remember."""
        from nats.js.api import KeyValueConfig
        from nats.js.errors import BadRequestError

        async with self._opening:
            if self._kv is not None:
                return self._kv
            js = self._bus.client.jetstream(timeout=ASK_SECONDS)
            config = KeyValueConfig(
                self.name, history=self._history, ttl=self._seconds or None, replicas=self._replicas
            )
            try:
                self._kv = await js.create_key_value(config)
            except BadRequestError:  # it is there, made with other settings
                info = await js.stream_info(f"KV_{self.name}")
                if info.config.max_age is not None and 0 < info.config.max_age < self._seconds:
                    await js.update_stream(info.config, max_age=self._seconds)
                self._kv = await js.key_value(self.name)
            return self._kv


def _unless_it_passes(error: Exception) -> None:
    """A value that is too large, or a word that is not understood, will not be better when it is said again."""
    from nats.errors import MaxPayloadError
    from nats.js.errors import BadRequestError, InvalidKeyError

    if isinstance(error, MaxPayloadError | BadRequestError | InvalidKeyError):
        raise error
