"""One caller's connection: what its lines ask of the policy, and where its replies go. The bytes are the board's."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import msgspec

from broker import errors
from broker._native import ffi, lib
from broker.errors import Refusal
from broker.faces.machina.lines import SESSION, TIMEOUT_MS, Asked, Members, problem_of, wrong_type
from broker.faces.machina.linger import linger
from broker.model import MACHINA, Tool, Work
from broker.policy.sessions import LONGEST_NAME
from broker.pool.core import OUTBOX_HIGH
from broker.ticket import Call

if TYPE_CHECKING:
    from broker.faces.machina.listener import MachinaFace
    from broker.policy.idempotency import Entry
    from broker.tokens import Token

# The board's numbers, looked up once: an attribute of `lib` costs a dictionary look-up a time.
PLAIN, KEYED, CALL, BAD = lib.TB_ROW_PLAIN, lib.TB_ROW_KEYED, lib.TB_ROW_CALL, lib.TB_ROW_BAD
GONE, FINISHED, IDLE, ROOM, LONG = (
    lib.TB_ROW_GONE,
    lib.TB_ROW_FINISHED,
    lib.TB_ROW_IDLE,
    lib.TB_ROW_ROOM,
    lib.TB_ROW_LONG,
)
TOOL, COUNT, AT, VALUE, ABOUT = lib.TB_R_TOOL, lib.TB_R_COUNT, lib.TB_R_AT, lib.TB_R_VALUE, lib.TB_R_ABOUT
DATA, DATA_LEN, IDS, IDS_LEN = lib.TB_R_DATA, lib.TB_R_DATA_LEN, lib.TB_R_IDS, lib.TB_R_IDS_LEN


class Connection:
    """A caller (it waits its turn as one) and the sink of its replies."""

    turns = None

    face = MACHINA

    def __init__(self, home: MachinaFace, sock: socket.socket, principal: str, operator: bool) -> None:
        self.home = home
        self.principal = principal
        self._on_operators_socket = operator
        self.local = sock.family == socket.AF_UNIX
        self.authenticated = self.local or not home.door.locked()
        self._token: Token | None = None  # what it has shown
        self._core = home.core
        self._loop = home.core.loop
        self._sock = sock
        self._repeats: deque[tuple[Work, Entry]] = deque()  # hits that nobody has room for yet
        self.closed = False
        self.number = self._core.name()
        self.set_rights()
        self.line = lib.tb_caller_new(self._core.board, self.number, sock.fileno(), self._tools)
        if self.line == ffi.NULL:
            raise MemoryError
        self._core.peers[self.number] = self
        self._tell_who()

    # --- what the board has for us ----------------------------------------------------------------------------------

    def row(self, row: list[int], data: Any) -> None:
        what = row[0]
        if what == CALL:
            self._one(row, data)
        elif what in (PLAIN, KEYED):
            self._run(row, data)
        elif what == BAD:
            self._bad(row, data)
        elif what == ROOM:
            self._repeat_more()
            self.home.on_room()
        elif what == LONG and self._core.board.partial_bytes > self.home.limits.queue_bytes:  # still
            max(self.home.connections, key=Connection.partial)._drop_line()
        elif what == IDLE:  # one last look, so that nobody is left without a word
            lib.tb_caller_rest(self._core.board, self.line)
            self.end_after_replies()
        elif what in (GONE, FINISHED):
            self.close()

    def partial(self) -> int:
        """Bytes of a long line on its way."""
        return 0 if self.closed or self.line.ending else int(self.line.partial)

    def _drop_line(self) -> None:
        """Long lines on their way count for everybody's bound. It holds the most of them: it has to come again."""
        if not self.partial():
            return
        bound = self.home.limits.queue_bytes
        text = f"lines of {bound} bytes in all are on their way, and this one holds the most (limits.queue_bytes)"
        self._refuse_line(Refusal(errors.OVERLOADED, text, retry_after=1))
        lib.tb_caller_drop(self._core.board, self.line)

    def _refuse_line(self, refusal: Refusal) -> None:
        """The line that is on its way is not waited for: this is its answer."""
        self._turn_down(lib.tb_caller_expect(self.line, 1, 0, True), refusal, None, None)

    def look(self, now: float) -> None:
        """From time to time: a line must end, a caller must say who it is, and what it showed must still be good."""
        line = self.line
        if self.closed or line.ending:
            return
        if self._token is not None and not self.home.door.takes(self._token):
            self._refuse_line(Refusal(errors.FORBIDDEN, f"the token of {self.principal} has been revoked"))
            self.end_after_replies()
        elif not line.reading or (self.authenticated and not lib.tb_caller_pending(line)):
            line.since = now
        elif now - line.since > self.home.limits.line_seconds:
            what = "the line has not ended" if self.authenticated else "no token was shown"
            text = f"{what} within {self.home.limits.line_seconds:g} s (limits.line_seconds)"
            self._refuse_line(Refusal(errors.BAD_REQUEST, text))
            self.end_after_replies()

    # --- lines in ---------------------------------------------------------------------------------------------------

    def _run(self, row: list[int], data: Any) -> None:
        """Calls that could not pass by themselves."""
        home = self.home
        tool = self._core.tools[row[TOOL]]
        lines, ids = _texts(row, data)
        work = home.dispatcher.span(tool, lines, row[COUNT], ids, self, self)
        work.at = row[AT]
        if row[0] == KEYED:
            work.entries = list(ffi.cast("tb_entry **", data + row[VALUE])[0 : row[COUNT]])
            home.dispatcher.keyed(work)
        tool.stats.waits = 0  # the board took it to wait; its pool says whether it does
        refusal = self._gate()
        try:
            if refusal is None:
                tool.runtime.submit(work, time.monotonic())
        except Exception as error:
            refusal = self._mistake(tool.name, error)
        if refusal is not None:
            work.sink.refuse(work, refusal)

    def _one(self, row: list[int], data: Any) -> None:
        """A line that is more than plain: a call for the policy, or a word to the broker itself."""
        line, ids = _texts(row, data)
        at = row[AT]
        members = Members(row, data)
        index = row[TOOL]
        if index < 0:
            aid = members.text(lib.TB_AID)
            if aid == "_auth":
                self._put(at, _reply(self.home.control.authenticate(self, line), aid, ids), 1)
                return
            if aid.startswith("_"):
                if session := members.text(SESSION):  # the scanner has taken it out
                    line = b'{"session":' + msgspec.json.encode(session) + b"," + line[1:]
                self._loop.create_task(self._control(aid, line, ids, at))
                return
            refusal: Refusal | None = self._gate()
            if refusal is None and (refreshed := self.home.refreshed()) is not None:
                asked = members.asked()
                self._loop.create_task(self._try_again(refreshed, aid, line, ids, asked, at))
                return
            refusal = refusal or Refusal(errors.NOT_FOUND, f"tool not found: {aid}")
        else:
            tool = self._core.tools[index]
            aid = tool.name
            try:
                refusal = self._gate() or self.home.dispatcher.rights(tool, self)
                refusal = refusal or self._admit(tool, line, ids, members.asked(), at, time.monotonic())
            except Exception as error:
                refusal = self._mistake(aid, error)
        if refusal is not None:
            self._turn_down(at, refusal, aid, ids)

    def _admit(self, tool: Tool, line: bytes, ids: bytes | None, asked: Asked, at: int, now: float) -> Refusal | None:
        dispatcher = self.home.dispatcher
        milliseconds = None
        if asked.timeout is not None:
            if not asked.timeout.isdigit() or not asked.timeout.strip(b"0"):
                return wrong_type(TIMEOUT_MS)
            milliseconds = int(asked.timeout[-12:]) if len(asked.timeout) <= 12 else 10**12
        if ids is None and asked.stream:
            return Refusal(errors.BAD_REQUEST, '"stream":true needs an "id", so that events can be told from replies')
        call = Call(tool, line, ids, dispatcher.timeout(tool, milliseconds), at)
        call.key = asked.key
        call.lease = asked.lease
        call.ds_state = asked.ds_state
        call.stream, call.request = asked.stream, asked.request
        if call.ds_state is not None or tool.info.live:
            if len(asked.session) > LONGEST_NAME:
                return Refusal(errors.BAD_REQUEST, f'"session" may have {LONGEST_NAME} characters')
            call.session = (self.principal, asked.session) if asked.session else self
        return dispatcher.admit(call, self, self, now)

    async def _try_again(
        self, refreshed: Awaitable[object], aid: str, line: bytes, ids: bytes | None, asked: Asked, at: int
    ) -> None:
        """Nobody knows the tool, but a plugin has just been replaced: perhaps the new one has it."""
        await refreshed
        tool = self.home.registry.get(aid)
        if self.closed:
            return
        if tool is None:
            refusal: Refusal | None = Refusal(errors.NOT_FOUND, f"tool not found: {aid}")
        else:
            refusal = self._gate() or self.home.dispatcher.rights(tool, self)
            refusal = refusal or self._admit(tool, line, ids, asked, at, time.monotonic())
        if refusal is not None:
            self._turn_down(at, refusal, aid, ids)
        self._core.flush()

    async def _control(self, aid: str, line: bytes, ids: bytes | None, at: int) -> None:
        try:
            result = await self.home.control(self, aid, line) if self.authenticated else self.unauthenticated()
        except Exception as error:  # whatever it is, the line gets its answer
            result = self._mistake(aid, error)
        self._put(at, _reply(result, aid, ids), 1)
        self._core.flush()

    def _mistake(self, aid: str, error: Exception) -> Refusal:
        """A mistake of ours must not leave a caller waiting for ever."""
        self.home.log.error("internal error", aid=aid, reason=repr(error))
        return Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}")

    def _gate(self) -> Refusal | None:
        if not self.authenticated:
            return self.unauthenticated()
        return self.home.dispatcher.refusal()

    def unauthenticated(self) -> Refusal:
        return Refusal(errors.FORBIDDEN, 'the first line must be {"aid":"_auth","token":"…"}')

    def become(self, token: Token) -> None:
        """The caller has shown who it is."""
        self._token = token
        self.principal = f"token:{token.name}"
        self.authenticated = True
        self.set_rights()
        self._tell_who()

    def _tell_who(self) -> None:
        """Whose keys these are."""
        self._who = ffi.from_buffer(self.principal.encode())
        self.line.who, self.line.who_len = self._who, len(self._who)

    def set_rights(self) -> None:
        """Whoever has not said who it is has each line looked at. Callers on the Unix socket are never operators."""
        self.rights = self.home.rights.of(self.principal)
        self.operator = self._on_operators_socket or (self.rights.operator and not self.local)
        registry = self.home.registry
        self._tools = registry.table_of(self.rights) if self.authenticated else registry.strict
        if self.number in self._core.peers:
            lib.tb_caller_tools(self.line, self._tools)

    def end_after_replies(self) -> None:
        """No more lines are taken from this caller; what is outstanding is answered, then the connection ends."""
        lib.tb_caller_end(self._core.board, self.line)

    def _bad(self, row: list[int], data: Any) -> None:
        _, ids = _texts(row, data)
        refusal = problem_of(row[VALUE], row[ABOUT], self.home.limits)
        aid = Members(row, data).text(lib.TB_AID) or None
        self._turn_down(row[AT], refusal, aid, ids)

    # --- replies out ------------------------------------------------------------------------------------------------

    def _put(self, at: int, lines: bytes, count: int) -> None:
        """Replies leave in their turn; those without a place may overtake."""
        if not self.closed and lib.tb_caller_put(self._core.board, self.line, at, lines, len(lines), count):
            raise MemoryError

    def _turn_down(self, at: int, refusal: Refusal, aid: str | None, ids: bytes | None) -> None:
        """A line that has not become a call."""
        self.home.dispatcher.refused[refusal.kind.code] += 1
        self._put(at, refusal.line(aid, ids), 1)

    def deliver(self, work: Work, lines: bytes, count: int) -> None:
        self._put(work.at, lines, count)

    def tell(self, work: Work, members: bytes) -> None:
        """It stands between replies, and is none."""
        if work.ids is not None:
            self._put(-1, b'{"id":%b,%b}\n' % (work.ids[:-1], members), 0)

    def behind(self) -> bool:
        return not self.closed and bool(self.line.outbox > OUTBOX_HIGH)

    def repeat(self, work: Work, entry: Entry) -> None:
        """Hits cost nothing to ask for, so they are written only as fast as they are read."""
        if self.closed:
            return
        if not self._repeats and not self._stuffed(work):
            self._put(work.at, entry.hit(work.ids), 1)
        else:
            self._repeats.append((work, entry))
            self.line.unanswered_bytes += entry.size
            self.line.wants_room = True

    def _repeat_more(self) -> None:
        """What fits now: in order, but the one that all others wait for goes first."""
        repeats = self._repeats
        while repeats and not self.closed:
            at = 0
            if self._stuffed(repeats[0][0]):
                first = self.line.next_out
                at = next((i for i, (work, _) in enumerate(repeats) if work.at == first), -1)
                if at < 0 or self._stuffed(repeats[at][0]):
                    return
            work, entry = repeats[at]
            del repeats[at]
            self._put(work.at, entry.hit(work.ids), 1)
        self.line.wants_room = False

    def refuse(self, work: Work, refusal: Refusal) -> None:
        if self.closed:
            return
        self.home.dispatcher.refused[refusal.kind.code] += work.count
        if work.ids is None:
            lines = refusal.line(work.tool.name) * work.count
        else:
            lines = b"".join(refusal.line(work.tool.name, one + b"\n") for one in work.ids.split(b"\n")[:-1])
        self._put(work.at, lines, work.count)

    def gone(self) -> bool:
        return self.closed

    def took(self, ticket: Any) -> None:
        """Nothing interrupts us in the middle of a call: it is settled when its answer comes."""

    def full(self, work: Work) -> bool:
        return self._stuffed(work) and not self.home.dispatcher.urgent(work)

    def _stuffed(self, work: Work) -> bool:
        """Replies that wait for one in front of them hold back everybody's work but that one's."""
        line = self.line
        if line.outbox > OUTBOX_HIGH:
            return True
        return bool(line.held > OUTBOX_HIGH and work.at >= 0 and work.at != line.next_out)

    # --- the end ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """The broker stops: whatever is or comes here is refused, until all that ran is answered."""
        lib.tb_caller_rest(self._core.board, self.line)

    def vanished(self) -> bool:
        """Nothing is read from it now, so that its end would not be noticed; and nobody reads what we would write."""
        return not self.line.reading and bool(lib.tb_caller_vanished(self.line))

    def close(self) -> None:
        """What it has waiting is dropped, what runs is finished for nobody."""
        if self.closed:
            return
        self.closed = True
        self._core.peers.pop(self.number, None)
        self._repeats.clear()
        ending = self.line.ending
        lib.tb_caller_close(self._core.board, self.line)
        self.line = None
        if not ending or (self.local and not self.home.dispatcher.draining):
            self._sock.close()
        else:
            linger(self._sock, self._loop)
        self.home.hung_up(self)


def _texts(row: list[int], data: Any) -> tuple[bytes, bytes | None]:
    """The lines for the toolhost, and the ids of their replies."""
    lines = ffi.buffer(data + row[DATA], row[DATA_LEN])[:] if row[DATA_LEN] else b""
    ids = ffi.buffer(data + row[IDS], row[IDS_LEN])[:] if row[IDS_LEN] else None
    return lines, ids


def _reply(result: dict[str, Any] | Refusal, aid: str, ids: bytes | None) -> bytes:
    """The broker's own answer as a reply line."""
    if isinstance(result, Refusal):
        return result.line(aid, ids)
    encoded = msgspec.json.encode({"ok": True, "status": "OK", **result})
    return (b'{"id":' + ids[:-1] + b"," + encoded[1:] if ids else encoded) + b"\n"
