"""What is larger than a message of NATS can have: it lies in the cluster's object store for a while, and its name is
sent instead."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

from broker.bus import Bus
from broker.cluster.kv import Away, why

if TYPE_CHECKING:
    from nats.js.object_store import ObjectStore

T = TypeVar("T")

KEEP_SECONDS = 900.0  # nobody has fetched it
ANSWER_SECONDS = 2.0  # for one word of NATS'
SLOWEST = 1024 * 1024  # bytes a second: an object takes many words, and each may wait for the server's disk


class NoObject(Exception):
    """There is none of this name, or it is larger than it may be; in words."""


class Objects:
    def __init__(
        self, bus: Bus, bucket: str, replicas: int, patience: float, seconds: float | None = KEEP_SECONDS
    ) -> None:
        self.bucket = bucket
        self._seconds = seconds  # None: until they are forgotten
        self._bus = bus
        self._replicas = replicas
        self._patience = patience
        self._store: ObjectStore | None = None
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def put(self, payload: bytes, about: str = "") -> str:
        """Its name, which begins with what it is about."""
        name = about + secrets.token_hex(16)
        await self._word(lambda store: store.put(name, payload), len(payload))
        return name

    async def get(self, name: str, most: int) -> bytes:
        info = await self._word(lambda store: store.get_info(name))
        size = info.size or 0
        if size > most:
            raise NoObject(f"the object has {size} bytes, {most} are allowed")
        if info.is_link():
            raise NoObject("the object is a link")
        return bytes((await self._word(lambda store: store.get(name), size)).data or b"")

    def forget(self, name: str) -> None:
        """It has been read; else it goes when its time is over."""

        async def forget() -> None:
            with contextlib.suppress(Away, NoObject):
                await self._word(lambda store: store.delete(name))
                if self._seconds is None:  # that there was one would be remembered for ever
                    await self._word(lambda _: self._forget_name(name))

        task = asyncio.ensure_future(forget())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forget_name(self, name: str) -> None:
        js = self._bus.client.jetstream(timeout=ANSWER_SECONDS)
        subject = f"$O.{self.bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
        await js.purge_stream(f"OBJ_{self.bucket}", subject=subject)

    async def names(self) -> list[tuple[str, float]]:
        """All that there are, with the time that they were put."""

        async def names(store: ObjectStore) -> list[tuple[str, float]]:
            found = await store.list(ignore_deletes=True)
            return [(one.name or "", datetime.fromisoformat(one.mtime or "").timestamp()) for one in found]

        try:
            return await self._word(names)
        except NoObject:
            return []

    async def _word(self, ask: Callable[[ObjectStore], Awaitable[T]], size: int = 0) -> T:
        from nats.errors import Error
        from nats.js.errors import BadObjectMetaError, DigestMismatchError, InvalidObjectNameError, NotFoundError

        try:
            async with asyncio.timeout(self._patience + size / SLOWEST):
                return await ask(self._store or await self._open())
        except (NotFoundError, BadObjectMetaError, DigestMismatchError, InvalidObjectNameError):
            self._store = None  # perhaps all of it is gone
            raise NoObject(f"there is no such object in {self.bucket}, or not any more") from None
        except (Error, OSError, TimeoutError) as error:
            self._store = None
            raise Away(f"NATS ({self._bus.place}) {why(error)}") from None
        except (ValueError, TypeError, KeyError, AttributeError):  # what nats-py makes of junk
            raise NoObject(f"what is in {self.bucket} under this name is no object") from None

    async def _open(self) -> ObjectStore:
        from nats.js.api import ObjectStoreConfig
        from nats.js.errors import BadRequestError

        async with self._opening:
            if self._store is None:
                js = self._bus.client.jetstream(timeout=ANSWER_SECONDS)
                config = ObjectStoreConfig(self.bucket, ttl=self._seconds, replicas=self._replicas)
                try:
                    self._store = await js.create_object_store(self.bucket, config)
                except BadRequestError:  # it is there, made with other settings
                    self._store = await js.object_store(self.bucket)
            return self._store
