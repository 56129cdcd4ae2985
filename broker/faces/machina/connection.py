"""One caller's connection: lines in, replies out, exactly one a line, in order unless they carry an id."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import msgspec

from broker import errors
from broker._native import ffi, lib
from broker.errors import Refusal
from broker.faces.machina.lines import TIMEOUT_MS, Asked, Members, problem_of, wrong_type
from broker.faces.machina.linger import linger
from broker.faces.machina.order import Order, Slot
from broker.model import Tool, Work
from broker.pool.outbox import Outbox
from broker.ticket import Call

if TYPE_CHECKING:
    from broker.faces.machina.listener import MachinaFace
    from broker.policy.idempotency import Entry
    from broker.tokens import Token

LINES_A_SCAN = 4096
LONGEST_SESSION = 256
LONG_READ = 65536  # bytes: where a line may be a long one
READS_AT_THE_END = 64  # of what is already here when the broker stops
OUTBOX_HIGH = 1024 * 1024  # a caller that does not read its replies is not read from either

# The scanner's numbers, looked up once: an attribute of `lib` costs a dictionary look-up a time.
PLAIN, BAD, CLOSE = lib.TB_PLAIN, lib.TB_BAD, lib.TB_CLOSE
ITEM, COUNT, TOOL, PROBLEM, MEMBER = lib.TB_ITEM, lib.TB_I_COUNT, lib.TB_I_TOOL, lib.TB_I_PROBLEM, lib.TB_I_MEMBER
OUT, OUT_LEN, IDS, IDS_LEN, SPANS = lib.TB_I_OUT, lib.TB_I_OUT_LEN, lib.TB_I_IDS, lib.TB_I_IDS_LEN, lib.TB_I_SPANS


class Connection:
    """A caller (it waits its turn as one) and the sink of its replies."""

    def __init__(self, face: MachinaFace, sock: socket.socket, principal: str, operator: bool) -> None:
        self.face = face
        self.principal = principal
        self._on_operators_socket = operator
        self.local = sock.family == socket.AF_UNIX
        self.authenticated = self.local or not face.door.locked()
        self._token: Token | None = None  # what it has shown
        self._core = face.core
        self._waiting = face.dispatcher.waiting
        self._loop = face.core.loop
        self._sock = sock
        self._fd = sock.fileno()
        self._framer = ffi.gc(lib.tb_framer_new(face.limits.request_bytes), lib.tb_framer_free)
        self._outbox = Outbox(self._loop, self._fd, self.abort, self._on_drained)
        self._order = Order(self._outbox)
        self._unanswered = 0
        self._unanswered_bytes = 0.0
        self._repeats: deque[tuple[Work, Entry]] = deque()  # hits that nobody has room for yet
        self._scheduled = False
        self._reading = True
        self._more = False  # the framer holds lines that have not been looked at
        self._partial = 0  # bytes of a long line that has not ended
        self._since = time.monotonic()  # the last line ended, or the next one had not begun
        self.ending = False  # no more lines will be taken
        self.closed = False
        self.set_rights()
        self._loop.add_reader(self._fd, self._on_readable)

    # --- lines in ---------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        got = lib.tb_framer_read(self._framer, self._fd)
        if got > 0:
            self._take_lines()
            if got >= LONG_READ or self._partial:
                self._weigh()
        elif got == 0:
            lib.tb_framer_end(self._framer)
            self._take_lines()
            if not self.closed:
                self._end()
        elif got not in (-11, -4):  # EAGAIN, EINTR
            self.abort()
        self._core.flush()

    def _take_lines(self) -> None:
        view = self._core.view
        limits = self.face.limits
        now = time.monotonic()
        self._core.round += 1
        while not self.ending and not self.closed:
            if lib.tb_scan(self._framer, self._table, self._core.scanned, LINES_A_SCAN, limits.depth, view):
                raise MemoryError
            count = view.count
            more = view.more
            if count:
                self._since = now
                items = ffi.unpack(view.items, count * ITEM)
                # The view's memory is shared by all: copy what outlives this call before anything else can scan.
                out, ids, lines = view.out, view.ids, view.lines
                for at in range(0, count * ITEM, ITEM):
                    kind = items[at]
                    if kind == PLAIN:
                        self._plain(items, at, out, ids, now)
                    elif kind == BAD:
                        self._bad(items, at, ids, lines)
                    elif kind == CLOSE:
                        self._end()
                    else:
                        self._one(items, at, out, ids, lines, now)
            self._more = bool(more)
            if self._choked() and not self.face.dispatcher.draining:
                self._pause()
                return
            if not more:
                return
        self._more = False

    def _weigh(self) -> None:
        """Long lines on their way count for everybody's bound: whoever passes it has to come again."""
        core = self._core
        pending = lib.tb_framer_pending(self._framer)
        core.partial_bytes += pending - self._partial
        self._partial = pending
        bound = self.face.limits.queue_bytes
        if pending >= LONG_READ and core.partial_bytes > bound:
            max(self.face.connections, key=lambda one: one._partial)._drop_line(bound)

    def _drop_line(self, bound: int) -> None:
        """It holds the most of what is on its way: it has to come again."""
        if self.ending or self.closed:
            return
        text = f"lines of {bound} bytes in all are on their way, and this one holds the most (limits.queue_bytes)"
        self._refuse_line(Refusal(errors.OVERLOADED, text, retry_after=1))
        lib.tb_framer_drop(self._framer)
        self._core.partial_bytes -= self._partial
        self._partial = 0

    def _refuse_line(self, refusal: Refusal) -> None:
        """The line that is on its way is not waited for: this is its answer."""
        self._count(1, 0)
        self.answer(None, refusal.line(None))

    def look(self, now: float) -> None:
        """From time to time: a line must end, a caller must say who it is, and what it showed must still be good."""
        if self.ending or self.closed:
            return
        if self._token is not None and not self.face.door.takes(self._token):
            self._refuse_line(Refusal(errors.FORBIDDEN, f"the token of {self.principal} has been revoked"))
            self._end()
        elif not self._reading or (self.authenticated and not lib.tb_framer_pending(self._framer)):
            self._since = now
        elif now - self._since > self.face.limits.line_seconds:
            what = "the line has not ended" if self.authenticated else "no token was shown"
            text = f"{what} within {self.face.limits.line_seconds:g} s (limits.line_seconds)"
            self._refuse_line(Refusal(errors.BAD_REQUEST, text))
            self._end()

    def _plain(self, items: list[int], at: int, out: Any, ids: Any, now: float) -> None:
        face = self.face
        count = items[at + COUNT]
        tool = face.registry[items[at + TOOL]]
        lines = ffi.buffer(out + items[at + OUT], items[at + OUT_LEN])[:]
        ids_len = items[at + IDS_LEN]
        own_ids = ffi.buffer(ids + items[at + IDS], ids_len)[:] if ids_len else None
        work = face.dispatcher.span(tool, lines, count, own_ids, self, self)
        if own_ids is None:
            work.slot = self._order.place(count)
        self._count(count, len(lines) + ids_len)
        refusal = self._gate()
        if refusal is None:
            tool.runtime.submit(work, now)
        else:
            self.refuse(work, refusal)

    def _one(self, items: list[int], at: int, out: Any, ids: Any, lines: Any, now: float) -> None:
        """A line that is more than plain: a call for the policy, or a word to the broker itself."""
        ids_len = items[at + IDS_LEN]
        own_ids = ffi.buffer(ids + items[at + IDS], ids_len)[:] if ids_len else None
        line = ffi.buffer(out + items[at + OUT], items[at + OUT_LEN])[:]
        slot = None if own_ids is not None else self._order.place(1)
        self._count(1, len(line) + ids_len)
        members = Members(items, at + SPANS, lines)
        index = items[at + TOOL]
        if index < 0:
            aid = members.text(lib.TB_AID)
            if aid == "_auth":
                self._settle(slot, _reply(self.face.control.authenticate(self, line), aid, own_ids), 1)
                return
            if aid.startswith("_"):
                self._loop.create_task(self._control(aid, line, own_ids, slot))
                return
            refusal: Refusal | None = self._gate()
            if refusal is None and (refreshed := self.face.refreshed()) is not None:
                asked = members.asked()
                self._loop.create_task(self._try_again(refreshed, aid, line, own_ids, asked, slot))
                return
            refusal = refusal or Refusal(errors.NOT_FOUND, f"tool not found: {aid}")
        else:
            tool = self.face.registry[index]
            aid = tool.name
            try:
                refusal = self._gate() or self.face.dispatcher.rights(tool, self)
                refusal = refusal or self._admit(tool, line, own_ids, members.asked(), slot, now)
            except Exception as error:  # a mistake of ours must not leave a caller waiting for ever
                self.face.log.error("internal error", aid=aid, reason=repr(error))
                refusal = Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}")
        if refusal is not None:
            self._settle(slot, refusal.line(aid, own_ids), 1)

    def _admit(
        self, tool: Tool, line: bytes, ids: bytes | None, asked: Asked, slot: Slot | None, now: float
    ) -> Refusal | None:
        dispatcher = self.face.dispatcher
        milliseconds = None
        if asked.timeout is not None:
            if not asked.timeout.isdigit() or not asked.timeout.strip(b"0"):
                return wrong_type(TIMEOUT_MS)
            milliseconds = int(asked.timeout[-12:]) if len(asked.timeout) <= 12 else 10**12
        if ids is None and asked.stream:
            return Refusal(errors.BAD_REQUEST, '"stream":true needs an "id", so that events can be told from replies')
        call = Call(tool, line, ids, dispatcher.timeout(tool, milliseconds), slot)
        call.key = asked.key
        call.lease = asked.lease
        call.ds_state = asked.ds_state
        if call.ds_state is not None:
            if len(asked.session) > LONGEST_SESSION:
                return Refusal(errors.BAD_REQUEST, f'"session" may have {LONGEST_SESSION} characters')
            call.session = (self.principal, asked.session) if asked.session else self
        return dispatcher.admit(call, self, self, now)

    async def _try_again(
        self, refreshed: Awaitable[object], aid: str, line: bytes, ids: bytes | None, asked: Asked, slot: Slot | None
    ) -> None:
        """Nobody knows the tool, but a plugin has just been replaced: perhaps the new one has it."""
        await refreshed
        tool = self.face.registry.get(aid)
        if self.closed:
            return
        if tool is None:
            refusal: Refusal | None = Refusal(errors.NOT_FOUND, f"tool not found: {aid}")
        else:
            refusal = self._gate() or self.face.dispatcher.rights(tool, self)
            refusal = refusal or self._admit(tool, line, ids, asked, slot, time.monotonic())
        if refusal is not None:
            self._settle(slot, refusal.line(aid, ids), 1)
        self._core.flush()

    async def _control(self, aid: str, line: bytes, ids: bytes | None, slot: Slot | None) -> None:
        try:
            result = await self.face.control(self, aid, line)
        except Exception as error:  # whatever it is, the line gets its answer
            self.face.log.error("internal error", aid=aid, reason=repr(error))
            result = Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}")
        self._settle(slot, _reply(result, aid, ids), 1)
        self._core.flush()

    def _gate(self) -> Refusal | None:
        if not self.authenticated:
            return self.unauthenticated()
        return self.face.dispatcher.refusal()

    def unauthenticated(self) -> Refusal:
        return Refusal(errors.FORBIDDEN, 'the first line must be {"aid":"_auth","token":"…"}')

    def become(self, token: Token) -> None:
        """The caller has shown who it is."""
        self._token = token
        self.principal = f"token:{token.name}"
        self.authenticated = True
        self.set_rights()

    def set_rights(self) -> None:
        """Whoever has not said who it is has each line looked at. Callers on the Unix socket are never operators."""
        self.rights = self.face.rights.of(self.principal)
        self.operator = self._on_operators_socket or (self.rights.operator and not self.local)
        registry = self.face.registry
        self._table = registry.table_of(self.rights) if self.authenticated else registry.strict

    def end_after_replies(self) -> None:
        """No more lines are taken from this caller."""
        self._end()

    def _bad(self, items: list[int], at: int, ids: Any, lines: Any) -> None:
        ids_len = items[at + IDS_LEN]
        own_ids = ffi.buffer(ids + items[at + IDS], ids_len)[:] if ids_len else None
        refusal = problem_of(items[at + PROBLEM], items[at + MEMBER], self.face.limits)
        aid = Members(items, at + SPANS, lines).text(lib.TB_AID) or None
        self._count(1, 0)
        self.answer(own_ids, refusal.line(aid, own_ids))

    # --- replies out ------------------------------------------------------------------------------------------------

    def _count(self, calls: int, size: int) -> None:
        self._unanswered += calls
        self._unanswered_bytes += size

    def answer(self, ids: bytes | None, line: bytes) -> None:
        """The reply to a line that went no further than this."""
        self._settle(None if ids is not None else self._order.place(1), line, 1)

    def deliver(self, work: Work, lines: bytes, count: int) -> None:
        self._settle(work.slot, lines, count)

    def repeat(self, work: Work, entry: Entry) -> None:
        """Hits cost nothing to ask for, so they are written only as fast as they are read."""
        if not self._repeats and not self._stuffed(work):
            self._settle(work.slot, entry.hit(work.ids), 1)
        else:
            self._repeats.append((work, entry))
            self._unanswered_bytes += entry.size

    def _repeat_more(self) -> None:
        """What fits now: in order, but the one that all others wait for goes first."""
        repeats = self._repeats
        while repeats and not self.closed:
            at = 0
            if self._stuffed(repeats[0][0]):
                first = self._order.first
                at = next((i for i, (work, _) in enumerate(repeats) if first is not None and work.slot is first), -1)
                if at < 0 or self._stuffed(repeats[at][0]):
                    return
            work, entry = repeats[at]
            del repeats[at]
            self._settle(work.slot, entry.hit(work.ids), 1)

    def refuse(self, work: Work, refusal: Refusal) -> None:
        if self.closed:
            return
        if work.ids is None:
            lines = refusal.line(work.tool.name) * work.count
        else:
            work.trim()
            lines = b"".join(refusal.line(work.tool.name, one + b"\n") for one in work.ids.split(b"\n")[:-1])
        self._settle(work.slot, lines, work.count)

    def _settle(self, slot: Slot | None, lines: bytes, count: int) -> None:
        if self.closed:
            return
        self._unanswered_bytes -= self._unanswered_bytes * count / self._unanswered
        self._unanswered -= count
        self._order.put(slot, lines, count)
        if not self._scheduled:
            self._scheduled = True
            self._core.dirty.append(self)

    def flush(self) -> None:
        self._scheduled = False
        if self.closed:
            return
        self._outbox.flush()
        if self._repeats:
            self._repeat_more()
            self._outbox.flush()
        self._turn()

    # --- flow -------------------------------------------------------------------------------------------------------

    def _choked(self) -> bool:
        limits = self.face.limits
        return (
            self._unanswered >= limits.connection_calls
            or self._unanswered_bytes >= limits.connection_bytes
            or self._outbox.size + self._order.held > OUTBOX_HIGH
            or self._fills_the_queue(limits.queue_bytes)
        )

    def _fills_the_queue(self, most: int) -> bool:
        """The queue of all is full, and more than a fair share of it is this caller's."""
        if self._core.queued_bytes + self._waiting.size < most:
            return False
        return self._unanswered > 0 and self._unanswered_bytes * len(self.face.connections) >= most

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _turn(self) -> None:
        """After each round: read on, stop reading, or leave."""
        if self.closed:
            return
        if self.ending:
            if not self._unanswered and not self._outbox.size:
                self.close()
        elif self.face.dispatcher.draining and not self._unanswered and not self._outbox.size:
            self._take_what_is_here()  # one last look, so that nobody is left without a word
            self._end()
        elif self._choked() and not self.face.dispatcher.draining:
            self._pause()
        elif not self._reading:
            if self._more:
                self._more = False
                self._loop.call_soon(self._resume)
            else:
                self._reading = True
                self._loop.add_reader(self._fd, self._on_readable)

    def _resume(self) -> None:
        if not self.closed:
            self._take_lines()
            self._turn()
            self._core.flush()

    def _on_drained(self) -> None:
        if self._repeats and not self._scheduled:
            self._scheduled = True
            self._core.dirty.append(self)
        self._turn()
        self.face.on_room()

    # --- the end ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """The caller sends no more: what is outstanding is answered, then the connection ends."""
        if self.ending or self.closed:
            return
        self.ending = True
        self._pause()
        if self.vanished():
            self.abort()
        else:
            self._loop.call_soon(self._turn_if_open)

    def _turn_if_open(self) -> None:
        if not self.closed:
            self._outbox.flush()
            if not self.closed:
                self._turn()

    def vanished(self) -> bool:
        """The caller has closed both directions: nobody reads what we would write."""
        poller = select.poll()
        poller.register(self._fd, 0)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poller.poll(0))

    def drain(self) -> None:
        """The broker stops: whatever is or comes here is refused, until all that ran is answered."""
        self._take_what_is_here()
        self._loop.call_soon(self._turn_if_open)

    def _take_what_is_here(self) -> None:
        self._take_lines()
        for _ in range(READS_AT_THE_END):
            if self.ending or self.closed:
                return
            got = lib.tb_framer_read(self._framer, self._fd)
            if got == 0:
                self._end()
            if got <= 0:
                return
            self._take_lines()

    def gone(self) -> bool:
        return self.closed

    def took(self, ticket: Any) -> None:
        """Nothing interrupts us in the middle of a call: it is settled when its answer comes."""

    def deaf(self) -> bool:
        """Nothing is read from it now, so that its end would not be noticed."""
        return not self._reading

    def full(self, work: Work) -> bool:
        return self._stuffed(work) and not (work.ticket is not None and work.ticket.urgent)

    def _stuffed(self, work: Work) -> bool:
        """Replies that wait for one in front of them hold back everybody's work but that one's."""
        if self._outbox.size > OUTBOX_HIGH:
            return True
        return self._order.held > OUTBOX_HIGH and work.slot is not None and work.slot is not self._order.first

    def abort(self) -> None:
        """The caller has hung up: what it has waiting is dropped, what runs is finished for nobody."""
        if not self.closed:
            self.close()

    def close(self) -> None:
        self.closed = True
        self._pause()
        self._outbox.close()
        self._repeats.clear()
        self._core.partial_bytes -= self._partial
        self._partial = 0
        self._order.clear()
        self._loop.call_soon(ffi.release, self._framer)  # not now: the lines at hand may be in it
        if not self.ending or (self.local and not self.face.dispatcher.draining):
            self._sock.close()
        else:
            linger(self._sock, self._loop)
        self.face.hung_up(self)


def _reply(result: dict[str, Any] | Refusal, aid: str, ids: bytes | None) -> bytes:
    """The broker's own answer as a reply line."""
    if isinstance(result, Refusal):
        return result.line(aid, ids)
    encoded = msgspec.json.encode({"ok": True, "status": "OK", **result})
    return (b'{"id":' + ids[:-1] + b"," + encoded[1:] if ids else encoded) + b"\n"
