"""At most one execution a tool call: a key in CommonGround's own bucket, with a lease that its leader keeps renewing.

Whoever creates the key runs the tool; the others wait for what came of it. It is claimed right before it runs, so that
a leader that is gone may have run it: whoever takes its key over answers for it, and does not run it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import time

import msgspec
from msgspec import Struct

from broker.bus import Bus
from broker.cluster.kv import Away, Bucket, Changes, Found
from broker.utp.model import Callback, Command

BUCKET = "cg_tool_idem_v1"
HISTORY = 64  # as CommonGround's executors make the bucket
LOOK_SECONDS = 1.0  # at a key that somebody else has, beside hearing of its changes
FOREIGN_SECONDS = 60.0  # an executor that does not renew has given up by then
PATIENCE_SECONDS = 2.0  # for NATS, before one looks again whether one still wants to know
LONGEST_LEASE = 600.0
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


class _Entry(Struct, omit_defaults=True):
    """`lease` and `owner` are ours: theirs have neither."""

    status: str = ""
    timestamp: float = 0.0
    payload: Callback | None = None
    lease: float = 0.0
    owner: str = ""  # a claim, of a broker


_entry = msgspec.json.Decoder(_Entry)
_encode = msgspec.json.Encoder().encode


class Claim:
    """A leader's hold on a call's key, from the first attempt at it. What it writes nobody else would: so it knows its
    own words again, also where nobody has told it that they were heard."""

    __slots__ = ("_bucket", "inherited", "key", "lost", "revision", "value")

    def __init__(self, bucket: Bucket, command: Command, lease: float) -> None:
        self._bucket = bucket
        self.key = key_of(command)
        self.value = _encode(_Entry("running", time.time(), None, lease, secrets.token_hex(8)))
        self.revision = 0  # of what it has written; 0: nothing that it knows of
        self.inherited = False  # from one that is gone, and may have run the call
        self.lost = False  # somebody has taken us for dead

    async def renew(self) -> None:
        """Away: next time."""
        if self.lost:
            return
        with contextlib.suppress(Away):
            self.revision = await self._bucket.update(self.key, self.value, self.revision, PATIENCE_SECONDS) or (
                await self._find()
            )
            self.lost = not self.revision

    async def release(self) -> None:
        """It has not run: another broker may."""
        if not await self._bucket.delete(self.key, self.revision, PATIENCE_SECONDS) and (found := await self._find()):
            await self._bucket.delete(self.key, found, PATIENCE_SECONDS)

    async def _find(self) -> int:
        """Our own word, heard though nobody has said so."""
        found = await self._bucket.get(self.key, PATIENCE_SECONDS)
        return found.revision if found is not None and found.value == self.value else 0


class Claims:
    def __init__(self, bus: Bus, replicas: int, lease: float) -> None:
        self.lease = min(lease, LONGEST_LEASE)
        self._bucket = Bucket(bus, BUCKET, 0, replicas, HISTORY)

    def attempt(self, command: Command) -> Claim:
        return Claim(self._bucket, command, self.lease)

    async def take(self, claim: Claim) -> Callback | None:
        """None: the call is ours to run or, if inherited, to answer for. Else what came of it. Away: ask again."""
        seen, since = 0, 0.0
        changes: Changes | None = None
        try:
            while True:
                found = await self._look(claim, changes)
                if found is None:
                    if claim.revision:
                        return None
                    continue
                entry = _read(found)
                if entry.payload is not None:
                    return entry.payload
                if found.revision != seen:
                    seen, since = found.revision, time.monotonic()
                elif time.monotonic() - since > self._patience(entry):
                    claim.inherited = True
                    claim.revision = await self._bucket.update(claim.key, claim.value, found.revision, PATIENCE_SECONDS)
                    continue
                if changes is None:
                    changes = await self._bucket.changes(claim.key)
                else:
                    await changes.wait(LOOK_SECONDS)
        finally:
            if changes is not None:
                await changes.stop()

    async def _look(self, claim: Claim, changes: Changes | None) -> Found | None:
        """What somebody else has written. None: it is ours, or has just gone."""
        found: Found | None = None
        if changes is not None:  # every attempt to create it would wake all who wait
            changes.heard.clear()
            found = await self._bucket.get(claim.key, PATIENCE_SECONDS)
        if found is None:
            answer = await self._bucket.create(claim.key, claim.value, PATIENCE_SECONDS)
            if not isinstance(answer, Found):
                claim.revision = answer or 0
                return None
            found = answer
        if found.value == claim.value:
            claim.revision = found.revision
            return None
        return found

    def _patience(self, entry: _Entry) -> float:
        """Seconds without a change after which a leader is dead, by our own clock."""
        if entry.lease:
            return min(entry.lease, LONGEST_LEASE)
        left = FOREIGN_SECONDS - (time.time() - entry.timestamp)
        return max(self.lease, min(left, FOREIGN_SECONDS)) if entry.timestamp else self.lease

    async def done(self, command: Command, callback: Callback, claim: Claim | None = None) -> None:
        """Whoever asks from now on is told this. The first word stays."""
        key, value = key_of(command), _encode(_Entry("done", time.time(), callback))
        if claim is not None and await self._bucket.update(key, value, claim.revision, PATIENCE_SECONDS):
            return
        while True:
            found = await self._bucket.create(key, value, PATIENCE_SECONDS)
            if isinstance(found, int) or (found is not None and _read(found).payload is not None):
                return
            if found is not None and await self._bucket.update(key, value, found.revision, PATIENCE_SECONDS):
                return


def key_of(command: Command) -> str:
    call = hashlib.sha256(command.tool_call_id.encode()).hexdigest()
    return f"tool.{_segment(command.project_id)}.{_segment(command.tool_name or command.target)}.{call}"


def _segment(text: str) -> str:
    return _UNSAFE.sub("_", text) or "_"


def _read(found: Found) -> _Entry:
    """What cannot be understood is somebody's claim, of whom nothing is known."""
    try:
        return _entry.decode(found.value)
    except msgspec.DecodeError:
        return _Entry()
