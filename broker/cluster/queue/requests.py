"""Requests of queued calls: in their message, or beside it where they are larger than that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from broker.cluster.objects import NoObject, Objects
from broker.cluster.queue.records import Letter

if TYPE_CHECKING:
    from broker.cluster.queue.store import Store

ROOM = 8192  # of NATS' payload limit, for headers; the dead have more of them

_encode = msgspec.json.Encoder().encode
_members = msgspec.json.Decoder(dict[str, Raw]).decode


class Requests:
    def __init__(self, store: Store, objects: Objects) -> None:
        self._store = store
        self._objects = objects

    async def pack(self, letter: Letter) -> Letter:
        """As it fits into a message."""
        if len(letter.data) <= self._store.largest - ROOM:
            return letter
        return replace(letter, data=b"", large=await self._objects.put(letter.data, f"{letter.name}."))

    async def of(self, letter: Letter, most: int) -> bytes:
        if not letter.large:
            return letter.data
        return await self._objects.get(letter.large, most)

    def forget(self, letter: Letter) -> None:
        """Nobody will ask for it again."""
        if letter.large:
            self._objects.forget(letter.large)

    async def with_lease(self, letter: Letter, lease: str, most: int) -> Letter | None:
        """The same call with another token; none where it cannot have one."""
        try:
            members = _members(await self.of(letter, most))
        except (NoObject, msgspec.DecodeError):
            return None
        members["_lease_token"] = Raw(_encode(lease))
        return await self.pack(replace(letter, data=_encode(members), large=""))


def with_id(text: bytes, call_id: str) -> bytes:
    """The request object, which has none yet."""
    return b'{"id":' + _encode(call_id) + b"," + text.lstrip()[1:]
