"""Leases that any broker of the cluster may have issued, and only one call can use: taken by compare-and-set."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
from msgspec import Struct

from broker.cluster.kv import Away, Bucket
from broker.policy.leases import CONSUMED, MOST_SECONDS, NOT_FOUND, Lease, refused

KEEP_SECONDS = 2 * MOST_SECONDS  # one that has expired, or was used, is remembered for a while
PAUSE_SECONDS = 1.0


class _Lease(Struct):
    fingerprint: str
    tool: str
    tier: int
    until: float  # wall clock
    issuer: str
    taken: str = ""  # by which call

    def lease(self, token: str = "") -> Lease:
        """As it is used here: by a clock that nobody sets."""
        expires = time.monotonic() + self.until - time.time()
        lease = Lease(token, self.tool, self.tier, expires, self.issuer, self.fingerprint)
        lease.spent = bool(self.taken)
        return lease


_decode = msgspec.json.Decoder(_Lease).decode
_encode = msgspec.json.Encoder().encode


class SharedLeases:
    def __init__(self, bucket: Bucket, patience: float) -> None:
        self._bucket = bucket
        self._patience = patience
        self._tasks: set[asyncio.Task[None]] = set()

    async def publish(self, lease: Lease) -> None:
        """One that was issued here can be used everywhere."""
        until = time.time() + lease.expires - time.monotonic()
        said = _Lease(lease.fingerprint, lease.tool, lease.tier, until, lease.issuer)
        await self._bucket.create(_key(lease.token), _encode(said), self._patience)

    async def reserve(self, token: str, tool: str, tier: int, proof: str = "") -> Lease | str:
        """The lease, now nobody else's; or the reason why it does not open this tool. Whoever has taken it can send its
        call to another broker, with the proof; that one takes it in turn."""
        key = _key(token)
        found = await self._bucket.get(key, self._patience)
        if found is None:
            return NOT_FOUND
        said = _decode(found.value)
        if proof and hmac.compare_digest(said.taken, proof):
            said.taken = ""
        lease = said.lease(token)
        if reason := refused(lease, tool, tier, time.monotonic()):
            return reason
        said.taken = lease.proof = secrets.token_hex(8)
        try:
            taken = await self._bucket.update(key, _encode(said), found.revision, self._patience)
        except Away:
            self.give_back(lease)  # it may be ours, though nobody has told us so
            raise
        lease.spent = True
        return lease if taken else CONSUMED

    def give_back(self, lease: Lease) -> None:
        """The call never ran: it can be used, until it expires."""
        self._later(self._give_back(lease))

    async def _give_back(self, lease: Lease) -> None:
        key = _key(lease.token)
        while time.monotonic() < lease.expires:
            try:
                found = await self._bucket.get(key, self._patience)
                if found is not None and (said := _decode(found.value)).taken == lease.proof:
                    said.taken = ""  # still ours: no other broker has taken it with our proof
                    await self._bucket.update(key, _encode(said), found.revision, self._patience)
                return
            except Away:
                await asyncio.sleep(PAUSE_SECONDS)

    async def alive(self) -> list[Lease]:
        """Those that can be used, whoever has issued them."""
        leases = [_decode(value).lease() for _, value in await self._bucket.everything(self._patience)]
        return [lease for lease in leases if lease.expires > time.monotonic() and not lease.spent]

    async def revoke(self, name: str) -> Lease | None:
        """By token or fingerprint. One that a call has taken is beyond recall."""
        for key, value in await self._bucket.everything(self._patience):
            if name == _decode(value).fingerprint or key == _key(name):
                found = await self._bucket.get(key, self._patience)
                if found is None:
                    return None
                lease = _decode(found.value).lease()
                if lease.spent or lease.expires <= time.monotonic():
                    return None
                return lease if await self._bucket.delete(key, found.revision, self._patience) else None
        return None

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self, seconds: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()


def _key(token: str) -> str:
    """Tokens are in no table."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
