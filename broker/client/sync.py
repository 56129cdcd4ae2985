"""A blocking client: any number of threads, each with a connection of its own while it waits; the waiting is in C."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from broker._native import ffi, lib
from broker.client import queued
from broker.client.failures import CallFailed, Forbidden, Timeout, Unavailable
from broker.client.reply import Reply, failed, read
from broker.client.reply import decode as decode_reply
from broker.client.request import Address, encode, find, input_text, named, request_line, says_who, words

LONGEST_REPLY = 64 * 1024 * 1024
DEPTH = 1024
LINES_AT_ONCE = 256
PATIENCE_SECONDS = 40.0  # beyond the call's own time, for waiting in the broker's queue
LONGEST_CALL = 300.0

DONE, LATE, INTERRUPTED = lib.TB_TALK_DONE, lib.TB_TALK_LATE, lib.TB_TALK_INTERRUPTED
GONE, UNASKED = lib.TB_TALK_GONE, lib.TB_TALK_UNASKED

_alive: weakref.WeakSet[Client] = weakref.WeakSet()


class Lost(Exception):
    """The connection ended; `sent` says whether the broker may have seen the lines."""

    def __init__(self, reason: str, *, sent: bool, late: bool = False) -> None:
        super().__init__(reason)
        self.sent = sent
        self.late = late


class _Connection:
    def __init__(self, address: Address, token: str, seconds: float) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        try:
            if family == socket.AF_UNIX:
                self._socket = socket.socket(family, socket.SOCK_STREAM)
                self._socket.settimeout(seconds)
                self._socket.connect(address)
            else:
                self._socket = socket.create_connection(address, seconds)  # type: ignore[arg-type]
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            reason = error.strerror or str(error)
            raise Lost(
                f"no broker answers at {words(address)}: {reason}; is `broker serve` running?", sent=False
            ) from None
        self.peer = peer_of(self._socket)
        self._socket.setblocking(False)
        fd = self._socket.fileno()
        peer = ffi.new("tb_peer *")
        peer[0] = {
            "in": fd,
            "out": fd,
            "err": -1,
            "death": -1,
            "cap": LONGEST_REPLY,
            "max_depth": DEPTH,
            "file": {"watch": -1},
        }
        talk = lib.tb_talk_new(peer)
        if talk == ffi.NULL:
            raise MemoryError
        self._talk = ffi.gc(talk, lib.tb_talk_free)
        self._taken = lib.tb_talk_taken(talk)
        if token:
            reply = decode_reply(self.ask(says_who(token), 1, seconds)[0])
            if not reply.ok:
                raise Forbidden("_auth", reply.error or "")

    def ask(self, lines: bytes, count: int, seconds: float) -> list[bytes]:
        """As many reply lines as there were requests."""
        verdict = lib.tb_talk_say(self._talk, lines, len(lines), count, b"", 0, seconds)
        while verdict == INTERRUPTED:
            verdict = lib.tb_talk_wait(self._talk)
        if verdict == DONE:
            return self.replies()
        if verdict == UNASKED:  # a word of farewell: it says why
            lib.tb_talk_wait(self._talk)
            raise Lost(self._farewell(), sent=False)
        if verdict == GONE:
            raise Lost("the broker has closed the connection", sent=False)
        if verdict == LATE:
            raise Lost(f"the broker gave no answer within {seconds:g} s", sent=True, late=True)
        raise Lost("the connection to the broker was lost", sent=True)

    def replies(self) -> list[bytes]:
        data: bytes = ffi.buffer(self._taken.data, self._taken.len)[:]
        return data.split(b"\n")[:-1]

    def _farewell(self) -> str:
        lines = self.replies()
        return (decode_reply(lines[0]).error if lines else "") or "the broker has closed the connection"

    def close(self) -> None:
        self._socket.close()


def peer_of(sock: Any) -> int:
    """The process at the other end of a Unix socket; 0 where that cannot be told."""
    if sock.family != socket.AF_UNIX:
        return 0
    pid, _, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


class Client:
    """Calls tools through a broker. Safe to share between threads; after a fork the child has its own connections.

    >>> from broker import Client
    >>> with Client(address) as tools:
    ...     tools.call("AID.DEMO.ECHO.v1", {"hello": "world"}).output
    {'hello': 'world'}

    A call whose connection is lost is repeated only if nothing was sent, or if it has an idempotency key and the same
    broker is still there.
    """

    def __init__(self, address: Address | None = None, *, token: str = "", connect_timeout: float = 5.0) -> None:
        self.address = find(address)
        self._token = token
        self._seconds = connect_timeout
        self._session = secrets.token_hex(8)  # connections come and go; the state of this client's calls stays
        self._idle: list[_Connection] = []
        self._closed = False
        _alive.add(self)

    def close(self) -> None:
        self._closed = True
        self._forget()

    def _forget(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- calls ------------------------------------------------------------------------------------------------------

    def call(
        self,
        aid: str,
        inputs: Any = None,
        *,
        input_json: str | None = None,
        timeout: float | None = None,
        idempotency_key: str = "",
        lease_token: str = "",
        ds_state: Any = None,
        session: str = "",
    ) -> Reply:
        """Runs a tool and returns its reply; raises a `CallFailed` that says what went wrong."""
        line = request_line(
            aid,
            input_text(inputs, input_json),
            timeout=timeout,
            idempotency_key=idempotency_key,
            lease_token=lease_token,
            ds_state=ds_state,
            session=session or (self._session if ds_state is not None else ""),
        )
        return read(aid, self.answer(aid, line, timeout, keyed=bool(idempotency_key)))

    def answer(self, aid: str, line: bytes, timeout: float | None = None, *, keyed: bool = False) -> bytes:
        """The reply line to a request line."""
        seconds = (LONGEST_CALL if timeout is None else timeout) + PATIENCE_SECONDS
        try:
            return self._ask(line, 1, seconds, keyed=keyed)[0]
        except Lost as lost:
            raise lost_call(aid, lost) from None

    def call_many(self, calls: Iterable[tuple[str, Any]]) -> list[Reply | CallFailed]:
        """Runs (aid, inputs) pairs, many under way at once; results are in their order, failures among them."""
        pending = [(aid, request_line(aid, input_text(inputs))) for aid, inputs in calls]
        results: list[Reply | CallFailed] = []
        for at in range(0, len(pending), LINES_AT_ONCE):
            results += self._some(pending[at : at + LINES_AT_ONCE])
        return results

    def _some(self, calls: Sequence[tuple[str, bytes]]) -> list[Reply | CallFailed]:
        try:
            lines = self._ask(b"".join(line for _, line in calls), len(calls), LONGEST_CALL + PATIENCE_SECONDS)
        except Lost as lost:
            return [lost_call(aid, lost) for aid, _ in calls]
        return [_read(aid, line) for (aid, _), line in zip(calls, lines, strict=True)]

    # --- durable calls ----------------------------------------------------------------------------------------------

    def enqueue(
        self,
        aid: str,
        inputs: Any = None,
        *,
        id: str = "",
        input_json: str | None = None,
        timeout: float | None = None,
        idempotency_key: str = "",
        lease_token: str = "",
        session: str = "",
    ) -> str:
        """Queues a call: its id, once NATS has kept it. The same id is the same call, however often it is said."""
        line = queued.enqueue_line(
            id or queued.new_id(),
            aid,
            input_text(inputs, input_json),
            timeout=timeout,
            idempotency_key=idempotency_key,
            lease_token=lease_token,
            session=session,
        )
        return queued.enqueued(aid, self.answer(aid, line, 0.0, keyed=True))

    def result(self, id: str, *, wait: float = 0.0) -> Reply | None:
        """What has come of a queued call, waiting so many seconds for it; none: it waits still, or runs. A call that
        failed, or is dead, raises its `CallFailed`."""
        while True:
            seconds = min(wait, queued.LONGEST_WAIT)
            reply = queued.result(self.answer("_result", queued.result_line(id, seconds), seconds, keyed=True))
            wait -= seconds
            if reply is not None or wait <= 0:
                return reply

    def tools(self) -> list[dict[str, Any]]:
        """What can be called, and what is known of it."""
        tools: list[dict[str, Any]] = self._word("_tools")["tools"]
        return tools

    def state(self, session: str) -> dict[str, Any]:
        """What event tools have made of this session."""
        state: dict[str, Any] = self._word("_state", session=named(session))["state"]
        return state

    def clear_state(self, session: str) -> bool:
        """It begins anew. Was there a state?"""
        return bool(self._word("_state.clear", session=named(session))["cleared"])

    def _word(self, aid: str, **members: str) -> dict[str, Any]:
        """A question to the broker itself."""
        line = self.answer(aid, encode({"aid": aid, **members}) + b"\n")
        wire = decode_reply(line)
        if not wire.succeeded():
            raise failed(aid, wire, line)
        reply: dict[str, Any] = msgspec.json.decode(line)
        return reply

    # --- connections ------------------------------------------------------------------------------------------------

    def _ask(self, lines: bytes, count: int, seconds: float, *, keyed: bool = False) -> list[bytes]:
        first: Lost | None = None  # that may have run
        peer = 0  # who has it
        while True:
            fresh = not self._idle
            try:
                connection = self._connect()
            except Lost as lost:
                raise first or lost from None
            if first is not None and connection.peer != peer:
                connection.close()
                raise first  # another broker does not know the key: there it would run again
            try:
                replies = connection.ask(lines, count, seconds)
            except Lost as lost:
                connection.close()
                if not lost.sent and not fresh:
                    continue  # an idle connection had ended: nothing has happened
                if not keyed or lost.late or first is not None:
                    raise first or lost from None
                first, peer = (lost, connection.peer) if lost.sent else (None, 0)
                if first is None:
                    raise
            except BaseException:
                connection.close()
                raise
            else:
                if not self._closed:
                    self._idle.append(connection)
                return replies

    def _connect(self) -> _Connection:
        if self._closed:
            raise Lost("this Client has been closed", sent=False)
        try:
            return self._idle.pop()
        except IndexError:
            return _Connection(self.address, self._token, self._seconds)


def _read(aid: str, line: bytes) -> Reply | CallFailed:
    try:
        return read(aid, line)
    except CallFailed as failure:
        return failure


def lost_call(aid: str, lost: Lost) -> CallFailed:
    kind = Timeout if lost.late else Unavailable
    return kind(aid, f"{lost}; the call may have run" if lost.sent else str(lost), ran=lost.sent)


def _after_fork() -> None:
    for client in list(_alive):
        client._forget()


os.register_at_fork(after_in_child=_after_fork)
