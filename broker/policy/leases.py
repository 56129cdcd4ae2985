"""Single-use permission for tools that can do harm. Pure; the clock is an argument."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

ANY = "*"
LEAST_SECONDS, MOST_SECONDS, USUAL_SECONDS = 1.0, 300.0, 10.0
MOST_LEASES = 4096

EXECUTES = ("exec", "network", "process")
WRITES = ("write", "append", "delete", "create")


def tier_of(aid: str, side_effects: Sequence[str]) -> int:
    """0 safe, 1 writes, 2 shell, network, process, 3 plugin loading: the first rule that fits."""
    if "GENESIS" in aid:
        return 3
    if "SHELL" in aid or "NET.HTTP" in aid or _any(EXECUTES, side_effects):
        return 2
    if _any(WRITES, side_effects) or any(part in aid for part in ("FILE.WRITE", "MEMORY.APPEND", "VECDB.UPSERT")):
        return 1
    return 0


def _any(words: Sequence[str], side_effects: Sequence[str]) -> bool:
    return any(word in effect for word in words for effect in side_effects)


def fingerprint(token: str) -> str:
    """What logs may show of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Lease:
    __slots__ = ("expires", "fingerprint", "issuer", "proof", "revoked", "spent", "tier", "token", "tool", "used")

    def __init__(self, token: str, tool: str, tier: int, expires: float, issuer: str, shown: str = "") -> None:
        self.token = token
        self.fingerprint = shown or fingerprint(token)
        self.tool = tool
        self.tier = tier
        self.expires = expires
        self.issuer = issuer
        self.proof = ""  # in a cluster: that it was taken for one call
        self.spent = False  # reserved by a call, or used
        self.used = False  # its call has been handed over
        self.revoked = False


NOT_FOUND = "lease not found"
CONSUMED = "lease already consumed"


def refused(lease: Lease, tool: str, tier: int, now: float) -> str:
    """Why it does not open this tool; empty where it does."""
    if lease.spent:
        return CONSUMED
    if lease.expires <= now:
        return "lease expired"
    if lease.tool not in (ANY, tool):
        return f"lease tool mismatch: expected={lease.tool} got={tool}"
    return "lease tier too low" if lease.tier < tier else ""


class Counts(NamedTuple):
    active: int
    issued: int
    consumed: int
    rejected: int


class TooMany(Exception):
    """The table is full of leases that are alive."""

    def __init__(self) -> None:
        super().__init__("there are too many leases alive; `broker lease list` shows them")


class Leases:
    def __init__(self, most: int = MOST_LEASES) -> None:
        self._most = most
        self._by_digest: OrderedDict[bytes, Lease] = OrderedDict()
        self._issued = self._consumed = self._rejected = 0

    def issue(
        self, tool: str, tier: int, seconds: float | None, issuer: str, now: float, *, shared: bool = False
    ) -> Lease:
        """`shared`: whether it can be used is written down elsewhere, and is only shown from here."""
        seconds = USUAL_SECONDS if seconds is None else min(MOST_SECONDS, max(LEAST_SECONDS, seconds))
        if shared and len(self._by_digest) >= self._most:
            self._by_digest.popitem(last=False)
        self._make_room(now)
        lease = Lease(f"lease_{secrets.token_hex(16)}", tool, tier, now + seconds, issuer)
        self._by_digest[_digest(lease.token)] = lease
        self._issued += 1
        return lease

    def reserve(self, token: str, tool: str, tier: int, now: float) -> Lease | str:
        """The lease, now nobody else's; or the reason why it does not open this tool."""
        lease = self._by_digest.get(_digest(token))
        if lease is None or not hmac.compare_digest(lease.token.encode(), token.encode("utf-8", "surrogatepass")):
            reason = NOT_FOUND
        else:
            reason = refused(lease, tool, tier, now)
        if reason:
            self.rejected()
            return reason
        assert lease is not None
        lease.spent = True
        return lease

    def taken(self, token: str, *, taken: bool = True) -> None:
        """A shared one, that was issued here, perhaps, was reserved, or given back."""
        lease = self._by_digest.get(_digest(token))
        if lease is not None:
            lease.spent = taken

    def rejected(self) -> None:
        """A token that was presented opened nothing."""
        self._rejected += 1

    def doubt(self, lease: Lease, tier: int) -> str:
        """Why a lease that is reserved does not open its tool any more: the tool has changed, or the lease."""
        reason = NOT_FOUND if lease.revoked else "lease tier too low" if lease.tier < tier else ""
        self._rejected += bool(reason)
        return reason

    def use(self, lease: Lease) -> None:
        """The call is being handed over: from now on it may have run."""
        self._consumed += 1
        lease.used = True

    def give_back(self, lease: Lease) -> None:
        """The call never ran: the lease can be used, until it expires."""
        self._consumed -= lease.used
        lease.spent = lease.used = False

    def revoke(self, name: str, now: float) -> Lease | None:
        """By token or fingerprint; only the operator asks. One that has been used is beyond recall."""
        given = name.encode("utf-8", "surrogatepass")
        for digest, lease in self._by_digest.items():
            if given in (lease.fingerprint.encode(), lease.token.encode()) and not lease.used and lease.expires > now:
                del self._by_digest[digest]
                lease.revoked = True
                return lease
        return None

    def gc(self, now: float) -> Counts:
        """Those that expired are remembered for a while: whoever presents one is told so."""
        self._forget(now - MOST_SECONDS)
        return Counts(len(self.alive(now)), self._issued, self._consumed, self._rejected)

    def _forget(self, before: float) -> None:
        for digest in [digest for digest, lease in self._by_digest.items() if lease.expires <= before]:
            del self._by_digest[digest]

    def alive(self, now: float) -> list[Lease]:
        return [lease for lease in self._by_digest.values() if lease.expires > now and not lease.spent]

    def _make_room(self, now: float) -> None:
        if len(self._by_digest) < self._most:
            return
        self._forget(now)
        for digest in [digest for digest, lease in self._by_digest.items() if lease.used]:
            if len(self._by_digest) < self._most:
                return
            del self._by_digest[digest]
        if len(self._by_digest) >= self._most:
            raise TooMany


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
