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
    from nats.js.client import JetStreamContext

T = TypeVar("T")

ASK_SECONDS = 2.0  # for one answer
PAUSE_SECONDS = 0.05  # before one asks again; doubling, up to
LONGEST_PAUSE = 1.0
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
WRONG_LAST = (10071, 10164)  # JetStream's codes for it: the entry is another one by now
NO_STREAM = 10059


class Away(Exception):
    """NATS has not answered in time, or says that it cannot. What was said may have been `heard` all the same."""

    def __init__(self, text: str, *, heard: bool = False) -> None:
        super().__init__(text)
        self.heard = heard


class _Changed(Exception):
    """The entry is not as it was any more."""


class Found(NamedTuple):
    value: bytes
    revision: int
    deleted: bool = False


class Changes:
    """Of one entry: heard, where NATS lets us."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()
        self._subscription: Subscription | None = None

    async def listen(self, bus: Bus, subject: str) -> None:
        from nats.errors import Error

        with contextlib.suppress(Error, OSError):
            self._subscription = await bus.client.subscribe(subject, cb=self._hear)

    async def _hear(self, message: Msg) -> None:  # noqa: ARG002
        self.heard.set()

    async def wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.heard.wait(), seconds)

    async def stop(self) -> None:
        from nats.errors import Error

        if self._subscription is not None:
            with contextlib.suppress(Error, OSError):
                await self._subscription.unsubscribe()


class Bucket:
    def __init__(self, bus: Bus, name: str, seconds: float, replicas: int, history: int = 1) -> None:
        self.name = name
        self.seconds = seconds  # that an entry lives, from its last change; 0: for ever
        self._bus = bus
        self._replicas = replicas
        self._history = history  # values of a key that are kept
        self._js: JetStreamContext | None = None  # once the bucket is there
        self._opening = asyncio.Lock()

    @property
    def largest(self) -> int:
        """Bytes of one message, as NATS has it."""
        return self._bus.largest

    async def changes(self, key: str) -> Changes:
        """Of this entry, and attempts at them, from now on."""
        changes = Changes()
        await changes.listen(self._bus, self._subject(key))
        return changes

    # --- words --------------------------------------------------------------------------------------------------------

    async def create(self, key: str, value: bytes, patience: float) -> int | Found | None:
        """Its revision; or what there is already; or nothing, where it has just gone. An attempt whose answer got lost
        is found by what it has written."""

        async def attempt(js: JetStreamContext) -> int | Found | None:
            try:
                return await self._write(js, key, value, 0)
            except _Changed:
                found = await self._read(js, key)
            if found is not None and found.deleted:
                try:
                    return await self._write(js, key, value, found.revision)
                except _Changed:
                    return None
            return found.revision if found is not None and found.value == value else found

        return await self._patiently(attempt, patience)

    async def update(self, key: str, value: bytes, last: int, patience: float) -> int:
        """Its new revision; 0 where it is not as it was any more."""
        doubtful = False

        async def attempt(js: JetStreamContext) -> int:
            nonlocal doubtful
            again, doubtful = doubtful, True
            try:
                return await self._write(js, key, value, last)
            except _Changed:
                found = await self._read(js, key) if again else None
                return found.revision if found is not None and found.value == value else 0

        return await self._patiently(attempt, patience)

    async def put(self, key: str, value: bytes, patience: float) -> int:
        """Whatever there is."""
        return await self._patiently(lambda js: self._write(js, key, value, None), patience)

    async def get(self, key: str, patience: float) -> Found | None:
        found = await self._patiently(lambda js: self._read(js, key), patience)
        return None if found is None or found.deleted else found

    async def delete(self, key: str, last: int, patience: float) -> bool:
        """False where it is not as it was any more. `last` 0: where there is nothing, so that nothing can come of an
        attempt to create it that is still on its way."""

        async def attempt(js: JetStreamContext) -> bool:
            try:
                await self._write(js, key, b"", last, {"KV-Operation": "DEL"})
            except _Changed:
                return False
            return True

        return await self._patiently(attempt, patience)

    async def everything(self, patience: float) -> list[tuple[str, bytes]]:
        """For people: all entries."""

        async def read(js: JetStreamContext) -> list[tuple[str, bytes]]:
            kv = await js.key_value(self.name)
            watcher: Any = await kv.watchall(ignore_deletes=True)
            found = []
            try:
                while (entry := await watcher.updates(ASK_SECONDS)) is not None:
                    found.append((entry.key, entry.value or b""))
            finally:
                await watcher.stop()
            return found

        return await self._patiently(read, patience)

    def _subject(self, key: str) -> str:
        return f"$KV.{self.name}.{key}"

    async def _write(
        self, js: JetStreamContext, key: str, value: bytes, last: int | None, headers: dict[str, str] | None = None
    ) -> int:
        from nats.js.errors import APIError

        headers = headers or {}
        if last is not None:
            headers[EXPECTED] = str(last)
        try:
            return (await js.publish(self._subject(key), value, headers=headers)).seq
        except APIError as error:
            if error.err_code in WRONG_LAST:
                raise _Changed from None
            raise

    async def _read(self, js: JetStreamContext, key: str) -> Found | None:
        from nats.js.errors import NotFoundError

        try:
            message = await js.get_last_msg(f"KV_{self.name}", self._subject(key))
        except NotFoundError as error:
            if error.err_code == NO_STREAM:
                raise
            return None
        deleted = (message.headers or {}).get("KV-Operation") in ("DEL", "PURGE")
        return Found(message.data or b"", message.seq or 0, deleted)

    # --- patience -----------------------------------------------------------------------------------------------------

    async def _patiently(self, ask: Callable[[JetStreamContext], Awaitable[T]], patience: float) -> T:
        from nats.errors import Error

        end = time.monotonic() + patience
        pause = PAUSE_SECONDS
        reason, heard = "is away", False
        while True:
            try:
                if self._bus.connected:
                    return await ask(self._js or await self._open())
            except (Error, OSError, TimeoutError) as error:
                _unless_it_passes(error)
                reason, heard = why(error), heard or isinstance(error, TimeoutError | OSError)
                self._js = None  # perhaps the bucket is gone
            if time.monotonic() + pause > end:
                raise Away(f"NATS ({self._bus.place}) {reason}", heard=heard)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _open(self) -> JetStreamContext:
        """The bucket, made where there is none; one that forgets too soon is told to remember."""
        from nats.js.api import KeyValueConfig
        from nats.js.errors import BadRequestError

        async with self._opening:
            if self._js is not None:
                return self._js
            js = self._bus.client.jetstream(timeout=ASK_SECONDS)
            config = KeyValueConfig(self.name, history=self._history, ttl=self.seconds or None, replicas=self._replicas)
            try:
                await js.create_key_value(config)
            except BadRequestError:  # it is there, made with other settings
                info = await js.stream_info(f"KV_{self.name}")
                if info.config.max_age is not None and 0 < info.config.max_age < self.seconds:
                    await js.update_stream(info.config, max_age=self.seconds)
            self._js = js
            return js


def _unless_it_passes(error: Exception) -> None:
    """A value that is too large, or a word that is not understood, will not be better when it is said again."""
    from nats.errors import MaxPayloadError
    from nats.js.errors import BadRequestError

    if isinstance(error, MaxPayloadError | BadRequestError):
        raise error


def why(error: Exception) -> str:
    """For operators, behind the server's name."""
    from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

    if isinstance(error, APIError) and error.description:
        return f"says: {error.description}"
    if isinstance(error, NoStreamResponseError | ServiceUnavailableError):
        return "has no JetStream, or it is not ready"
    return "does not answer"
