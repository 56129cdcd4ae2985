"""A call that came over HTTP: who asks, and where its one answer arrives."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from broker import errors
from broker.errors import Refusal
from broker.model import HUNG_UP, Place, Tool, Work
from broker.policy.rights import Rights
from broker.ticket import Call

if TYPE_CHECKING:
    from broker.policy.idempotency import Entry
    from broker.server import Broker

_encode = msgspec.json.Encoder().encode


class Asker(NamedTuple):
    """Who it is, and what it may do. Anybody who is not named is `http:anonymous`, and never an operator."""

    principal: str
    rights: Rights
    operator: bool


class Asked(NamedTuple):
    """What a call asks for beside its tool and input."""

    timeout_ms: int | None = None
    key: str = ""
    lease: str = ""
    session: str = ""
    ds_state: bytes | None = None
    place: Place | None = None


class HttpCall:
    """One call's caller (nobody else has its number) and sink."""

    __slots__ = ("_left", "_refused", "answer", "number", "principal", "rights")

    face = "http"
    line: Any = None

    def __init__(self, asker: Asker, number: int, loop: asyncio.AbstractEventLoop, refused: Counter[str]) -> None:
        self.principal = asker.principal
        self.rights = asker.rights
        self.number = number
        self.answer: asyncio.Future[bytes | Refusal] = loop.create_future()
        self._left = False
        self._refused = refused  # of all calls, by code

    def gone(self) -> bool:
        return self._left

    def took(self, ticket: Any) -> None:
        """It is settled when its answer comes."""

    def full(self, work: Work) -> bool:  # noqa: ARG002
        return False

    def deliver(self, work: Work, lines: bytes, count: int) -> None:  # noqa: ARG002
        if not self.answer.done():
            self.answer.set_result(lines)

    def repeat(self, work: Work, entry: Entry) -> None:  # noqa: ARG002
        if not self.answer.done():
            self.answer.set_result(entry.hit(None))

    def refuse(self, work: Work, refusal: Refusal) -> None:  # noqa: ARG002
        if not self.answer.done():
            self._refused[refusal.kind.code] += 1
            self.answer.set_result(refusal)

    def leave(self) -> None:
        """Nobody waits any more: what has not begun is dropped, what runs is finished for nobody."""
        self._left = True
        if not self.answer.done():
            self.answer.set_result(HUNG_UP)


class Caller:
    """Brings calls to the dispatcher."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._core = broker.core
        self._loop = broker.core.loop
        self._flushing = False

    def begin(self, tool: Tool, given: str, asker: Asker, asked: Asked | None = None) -> HttpCall:
        """Its answer is a reply line, or a refusal. `given` is the input's JSON."""
        broker, core = self._broker, self._core
        dispatcher = broker.dispatcher
        call = HttpCall(asker, core.name(), self._loop, dispatcher.refused)
        core.board.round += 1  # so that a plugin that was replaced is noticed
        try:
            refusal = dispatcher.refusal()
            if refusal is None and asked is None and tool.name in broker.registry.plain_of(asker.rights):
                lines = tool.head + _encode(given) + b"}\n"
                if dispatcher.is_too_large(lines):
                    refusal = dispatcher.too_large("the call's input")
                else:
                    work = dispatcher.span(tool, lines, 1, None, call, call)
                    tool.runtime.submit(work, time.monotonic())
            elif refusal is None:
                refusal = self._admit(tool, given, call, asked or Asked())
        except Exception as error:  # a mistake of ours must not leave a caller waiting for ever
            broker.log.error("internal error", aid=tool.name, reason=repr(error))
            refusal = Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}")
        if refusal is not None and not call.answer.done():
            dispatcher.refused[refusal.kind.code] += 1
            call.answer.set_result(refusal)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return call

    def _admit(self, tool: Tool, given: str, caller: HttpCall, asked: Asked) -> Refusal | None:
        dispatcher = self._broker.dispatcher
        if asked.ds_state is None:
            lines = tool.head + _encode(given) + b"}\n"
        else:
            lines = b'{"aid":' + _encode(tool.name) + b',"input_json":' + _encode(given) + b"}\n"
        call = Call(tool, lines, None, dispatcher.timeout(tool, asked.timeout_ms))
        call.key, call.lease, call.ds_state, call.job = asked.key, asked.lease, asked.ds_state, asked.place
        if asked.ds_state is not None:
            session: Hashable = (asked.session and (caller.principal, asked.session)) or caller
            call.session = session
        return dispatcher.admit(call, caller, caller, time.monotonic())

    def _flush(self) -> None:
        """One write a toolhost for all calls of one turn of the loop."""
        self._flushing = False
        self._core.flush()

    def hang_up(self, call: HttpCall) -> None:
        call.leave()
        self._broker.dispatcher.hung_up(call)
        self._broker.forget(call)
        self._core.flush()
