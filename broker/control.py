"""Words to the broker itself: lines whose aid begins with an underscore. Most are the operator's."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct

from broker import addresses, errors
from broker.cluster.kv import Away
from broker.cluster.queue.words import QueueWords
from broker.errors import ConfigError, Refusal
from broker.model import Named
from broker.observe import status
from broker.policy.leases import ANY, TooMany, tier_of
from broker.policy.story import EMPTY

if TYPE_CHECKING:
    from broker.faces.machina.connection import Connection
    from broker.server import Broker

Answer = dict[str, Any] | Refusal
NO_UTP = Refusal(errors.NOT_FOUND, "this broker keeps no definitions of tools: [utp] in broker.toml says where")


class Asker(Named, Protocol):
    """Who asks, through whichever face."""

    @property
    def operator(self) -> bool: ...

    def __hash__(self) -> int: ...


class _Issue(Struct):
    tool_aid: str = ""
    tier: int | None = None
    ttl_ms: float | None = None


class _Named(Struct):
    name: str = ""


class _Session(Struct):
    session: str = ""


class _Definition(Struct):
    project: str = ""
    file: str = ""  # what it says
    make_project: bool = False


class _Project(Struct):
    project: str = ""


class _Auth(Struct):
    token: str = ""


class Control:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._callers: dict[str, Callable[[Asker, bytes], Answer]] = {
            "_tools": self._tools,
            "_state": self._state,
            "_state.clear": self._state_clear,
            "_assets": self._assets,
        }
        self._operators: dict[str, Callable[[Asker, bytes], Awaitable[Answer]]] = {
            "_status": self._status,
            "_reload": self._reload,
            "_lease.issue": self._lease_issue,
            "_lease.list": self._lease_list,
            "_lease.revoke": self._lease_revoke,
            "_lease.gc": self._lease_gc,
            "_breaker.reset": self._breaker_reset,
            "_pause": self._pause,
            "_resume": self._resume,
            "_utp.tool.add": self._utp_tool_add,
            "_utp.tool.list": self._utp_tool_list,
        }
        queue = QueueWords(broker)
        self._askers: dict[str, Callable[[Asker, bytes], Awaitable[Answer]]] = queue.callers
        self._operators |= queue.operators

    async def __call__(self, asker: Asker, aid: str, line: bytes) -> Answer:
        """What the reply says beside `ok`, or why not. Whoever asks has shown who it is."""
        try:
            if aid in self._callers:
                return self._callers[aid](asker, line)
            if aid in self._askers:
                return await self._askers[aid](asker, line)
        except msgspec.ValidationError as error:
            return _wrong(aid, error)
        command = self._operators.get(aid)
        if command is None:
            return Refusal(errors.NOT_FOUND, f"tool not found: {aid}")
        if not asker.operator:
            place = addresses.operator_socket(self._broker.socket)
            return Refusal(errors.FORBIDDEN, f"{aid} is the operator's: ask on {place}")
        try:
            return await command(asker, line)
        except msgspec.ValidationError as error:
            return _wrong(aid, error)

    # --- everybody's ------------------------------------------------------------------------------------------------

    def _tools(self, asker: Asker, line: bytes) -> Answer:  # noqa: ARG002
        return {"tools": status.tools(tool for tool in self._broker.registry if asker.rights.allow(tool))}

    def _state(self, asker: Asker, line: bytes) -> Answer:
        """What event tools have made of a session of the asker's own: of the named one, else of its connection's."""
        name = msgspec.json.decode(line, type=_Session).session
        session = self._broker.dispatcher.sessions.find(session_key(asker, name))
        return {"session": name, "state": msgspec.Raw(session.text if session is not None else EMPTY)}

    def _state_clear(self, asker: Asker, line: bytes) -> Answer:
        name = msgspec.json.decode(line, type=_Session).session
        return {"session": name, "cleared": self._broker.dispatcher.sessions.forget_story(session_key(asker, name))}

    def _assets(self, asker: Asker, line: bytes) -> Answer:  # noqa: ARG002
        return {"assets": [one.told() for one in self._broker.equipment.assets.of(asker.principal, asker.operator)]}

    # --- who it is --------------------------------------------------------------------------------------------------

    def authenticate(self, connection: Connection, line: bytes) -> Answer:
        """At once: the lines behind this one are already the named caller's."""
        door = self._broker.door
        if connection.local or not door.locked():  # nothing to prove: it is who it is
            return {"principal": connection.principal}
        if connection.authenticated:
            text = f"this connection is {connection.principal} already; open another one for another token"
            return Refusal(errors.FORBIDDEN, text)
        try:
            token = door.find(msgspec.json.decode(line, type=_Auth).token)
        except msgspec.ValidationError:
            token = None
        if token is None:
            connection.end_after_replies()
            return Refusal(errors.FORBIDDEN, "there is no such token; `broker token new NAME` makes one")
        connection.become(token)
        return {"principal": connection.principal}

    async def _status(self, asker: Asker, line: bytes) -> Answer:  # noqa: ARG002
        return status.report(self._broker)

    async def _reload(self, asker: Asker, line: bytes) -> Answer:  # noqa: ARG002
        try:
            return {"result": await self._broker.reload()}
        except ConfigError as error:
            return Refusal(errors.BAD_REQUEST, f"everything stays as it was: {error}")

    # --- leases -----------------------------------------------------------------------------------------------------

    async def _lease_issue(self, asker: Asker, line: bytes) -> Answer:
        broker = self._broker
        asked = msgspec.json.decode(line, type=_Issue)
        tool = broker.registry.get(asked.tool_aid)
        if not asked.tool_aid:
            return Refusal(errors.BAD_REQUEST, "_lease.issue needs a tool_aid: a tool's name, or * for any")
        tier = asked.tier
        if tier is None:
            if asked.tool_aid == ANY:
                return Refusal(errors.BAD_REQUEST, "_lease.issue for * needs a tier, 0 to 3")
            tier = tool.tier if tool else tier_of(asked.tool_aid, ())
        if not 0 <= tier <= 3:
            return Refusal(errors.BAD_REQUEST, f"tier {tier} is not one of 0, 1, 2, 3")
        seconds = None if asked.ttl_ms is None else asked.ttl_ms / 1000
        leases, now, shared = broker.dispatcher.leases, time.monotonic(), broker.cluster is not None
        try:
            lease = leases.issue(asked.tool_aid, tier, seconds, asker.principal, now, shared=shared)
        except TooMany as error:
            return Refusal(errors.OVERLOADED, str(error))
        try:
            if broker.cluster is not None:
                await broker.cluster.leases.publish(lease)
        except Away as error:
            leases.revoke(lease.token, now)
            return Refusal(errors.UNAVAILABLE, f"{error}; leases are the whole cluster's", retry_after=1)
        broker.audit.write("lease_issued", asker.principal, lease.tool, lease.tier, lease.fingerprint)
        return {
            "token_id": lease.token,
            "tool_aid": lease.tool,
            "tier": lease.tier,
            "ttl_ms": round((lease.expires - now) * 1000),
        }

    async def _lease_list(self, asker: Asker, line: bytes) -> Answer:  # noqa: ARG002
        cluster, now = self._broker.cluster, time.monotonic()
        try:
            leases = await cluster.leases.alive() if cluster else self._broker.dispatcher.leases.alive(now)
        except Away as error:
            return Refusal(errors.UNAVAILABLE, f"{error}; leases are the whole cluster's", retry_after=1)
        return {"leases": status.leases(leases, now)}

    async def _lease_revoke(self, asker: Asker, line: bytes) -> Answer:
        name = msgspec.json.decode(line, type=_Named).name
        lease = self._broker.dispatcher.revoke_lease(name)
        if self._broker.cluster is not None:  # what was issued here may have been used elsewhere
            try:
                lease = await self._broker.cluster.leases.revoke(name)
            except Away as error:
                return Refusal(errors.UNAVAILABLE, f"{error}; leases are the whole cluster's", retry_after=1)
        if lease is None:
            return Refusal(errors.NOT_FOUND, "there is no such lease alive; `broker lease list` shows them")
        self._broker.audit.write("lease_revoked", asker.principal, lease.tool, lease.tier, lease.fingerprint)
        return {"fingerprint": lease.fingerprint}

    async def _lease_gc(self, asker: Asker, line: bytes) -> Answer:  # noqa: ARG002
        counts = self._broker.dispatcher.leases.gc(time.monotonic())
        if self._broker.cluster is not None:  # what was issued, used and rejected here; what can be used anywhere
            try:
                counts = counts._replace(active=len(await self._broker.cluster.leases.alive()))
            except Away as error:
                return Refusal(errors.UNAVAILABLE, f"{error}; leases are the whole cluster's", retry_after=1)
        return counts._asdict()

    # --- breakers ---------------------------------------------------------------------------------------------------

    async def _breaker_reset(self, asker: Asker, line: bytes) -> Answer:  # noqa: ARG002
        name = msgspec.json.decode(line, type=_Named).name
        tool = self._broker.registry.get(name)
        if tool is None:
            return Refusal(errors.NOT_FOUND, f"tool not found: {name}")
        was = tool.breaker.state.value
        self._broker.dispatcher.reset_breaker(tool)
        return {"aid": tool.name, "was": was, "now": tool.breaker.state.value}

    # --- pauses -----------------------------------------------------------------------------------------------------

    async def _pause(self, asker: Asker, line: bytes) -> Answer:
        return self._hold("paused", self._broker.equipment.pause, asker, line)

    async def _resume(self, asker: Asker, line: bytes) -> Answer:
        return self._hold("resumed", self._broker.equipment.resume, asker, line)

    def _hold(self, done: str, change: Callable[[str], str], asker: Asker, line: bytes) -> Answer:
        name = msgspec.json.decode(line, type=_Named).name
        wrong = change(name)
        if wrong:
            return Refusal(errors.NOT_FOUND, wrong)
        self._broker.log.info(done, name=name, who=asker.principal)
        return {"paused": sorted(self._broker.equipment.pauses.names)}

    # --- CommonGround's definitions of tools -----------------------------------------------------------------------

    async def _utp_tool_add(self, asker: Asker, line: bytes) -> Answer:
        asked = msgspec.json.decode(line, type=_Definition)
        if self._broker.management is None:
            return NO_UTP
        found = await self._broker.management.add(asked.project, asked.file.encode(), asked.make_project)
        if isinstance(found, Refusal):
            return found
        self._broker.log.info("tool defined", project=found.project_id, tool=found.tool_name, who=asker.principal)
        return {"tool": msgspec.to_builtins(found)}

    async def _utp_tool_list(self, asker: Asker, line: bytes) -> Answer:  # noqa: ARG002
        asked = msgspec.json.decode(line, type=_Project)
        if self._broker.management is None:
            return NO_UTP
        found = await self._broker.management.tools(asked.project)
        return found if isinstance(found, Refusal) else {"tools": msgspec.to_builtins(found)}


def session_key(asker: Asker, name: str) -> Hashable:
    """A session is its principal's, by its name; one without a name is its connection's."""
    return (asker.principal, name) if name else asker


def _wrong(aid: str, error: msgspec.ValidationError) -> Refusal:
    return Refusal(errors.BAD_REQUEST, f"{aid}: {str(error)[0].lower()}{str(error)[1:]}")
