"""A call that came through a face without connections of its own: who asks, and where its one answer arrives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from broker import errors
from broker.errors import Refusal
from broker.model import HUNG_UP, Place, Tool, Work
from broker.policy.rights import Rights
from broker.policy.sessions import LONGEST_NAME
from broker.ticket import Call, Mark

if TYPE_CHECKING:
    from broker.policy.idempotency import Entry
    from broker.server import Broker

_encode = msgspec.json.Encoder().encode


MAY_HAVE_RUN = {kind.code: kind for kind in (errors.TIMEOUT, errors.CRASH, errors.BAD_REPLY, errors.REPLY_TOO_LARGE)}


class Said(msgspec.Struct):
    """A reply line, as far as it matters to those who are not told all of it."""

    ok: bool = False
    status: str | None = None
    output_json: str = "null"
    error: str | None = ""
    type: str | None = ""  # of a refusal
    code: str | None = ""  # a tool's own word for its error, where it has one
    ds_state: msgspec.Raw = msgspec.Raw(b"")
    idempotent_hit: bool = False

    def failed(self) -> bool:
        """`status` is read first, `ok` where it is missing."""
        return not self.ok if self.status is None else self.status != "OK"


_said = msgspec.json.Decoder(Said)


def understood(tool: Tool, answer: bytes | Refusal) -> Said | Refusal:
    """What a call has come to. A refusal that is kept under a key comes back as a line."""
    if isinstance(answer, Refusal):
        return answer
    try:
        said = _said.decode(answer)
    except msgspec.DecodeError as error:
        return Refusal(errors.BAD_REPLY, f"{tool.name}: its reply cannot be understood: {error}")
    kind = MAY_HAVE_RUN.get(said.type or "") if said.idempotent_hit and said.failed() else None
    return Refusal(kind, said.error or "", output_json=said.output_json) if kind is not None else said


class Asker(NamedTuple):
    """Who it is, and what it may do."""

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
    request: str = ""
    listener: Listener | None = None
    proof: str = ""  # that another broker of the cluster has taken the lease for this call
    options: dict[str, Any] | None = None  # of the tool, for this call
    secret: bool = False  # values of variables are in its input: its answer must not show them
    mark: Mark | None = None  # where it is written that it has begun


class Listener(Protocol):
    """Somebody who wants to hear of a call while it runs."""

    def hear(self, members: bytes) -> None:
        """An event, as members of an object."""

    def behind(self) -> bool:
        """What was said before has not been read."""


NOTHING = Asked()


class FaceCall:
    """One call's caller (nobody else has its number) and sink. Its answer, a reply line or a refusal, is told once."""

    __slots__ = ("_home", "_left", "_tell", "face", "listener", "number", "principal", "stateful")

    line: Any = None

    @property
    def turns(self) -> str:
        """Each call is a caller of its own, but one principal's flood is one flood."""
        return self.principal

    def __init__(self, asker: Asker, number: int, tell: Callable[[bytes | Refusal], object], home: Caller) -> None:
        self.face = home.face
        self.principal = asker.principal
        self.number = number
        self._tell: Callable[[bytes | Refusal], object] | None = tell
        self._left = False
        self.stateful = False  # it is a session of its own
        self.listener: Listener | None = None
        self._home = home

    @property
    def rights(self) -> Rights:
        """As they are now: they may change while it waits."""
        return self._home.rights_of(self.principal)

    def settle(self, answer: bytes | Refusal) -> None:
        tell, self._tell = self._tell, None
        if self.stateful:  # nobody can ask for it again, and others' are kept
            self._home.end_session(self)
        if tell is not None:
            tell(answer)

    def turn_down(self, refusal: Refusal) -> None:
        if self._tell is not None:
            self._home.refused[refusal.kind.code] += 1
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

    def tell(self, work: Work, members: bytes) -> None:  # noqa: ARG002
        if self.listener is not None and not self._left:
            self.listener.hear(members)

    def behind(self) -> bool:
        return self.listener is not None and not self._left and self.listener.behind()

    def repeat(self, work: Work, entry: Entry) -> None:  # noqa: ARG002
        self.settle(entry.hit(None))

    def refuse(self, work: Work, refusal: Refusal) -> None:  # noqa: ARG002
        self.turn_down(refusal)

    def leave(self) -> None:
        """Nobody waits any more: what has not begun is dropped, what runs is finished for nobody."""
        self._left = True
        self.settle(HUNG_UP)


class Caller:
    """Brings the calls of a face to the dispatcher."""

    def __init__(self, broker: Broker, face: str) -> None:
        self.face = face
        self._broker = broker
        self._core = broker.core
        self._loop = broker.core.loop
        self._flushing = False
        self.refused: Counter[str] = broker.dispatcher.refused  # of all calls, by code

    def rights_of(self, principal: str) -> Rights:
        return self._broker.face.rights.of(principal)

    def end_session(self, call: FaceCall) -> None:
        self._broker.dispatcher.sessions.drop(call)

    def begin(
        self,
        tool: Tool,
        given: str,
        asker: Asker,
        tell: Callable[[bytes | Refusal], object],
        asked: Asked | None = None,
    ) -> FaceCall:
        """`given` is the input's JSON. The answer may be told before this returns."""
        if asked is None and tool.name in asker.plain:
            return self._begin(
                tool, asker, tell, lambda call: self._hand(tool, tool.head + _encode(given) + b"}\n", call)
            )
        asked = asked or Asked()
        if asked.ds_state is None:
            lines = tool.head + _encode(given) + b"}\n"
        else:
            lines = b'{"aid":' + _encode(tool.name) + b',"input_json":' + _encode(given) + b"}\n"
        return self.begin_line(tool, lines, asker, tell, asked)

    def begin_line(
        self, tool: Tool, lines: bytes, asker: Asker, tell: Callable[[bytes | Refusal], object], asked: Asked
    ) -> FaceCall:
        """`lines` is what the toolhost reads, without `ds_state` where it is asked for."""
        if asked == NOTHING and tool.name in asker.plain:
            return self._begin(tool, asker, tell, lambda call: self._hand(tool, lines, call))
        return self._begin(tool, asker, tell, lambda call: self._admit(tool, lines, call, asked))

    def _begin(
        self,
        tool: Tool,
        asker: Asker,
        tell: Callable[[bytes | Refusal], object],
        admit: Callable[[FaceCall], Refusal | None],
    ) -> FaceCall:
        broker, core = self._broker, self._core
        call = FaceCall(asker, core.name(), tell, self)
        if not self._flushing:
            self._flushing = True
            core.board.round += 1  # so that a plugin that was replaced is noticed
            self._loop.call_soon(self._flush)
        try:
            refusal = broker.dispatcher.refusal() or admit(call)
        except Exception as error:  # a mistake of ours must not leave a caller waiting for ever
            broker.log.error("internal error", aid=tool.name, reason=repr(error))
            refusal = Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}")
        if refusal is not None:
            call.turn_down(refusal)
        return call

    def _hand(self, tool: Tool, lines: bytes, call: FaceCall) -> Refusal | None:
        """A plain call, that needs no look."""
        dispatcher = self._broker.dispatcher
        if dispatcher.is_too_large(lines):
            return dispatcher.too_large("the call's input")
        work = dispatcher.span(tool, lines, 1, None, call, call)
        if not self._core.hand(work):
            tool.runtime.submit(work, time.monotonic())
        return None

    def _admit(self, tool: Tool, lines: bytes, caller: FaceCall, asked: Asked) -> Refusal | None:
        dispatcher = self._broker.dispatcher
        if len(asked.session) > LONGEST_NAME:
            return Refusal(errors.BAD_REQUEST, f"the name of a session may have {LONGEST_NAME} characters")
        call = Call(tool, lines, None, dispatcher.timeout(tool, asked.timeout_ms))
        call.key, call.lease, call.ds_state, call.job = asked.key, asked.lease, asked.ds_state, asked.place
        call.proof, call.options, call.secret = asked.proof, asked.options, asked.secret
        call.mark = asked.mark
        call.request, call.stream, caller.listener = asked.request, asked.listener is not None, asked.listener
        if asked.session:
            call.session = (caller.principal, asked.session)
        elif asked.ds_state is not None:
            call.session, caller.stateful = caller, True
        return dispatcher.admit(call, caller, caller, time.monotonic())

    def _flush(self) -> None:
        """One write a toolhost for all calls of one turn of the loop."""
        self._flushing = False
        self._core.flush()

    def hang_up(self, call: FaceCall) -> None:
        call.leave()
        self._broker.dispatcher.hung_up(call)
        self._broker.equipment.forget(call)
        self._core.flush()
