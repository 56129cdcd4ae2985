"""At most one execution a tool call: a key in CommonGround's own bucket, with a lease that its leader keeps renewing.

Whoever creates the key runs the tool; the others wait for what came of it. It is claimed right before it runs, so that
a leader that is gone may have run it: whoever takes its key over answers for it, and does not run it again.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time

import msgspec
from msgspec import Struct

from broker.bus import Bus
from broker.cluster.kv import Away, Bucket, Found
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
    """A leader's hold on a call's key."""

    __slots__ = ("_claims", "inherited", "key", "lost", "revision", "value")

    def __init__(self, claims: Claims, key: str, value: bytes, revision: int, inherited: bool) -> None:
        self._claims = claims
        self.key = key
        self.value = value
        self.revision = revision
        self.inherited = inherited  # from one that is gone, and may have run it
        self.lost = False  # somebody has taken us for dead

    async def renew(self) -> None:
        if self.lost:
            return
        try:
            revision = await self._claims.bucket.update(self.key, self.value, self.revision, PATIENCE_SECONDS)
        except Away:
            return
        if revision:
            self.revision = revision
        else:
            self.lost = True


class Claims:
    def __init__(self, bus: Bus, replicas: int, lease: float) -> None:
        self.bucket = Bucket(bus, BUCKET, 0, replicas, HISTORY)
        self.lease = min(lease, LONGEST_LEASE)

    async def claim(self, command: Command) -> Claim | Callback:
        """The call is ours to run or, if inherited, to answer for; or what came of it. Away: ask again."""
        key = key_of(command)
        value = _encode(_Entry("running", time.time(), None, self.lease, secrets.token_hex(8)))
        seen, since = 0, 0.0
        while True:
            if revision := await self.bucket.create(key, value, PATIENCE_SECONDS):
                return Claim(self, key, value, revision, inherited=False)
            found = await self.bucket.get(key, PATIENCE_SECONDS)
            if found is None:
                continue
            entry = _read(found)
            if entry.payload is not None:
                return entry.payload
            if found.revision != seen:
                seen, since = found.revision, time.monotonic()
            elif time.monotonic() - since > self._patience(entry):
                if revision := await self.bucket.update(key, value, found.revision, PATIENCE_SECONDS):
                    return Claim(self, key, value, revision, inherited=True)
                continue
            await self.bucket.changed(key, found.revision, LOOK_SECONDS, PATIENCE_SECONDS)

    def _patience(self, entry: _Entry) -> float:
        """Seconds without a change after which a leader is dead, by our own clock."""
        if entry.lease:
            return min(entry.lease, LONGEST_LEASE)
        left = FOREIGN_SECONDS - (time.time() - entry.timestamp)
        return max(self.lease, min(left, FOREIGN_SECONDS)) if entry.timestamp else self.lease

    async def release(self, claim: Claim) -> None:
        """It has not run: another broker may."""
        await self.bucket.delete(claim.key, claim.revision, PATIENCE_SECONDS)

    async def done(self, command: Command, callback: Callback) -> None:
        """Whoever asks from now on is told this. The first word stays."""
        key, value = key_of(command), _encode(_Entry("done", time.time(), callback))
        while not await self.bucket.create(key, value, PATIENCE_SECONDS):
            found = await self.bucket.get(key, PATIENCE_SECONDS)
            if found is None:
                continue
            if _read(found).payload is not None:
                return
            if await self.bucket.update(key, value, found.revision, PATIENCE_SECONDS):
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
