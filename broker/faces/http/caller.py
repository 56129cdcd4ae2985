"""A call that came over HTTP: who asks, and where its one answer arrives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable
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
    plain: dict[str, Tool]  # whose calls of these need no look; it changes as they do


class Asked(NamedTuple):
    """What a call asks for beside its tool and input."""

    timeout_ms: int | None = None
    key: str = ""
    lease: str = ""
    session: str = ""
    ds_state: bytes | None = None
    place: Place | None = None


class HttpCall:
    """One call's caller (nobody else has its number) and sink. Its answer, a reply line or a refusal, is told once."""

    __slots__ = ("_left", "_refused", "_tell", "number", "principal", "rights")

    face = "http"
    line: Any = None

    def __init__(
        self, asker: Asker, number: int, tell: Callable[[bytes | Refusal], object], refused: Counter[str]
    ) -> None:
        self.principal = asker.principal
        self.rights = asker.rights
        self.number = number
        self._tell: Callable[[bytes | Refusal], object] | None = tell
        self._left = False
        self._refused = refused  # of all calls, by code

    def settle(self, answer: bytes | Refusal) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(answer)

    def turn_down(self, refusal: Refusal) -> None:
        if self._tell is not None:
            self._refused[refusal.kind.code] += 1
            self.settle(refusal)

    def waiting(self) -> bool:
        """It has no answer yet."""
        return self._tell is not None

    def gone(self) -> bool:
        return self._left

    def took(self, ticket: Any) -> None:
        """It is settled when its answer comes."""

    def full(self, work: Work) -> bool:  # noqa: ARG002
        return False

    def deliver(self, work: Work, lines: bytes, count: int) -> None:  # noqa: ARG002
        self.settle(lines)

    def repeat(self, work: Work, entry: Entry) -> None:  # noqa: ARG002
        self.settle(entry.hit(None))

    def refuse(self, work: Work, refusal: Refusal) -> None:  # noqa: ARG002
        self.turn_down(refusal)

    def leave(self) -> None:
        """Nobody waits any more: what has not begun is dropped, what runs is finished for nobody."""
        self._left = True
        self.settle(HUNG_UP)


class Caller:
    """Brings calls to the dispatcher."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._core = broker.core
        self._loop = broker.core.loop
        self._flushing = False

    def begin(
        self,
        tool: Tool,
        given: str,
        asker: Asker,
        tell: Callable[[bytes | Refusal], object],
        asked: Asked | None = None,
    ) -> HttpCall:
        """`given` is the input's JSON. The answer may be told before this returns."""
        broker, core = self._broker, self._core
        dispatcher = broker.dispatcher
        call = HttpCall(asker, core.name(), tell, dispatcher.refused)
        if not self._flushing:
            self._flushing = True
            core.board.round += 1  # so that a plugin that was replaced is noticed
            self._loop.call_soon(self._flush)
        try:
            refusal = dispatcher.refusal()
            if refusal is None and asked is None and tool.name in asker.plain:
                lines = tool.head + _encode(given) + b"}\n"
                if dispatcher.is_too_large(lines):
                    refusal = dispatcher.too_large("the call's input")
                else:
                    work = dispatcher.span(tool, lines, 1, None, call, call)
                    if not core.hand(work):
                        tool.runtime.submit(work, time.monotonic())
            elif refusal is None:
                refusal = self._admit(tool, given, call, asked or Asked())
        except Exception as error:  # a mistake of ours must not leave a caller waiting for ever
            broker.log.error("internal error", aid=tool.name, reason=repr(error))
            refusal = Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}")
        if refusal is not None:
            call.turn_down(refusal)
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
