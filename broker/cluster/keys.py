"""At most one execution a key, across brokers: claimed, then started, then done; each step by compare-and-set.

A key that a broker had only claimed when it died is taken over. One that it had started is answered for: the call may
have run, and is not run again. A broker that was cut off finds its key changed, and does not begin.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from broker import errors
from broker.cluster.kv import Away, Bucket, Found
from broker.cluster.members import Members
from broker.errors import Refusal
from broker.observe.log import Log

LOOK_SECONDS = 1.0  # at a key that somebody else has, beside hearing of its changes
OUTCOME_ROOM = 4096  # of NATS' payload limit, for what stands around a reply
MOST_UNTOLD = 64 * 1024 * 1024  # bytes of replies that NATS has not taken yet


Stage = Literal["claimed", "started", "done"]
NOTHING = Raw(b"null")


class _Entry(Struct, omit_defaults=True):
    """What the bucket says of a key. A reply that is too large for one entry lies in others, `<key>.0` and so on."""

    state: Stage
    owner: str  # the broker, of this start
    nonce: str = ""  # the call
    tool: str = ""
    until: float = 0.0  # wall clock: a key that is done is kept so long
    reply: Raw = NOTHING
    parts: int = 0


_entry = msgspec.json.Decoder(_Entry)
_encode = msgspec.json.Encoder().encode


class State(Enum):
    CLAIMED = "claimed"
    STARTING = "starting"
    STARTED = "started"
    LOST = "lost"  # it is not ours any more
    ENDED = "ended"


class Claim:
    """One call's hold on its key."""

    __slots__ = ("_keys", "_starting", "changed", "name", "nonce", "problem", "revision", "state", "tool")

    def __init__(self, keys: Keys, name: str, nonce: str, tool: str, revision: int) -> None:
        self._keys = keys
        self._starting: asyncio.Task[None] | None = None
        self.name = name
        self.nonce = nonce
        self.tool = tool
        self.revision = revision
        self.state = State.CLAIMED
        self.problem: Refusal | None = None  # why its call may not run
        self.changed: Callable[[], None] = lambda: None

    @property
    def started(self) -> bool:
        return self.state is State.STARTED

    def may_start(self) -> bool:
        """The others know that its call may run from now on. If not, they are told, and `changed` is called."""
        if self.state is State.CLAIMED:
            self.state = State.STARTING
            self._starting = self._keys.later(self._start())
        return self.started

    async def _start(self) -> None:
        try:
            revision = await self._keys.start(self)
        except Away as error:
            self._lose(Refusal(errors.UNAVAILABLE, f"{error}; the call has not run", retry_after=1))
            return
        if revision:
            self.revision = revision
            self.state = State.STARTED
            self.changed()
        else:
            self._lose(Refusal(errors.UNAVAILABLE, "its key was taken over while this broker was cut off; ask again"))

    def _lose(self, problem: Refusal) -> None:
        self.state = State.LOST
        self.problem = problem
        self.changed()

    async def settled(self) -> None:
        """No step of its own is on its way."""
        if self._starting is not None:
            await self._starting


class Keys:
    def __init__(self, bucket: Bucket, members: Members, ttl: float, patience: float, log: Log) -> None:
        self._bucket = bucket
        self._members = members
        self._ttl = ttl
        self._patience = patience
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()
        self.untold = 0  # bytes of replies that are on their way to the bucket

    # --- a call begins ------------------------------------------------------------------------------------------------

    async def claim(self, key: bytes, tool: str, wanted: Callable[[], bool]) -> Claim | bytes | None:
        """The key is this call's now; or what came of it elsewhere, which is waited for. None: nobody wants it now."""
        name = hashlib.sha256(key).hexdigest()
        nonce = secrets.token_hex(8)
        value = self._written("claimed", nonce, tool)
        try:
            while wanted():
                outcome = await self._bucket.create(name, value, self._patience) or await self._taken(name, value)
                if isinstance(outcome, bytes):
                    return outcome
                if outcome:
                    return Claim(self, name, nonce, tool, outcome)
        except Away:
            self.free(Claim(self, name, nonce, tool, 0))  # it may be ours, though nobody has told us so
            raise
        return None

    async def _taken(self, name: str, value: bytes) -> int | bytes | None:
        """Somebody has, or had, the key: its revision where it is ours now, the reply where there is one, else None,
        when it has had time to change."""
        found = await self._bucket.get(name, self._patience)
        if found is None:
            return None
        entry = _entry.decode(found.value)
        if entry.state == "done":
            if entry.until <= time.time():
                return await self._bucket.update(name, value, found.revision, self._patience) or None
            return await self._reply(name, entry)
        if not self._members.gone(entry.owner):
            await self._bucket.changed(name, found.revision, LOOK_SECONDS, self._patience)
            return None
        if entry.state == "claimed":
            self._log.info("key taken over", owner=entry.owner, aid=entry.tool)
            return await self._bucket.update(name, value, found.revision, self._patience) or None
        return await self._answer_for(name, entry, found)

    async def _answer_for(self, name: str, entry: _Entry, found: Found) -> bytes | None:
        """Its broker is gone, and the call had been started: that is its outcome."""
        text = f"the broker that ran {entry.tool} is gone; the call may have run"
        line = Refusal(errors.CRASH, text).line(entry.tool)
        value = self._written("done", entry.nonce, entry.tool, Raw(line))
        self._log.warning("key of a broker that is gone", owner=entry.owner, aid=entry.tool)
        return line if await self._bucket.update(name, value, found.revision, self._patience) else None

    async def _reply(self, name: str, entry: _Entry) -> bytes:
        if not entry.parts:
            return bytes(entry.reply)
        parts = [await self._bucket.get(f"{name}.{number}", self._patience) for number in range(entry.parts)]
        if None in parts:
            return Refusal(errors.INTERNAL, "the reply that was kept under this key is gone").line(entry.tool)
        return b"".join(part.value for part in parts if part is not None)

    # --- a call runs, and ends ----------------------------------------------------------------------------------------

    async def start(self, claim: Claim) -> int:
        value = self._written("started", claim.nonce, claim.tool)
        return await self._bucket.update(claim.name, value, claim.revision, self._patience)

    def free(self, claim: Claim) -> None:
        """Its call has not run: the key is as if it had not been used."""
        self.later(self._free(claim))

    async def _free(self, claim: Claim) -> None:
        await claim.settled()
        claim.state = State.ENDED

        async def forget() -> None:  # as it is now: a step whose answer was lost may have changed it
            found = await self._bucket.get(claim.name, self._patience)
            if found is not None and _entry.decode(found.value).nonce == claim.nonce:
                await self._bucket.delete(claim.name, found.revision, self._patience)

        await self._until_done(forget)

    def finish(self, claim: Claim, line: bytes) -> None:
        """What came of its call. Its caller has its reply already: the others are told as soon as NATS takes it."""
        if claim.state is not State.ENDED:
            claim.state = State.ENDED
            self.later(self._finish(claim, line))

    async def _finish(self, claim: Claim, line: bytes) -> None:
        if self.untold + len(line) > MOST_UNTOLD:
            self._log.warning("a reply is not kept for the cluster: NATS is away", aid=claim.tool)
            text = "the call has run; its reply was not kept, since NATS was away for too long"
            line = Refusal(errors.UNAVAILABLE, text).line(claim.tool)
        size = len(line)
        self.untold += size

        async def tell() -> None:
            most = self._bucket.largest - OUTCOME_ROOM
            parts = [line[at : at + most] for at in range(0, size, most)] if size > most else []
            for number, part in enumerate(parts):
                await self._bucket.put(f"{claim.name}.{number}", part, self._patience)
            reply = Raw(b"null") if parts else Raw(line)
            value = self._written("done", claim.nonce, claim.tool, reply, len(parts))
            if not await self._bucket.update(claim.name, value, claim.revision, self._patience):
                self._log.warning("key was answered for by another broker meanwhile", aid=claim.tool)

        try:
            await self._until_done(tell)
        finally:
            self.untold -= size

    async def _until_done(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
                return
            except Away:
                await asyncio.sleep(LOOK_SECONDS)

    # --- all of them --------------------------------------------------------------------------------------------------

    def _written(self, state: Stage, nonce: str, tool: str, reply: Raw = NOTHING, parts: int = 0) -> bytes:
        until = time.time() + self._ttl if state == "done" else 0.0
        return _encode(_Entry(state, self._members.me, nonce, tool, until, reply, parts))

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self, seconds: float) -> None:
        """What is on its way to the bucket is given a moment to arrive."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()
