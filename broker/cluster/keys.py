"""At most one execution a key, across brokers: claimed, then started, then done; each step by compare-and-set.

A key that a broker had only claimed when it died is taken over. One that it had started is answered for: the call may
have run, and is not run again. A broker that was cut off finds its key changed, and does not begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from broker import errors
from broker.cluster.kv import Away, Bucket, Changes, Found
from broker.cluster.members import Members
from broker.errors import Refusal
from broker.observe.log import Log

LOOK_SECONDS = 1.0  # at a key that somebody else has, beside hearing of its changes
OUTCOME_ROOM = 4096  # of NATS' payload limit, for what stands around a reply
MOST_UNTOLD = 64 * 1024 * 1024  # bytes of replies that NATS has not taken yet
RENEWALS = 3  # of a key, in the time that it is remembered

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
        self._running: dict[Claim, float] = {}  # since when the bucket has known that they have started
        self._renewing: asyncio.Task[None] | None = None
        self.untold = 0  # bytes of replies that are on their way to the bucket

    # --- a call begins ------------------------------------------------------------------------------------------------

    async def claim(self, key: bytes, tool: str, wanted: Callable[[], bool]) -> Claim | bytes | None:
        """The key is this call's now; or what came of it elsewhere, which is waited for. None: nobody wants it now."""
        name = hashlib.sha256(key).hexdigest()
        claim = Claim(self, name, secrets.token_hex(8), tool, 0)
        changes: Changes | None = None
        heard = False
        try:
            while wanted():
                outcome = await self._take(claim, changes)
                if isinstance(outcome, bytes):
                    return outcome
                if outcome:
                    claim.revision = outcome
                    return claim
                if outcome is None:  # somebody has it
                    if changes is None:
                        changes = await self._bucket.changes(name)
                    else:
                        await changes.wait(LOOK_SECONDS)
        except Away as error:
            heard = error.heard
            raise
        finally:
            if changes is not None:
                await changes.stop()
            if heard:  # it may be ours, though nobody has told us so
                self.free(claim)
        return None

    async def _take(self, claim: Claim, changes: Changes | None) -> int | bytes | None:
        """The key's revision where it is ours now, or the reply where there is one. Else somebody has it; 0: somebody
        had it, and one should look again."""
        value = self._written("claimed", claim.nonce, claim.tool)
        if changes is None:
            found = await self._bucket.create(claim.name, value, self._patience)
            if isinstance(found, int):
                return found
        else:
            changes.heard.clear()
            found = await self._bucket.get(claim.name, self._patience)
            if found is None:
                found = await self._bucket.create(claim.name, value, self._patience)
                if isinstance(found, int):
                    return found
        if found is None:
            return 0
        entry = _entry.decode(found.value)
        if entry.state == "done":
            if entry.until <= time.time():
                return await self._bucket.update(claim.name, value, found.revision, self._patience)
            return await self._reply(claim.name, entry)
        if not self._members.gone(entry.owner):
            return None
        if entry.state == "claimed":
            self._log.info("key taken over", owner=entry.owner, aid=entry.tool)
            return await self._bucket.update(claim.name, value, found.revision, self._patience)
        return await self._answer_for(claim.name, entry, found)

    async def _answer_for(self, name: str, entry: _Entry, found: Found) -> bytes | Literal[0]:
        """Its broker is gone, and the call had been started: that is its outcome."""
        text = f"the broker that ran {entry.tool} is gone; the call may have run"
        line = Refusal(errors.CRASH, text).line(entry.tool)
        value = self._written("done", entry.nonce, entry.tool, Raw(line))
        self._log.warning("key of a broker that is gone", owner=entry.owner, aid=entry.tool)
        return line if await self._bucket.update(name, value, found.revision, self._patience) else 0

    async def _reply(self, name: str, entry: _Entry) -> bytes:
        if not entry.parts:
            return bytes(entry.reply)
        parts = [
            await self._bucket.get(_part(name, entry.nonce, number), self._patience) for number in range(entry.parts)
        ]
        if None in parts:
            return Refusal(errors.CRASH, "the call has run; its reply is not kept any more").line(entry.tool)
        return b"".join(part.value for part in parts if part is not None)

    # --- a call runs, and ends ----------------------------------------------------------------------------------------

    async def start(self, claim: Claim) -> int:
        value = self._written("started", claim.nonce, claim.tool)
        revision = await self._bucket.update(claim.name, value, claim.revision, self._patience)
        if revision:
            self._running[claim] = time.monotonic()
        return revision

    async def renew(self, now: float = math.inf) -> None:
        """Keys of calls that run are not forgotten while they do; nor when NATS has come back without its store."""
        for claim, when in list(self._running.items()):
            if now - when > self._bucket.seconds / RENEWALS and claim in self._running:
                del self._running[claim]  # to the end
                self._running[claim] = time.monotonic()
                value = self._written("started", claim.nonce, claim.tool)
                with contextlib.suppress(Away):
                    await self._put(claim, value)

    async def _put(self, claim: Claim, value: bytes) -> bool:
        """What we say of a key that is ours, whatever it was that the bucket has last heard of us. False: it is
        somebody else's."""
        revision = await self._bucket.update(claim.name, value, claim.revision, self._patience)
        while not revision:
            found = await self._bucket.create(claim.name, value, self._patience)
            if isinstance(found, int):
                revision = found
            elif found is not None:
                entry = _entry.decode(found.value)
                if entry.nonce != claim.nonce or entry.state == "done":
                    return False
                revision = await self._bucket.update(claim.name, value, found.revision, self._patience)
        claim.revision = revision
        return True

    def free(self, claim: Claim) -> None:
        """Its call has not run: the key is as if it had not been used."""
        self._running.pop(claim, None)
        self.later(self._free(claim))

    async def _free(self, claim: Claim) -> None:
        await claim.settled()
        claim.state = State.ENDED
        self._running.pop(claim, None)

        async def forget() -> None:  # as it is now: a step whose answer was lost may have changed it
            found = await self._bucket.get(claim.name, self._patience)
            if found is None:
                if not claim.revision:  # our word for it may still be on its way
                    await self._bucket.delete(claim.name, 0, self._patience)
            elif _entry.decode(found.value).nonce == claim.nonce:
                await self._bucket.delete(claim.name, found.revision, self._patience)

        await self._until_done(forget)

    def finish(self, claim: Claim, line: bytes) -> None:
        """What came of its call. Its caller has its reply already: the others are told as soon as NATS takes it."""
        if claim.state is not State.ENDED:
            claim.state = State.ENDED
            self._running.pop(claim, None)
            self.later(self._finish(claim, line))

    async def _finish(self, claim: Claim, line: bytes) -> None:
        if self.untold + len(line) > MOST_UNTOLD:
            self._log.warning("a reply is not kept for the cluster: NATS is away", aid=claim.tool)
            text = "the call has run; its reply was not kept, since NATS was away for too long"
            line = Refusal(errors.CRASH, text).line(claim.tool)
        size = len(line)
        self.untold += size

        async def tell() -> None:
            most = self._bucket.largest - OUTCOME_ROOM
            parts = [line[at : at + most] for at in range(0, size, most)] if size > most else []
            for number, part in enumerate(parts):
                await self._bucket.put(_part(claim.name, claim.nonce, number), part, self._patience)
            reply = Raw(b"null") if parts else Raw(line)
            if not await self._put(claim, self._written("done", claim.nonce, claim.tool, reply, len(parts))):
                self._log.warning("key was answered for by another broker meanwhile", aid=claim.tool)

        try:
            await self._until_done(tell)
        finally:
            self.untold -= size

    async def _until_done(self, step: Callable[[], Awaitable[None]]) -> None:
        """As long as NATS would remember the key itself."""
        end = time.monotonic() + self._bucket.seconds
        while time.monotonic() < end:
            try:
                await step()
                return
            except Away:
                await asyncio.sleep(LOOK_SECONDS)
            except Exception as error:
                self._log.error("internal error", reason=repr(error))
                return

    # --- all of them --------------------------------------------------------------------------------------------------

    def _written(self, state: Stage, nonce: str, tool: str, reply: Raw = NOTHING, parts: int = 0) -> bytes:
        until = time.time() + self._ttl if state == "done" else 0.0
        return _encode(_Entry(state, self._members.me, nonce, tool, until, reply, parts))

    async def connected(self) -> None:
        """Perhaps to a server that has lost its store."""
        self.later(self.renew())

    def expire(self, now: float) -> None:
        oldest = next(iter(self._running.values()), now)
        idle = self._renewing is None or self._renewing.done()
        if idle and now - oldest > self._bucket.seconds / RENEWALS:
            self._renewing = self.later(self.renew(now))

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


def _part(name: str, nonce: str, number: int) -> str:
    """Of one call: a broker that comes back late does not write into another call's reply."""
    return f"{name}.{nonce}.{number}"
