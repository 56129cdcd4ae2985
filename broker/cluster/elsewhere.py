"""Which broker of the cluster has which tools, and which had better be asked: NATS' own discovery, and beats."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import Struct

from broker.bus import Bus
from broker.cluster import names
from broker.cluster.kv import Away
from broker.cluster.members import Members
from broker.cluster.objects import NoObject, Objects
from broker.faces.nats.micro import SERVICE
from broker.model import ToolInfo
from broker.observe.log import Log

if TYPE_CHECKING:
    from nats.aio.msg import Msg

ASK_SECONDS = 5.0  # between two rounds; a broker that has just come is asked at once
ANSWER_SECONDS = 0.3
AGAIN_SECONDS = 1.0  # rounds of newcomers
MOST_BYTES = 64 * 1024 * 1024  # that one broker says of its tools
PROCESSOR = 4.0  # calls of ours under way weigh so much less than its own report of a full processor


class Beat(Struct, omit_defaults=True):
    """What a broker says of itself, every second."""

    load: float = 0.0  # calls that run or wait, for each of its processors
    draining: bool = False
    troubled: tuple[str, ...] = ()  # tools that it would not run now
    changes: int = 0  # of its tools
    connections: int = 0  # that it has had to NATS: what it said when one broke may be lost


class Offer(NamedTuple):
    """A tool that another broker has."""

    info: ToolInfo
    timeout: float  # seconds


class _Metadata(Struct):
    tool: str = ""
    timeout: str = "30"
    info: str = ""
    cluster: str = ""


class _Endpoint(Struct):
    metadata: _Metadata


class _Info(Struct):
    id: str
    metadata: _Metadata
    endpoints: list[_Endpoint] = []


class _Tools(Struct):
    tools: list[_Metadata]


_beat = msgspec.json.Decoder(Beat)
_info = msgspec.json.Decoder(_Info)
_tools = msgspec.json.Decoder(_Tools)
_tool = msgspec.json.Decoder(ToolInfo)
beat_of = msgspec.json.Encoder().encode


class Elsewhere:
    def __init__(
        self,
        bus: Bus,
        members: Members,
        objects: Objects,
        cluster: str,
        learned: Callable[[list[Offer]], object],
        log: Log,
    ) -> None:
        self._bus = bus
        self._members = members
        self._objects = objects
        self._cluster = cluster
        self._learned = learned  # told of all tools that others have
        self._log = log
        self._tools: dict[str, dict[str, Offer]] = {}  # by broker
        self._changes: dict[str, int] = {}  # of its tools, when it was asked last
        self._beats: dict[str, tuple[bytes, Beat]] = {}  # what each has said, last, as it was said and as it is meant
        self._under_way: Counter[str] = Counter()  # calls of ours, by broker
        self._asking: asyncio.Task[None] | None = None
        bus.on_connect(self._connected)

    async def _connected(self) -> None:
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_now_and_then())

    # --- who has what -------------------------------------------------------------------------------------------------

    async def _ask_now_and_then(self) -> None:
        asked = 0.0
        while True:
            others = self._members.others()
            news = any(self._changes.get(who) != self._said(who).changes for who in others)
            try:
                if self._bus.connected and (news or time.monotonic() - asked > ASK_SECONDS):
                    asked = time.monotonic()
                    await self._ask()
                self._forget()
            except Exception as error:  # what one broker says must not keep us from hearing the others
                self._log.warning("tools of other brokers", reason=str(error) or repr(error))
            await asyncio.sleep(AGAIN_SECONDS)

    async def _ask(self) -> None:
        from nats.errors import Error

        heard: list[bytes] = []

        async def hear(message: Msg) -> None:
            heard.append(message.data)

        client = self._bus.client
        inbox = client.new_inbox()
        try:
            subscription = await client.subscribe(inbox, cb=hear)
            await client.publish(f"$SRV.INFO.{SERVICE}", b"", reply=inbox)
            await asyncio.sleep(ANSWER_SECONDS)
            await subscription.unsubscribe()
        except (Error, OSError):
            return
        for text in heard:
            await self._hear(text)
        self._tell()

    async def _hear(self, text: bytes) -> None:
        try:
            said = _info.decode(text)
            if said.metadata.cluster != self._cluster or said.id == self._members.me:
                return
            changes = self._said(said.id).changes
            about = [one.metadata for one in said.endpoints]
            if any(not one.info for one in about):  # they are too many for one message
                about = await self._all_of(said.id)
            offers = [_offer(one) for one in about]
        except (msgspec.DecodeError, ValueError):
            return  # not one of ours
        self._tools[said.id] = {one.info.aid: one for one in offers if one is not None}
        self._changes[said.id] = changes

    async def _all_of(self, who: str) -> list[_Metadata]:
        """As it says them to brokers."""
        from nats.errors import Error

        subject = names.direct_subject(self._cluster, who)
        headers = {names.TOOLS: "1", names.ACCEPTS: "1"}
        try:
            message = await self._bus.client.request(subject, b"", timeout=ASK_SECONDS, headers=headers)
            large = names.headers_of(message).get(names.OBJECT)
            data = await self._objects.get(large, MOST_BYTES) if large else message.data
        except (Error, OSError, TimeoutError, Away, NoObject) as error:
            raise ValueError(str(error)) from None
        if large:
            self._objects.forget(large)
        return _tools.decode(data).tools

    def _forget(self) -> None:
        gone = [who for who in self._tools if self._members.gone(who)]
        for who in gone:
            del self._tools[who]
            self._changes.pop(who, None)
            self._beats.pop(who, None)
        if gone:
            self._tell()

    def _tell(self) -> None:
        everything: dict[str, Offer] = {}
        for who in sorted(self._tools):
            everything = self._tools[who] | everything
        self._learned(list(everything.values()))

    def _said(self, who: str) -> Beat:
        words = self._members.words.get(who) or b"{}"
        known = self._beats.get(who)
        if known is not None and known[0] is words:
            return known[1]
        try:
            beat = _beat.decode(words)
        except msgspec.DecodeError:
            beat = Beat()
        self._beats[who] = words, beat
        return beat

    # --- whom to ask --------------------------------------------------------------------------------------------------

    def choose(self, tool: str, but: Collection[str]) -> str:
        """The broker that had better run it; empty: there is none."""
        able = [who for who, tools in self._tools.items() if tool in tools and who not in but]
        able = [who for who in able if not self._members.gone(who) and not self._said(who).draining]
        return min(able, key=lambda who: self._weight(who, tool), default="")

    def _weight(self, who: str, tool: str) -> tuple[bool, float, float]:
        said = self._said(who)
        return tool in said.troubled, said.load + self._under_way[who] / PROCESSOR, random.random()

    def gone(self, who: str) -> bool:
        return self._members.gone(who)

    def connections(self, who: str) -> int:
        """When it is another number than before, something that it has said may be lost."""
        return self._said(who).connections

    def begin(self, who: str) -> None:
        self._under_way[who] += 1

    def end(self, who: str) -> None:
        self._under_way[who] -= 1
        if not self._under_way[who]:
            del self._under_way[who]

    def status(self) -> dict[str, int]:
        return {who: len(tools) for who, tools in sorted(self._tools.items())}

    def stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()


def _offer(about: _Metadata) -> Offer | None:
    """None: not a tool that can be called from here."""
    try:
        info = _tool.decode(about.info) if about.info else ToolInfo(about.tool)
        timeout = float(about.timeout)
    except (msgspec.DecodeError, ValueError):
        return None
    if not info.aid or info.aid.startswith("_") or not 0 < timeout < math.inf:
        return None
    # Files stay where they are made, and inputs are judged where the tool is.
    return Offer(msgspec.structs.replace(info, elsewhere=True, files=False, checks=True), timeout)
