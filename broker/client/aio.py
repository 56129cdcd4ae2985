"""An asyncio client (uvloop or not): one connection, any number of calls under way; a cancelled call is forgotten."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterable
from typing import Any

import msgspec

from broker.client import queued
from broker.client.failures import CallFailed, Forbidden
from broker.client.reply import Reply, decode, failed, read
from broker.client.request import Address, encode, find, input_text, named, request_line, says_who, words
from broker.client.streaming import EventStream
from broker.client.sync import LONGEST_CALL, PATIENCE_SECONDS, Lost, peer_of
from broker.client.sync import lost_call as _failure


class _Numbered(msgspec.Struct):
    id: int | None = None
    ok: bool | None = None  # events have none


_numbered = msgspec.json.Decoder(_Numbered)


class _Connection(asyncio.Protocol):
    """Lines out, replies in, matched by their ids."""

    def __init__(self) -> None:
        self.pending: dict[int, asyncio.Future[bytes]] = {}
        self.lost: Lost | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._searched = 0
        self._room = asyncio.Event()
        self._room.set()
        self._numbers = itertools.count(1)
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\n", self._searched)) >= 0:
            line = bytes(self._buffer[: end + 1])
            del self._buffer[: end + 1]
            self._searched = 0
            self._take(line)
        self._searched = len(self._buffer)

    def _take(self, line: bytes) -> None:
        numbered = _numbered.decode(line)
        if numbered.id is None:  # a word of farewell: it says why
            self.lost = Lost(decode(line).error or "the broker has closed the connection", sent=self._answered)
            return
        self._answered = True
        future = self.pending.pop(numbered.id, None)
        if future is not None and not future.done():
            future.set_result(line)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.lost = self.lost or Lost("the connection to the broker was lost", sent=True)
        self._room.set()
        for future in self.pending.values():
            if not future.done():
                future.set_exception(self.lost)
        self.pending.clear()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def number(self) -> int:
        return next(self._numbers)

    async def ask(self, number: int, line: bytes, seconds: float) -> bytes:
        sent = False
        try:
            async with asyncio.timeout(seconds):
                await self._room.wait()
                if self.lost is not None or self._transport is None:
                    raise Lost(str(self.lost), sent=False)
                future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
                self.pending[number] = future
                self._transport.write(line)
                sent = True
                return await future
        except TimeoutError:
            raise Lost(f"the broker gave no answer within {seconds:g} s", sent=sent, late=True) from None
        finally:
            self.pending.pop(number, None)

    def peer(self) -> int:
        return peer_of(self._transport.get_extra_info("socket")) if self._transport is not None else 0

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class AsyncClient:
    """Calls tools through a broker, from a coroutine.

    >>> import asyncio
    >>> from broker import AsyncClient
    >>> async def main():
    ...     async with AsyncClient(address) as tools:
    ...         return (await tools.call("AID.DEMO.ECHO.v1", {"hello": "world"})).output
    >>> asyncio.run(main())
    {'hello': 'world'}

    A call whose connection is lost is repeated only if nothing was sent, or if it has an idempotency key and the same
    broker is still there. One that is cancelled may have run; its reply reaches nobody.
    """

    def __init__(self, address: Address | None = None, *, token: str = "", connect_timeout: float = 5.0) -> None:
        self.address = find(address)
        self._token = token
        self._seconds = connect_timeout
        self._session = secrets.token_hex(8)
        self._connection: _Connection | None = None
        self._connecting: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            await asyncio.sleep(0)

    async def call(
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
        text = input_text(inputs, input_json)
        seconds = (LONGEST_CALL if timeout is None else timeout) + PATIENCE_SECONDS

        async def once(connection: _Connection) -> bytes:
            number = connection.number()
            line = request_line(
                aid,
                text,
                timeout=timeout,
                idempotency_key=idempotency_key,
                lease_token=lease_token,
                ds_state=ds_state,
                session=session or (self._session if ds_state is not None else ""),
                number=number,
            )
            return await connection.ask(number, line, seconds)

        return read(aid, await self._persist(aid, once, keyed=bool(idempotency_key)))

    def stream(
        self,
        aid: str,
        inputs: Any = None,
        *,
        input_json: str | None = None,
        timeout: float | None = None,
        idempotency_key: str = "",
        lease_token: str = "",
        session: str = "",
    ) -> EventStream:
        """Runs a tool and tells of it while it runs: `async for event in client.stream(…)`, then `.reply`.

        A repeated key tells no events again: only the reply.
        """
        line = request_line(
            aid,
            input_text(inputs, input_json),
            timeout=timeout,
            idempotency_key=idempotency_key,
            lease_token=lease_token,
            session=session,
            number=1,
            stream=True,
        )
        seconds = (LONGEST_CALL if timeout is None else timeout) + PATIENCE_SECONDS
        return EventStream(aid, line, seconds, self._open_stream, _failure)

    async def _open_stream(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(self._seconds):
                if isinstance(self.address, str):
                    reader, writer = await asyncio.open_unix_connection(self.address)
                else:
                    reader, writer = await asyncio.open_connection(*self.address)
                if self._token:
                    try:
                        await self._say_who(reader, writer)
                    except BaseException:
                        writer.close()
                        raise
                return reader, writer
        except OSError as error:  # TimeoutError is one
            raise self._nobody(error) from None

    async def _say_who(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says_who(self._token))
        line = await reader.readline()
        if not line:
            raise Lost("the broker has closed the connection", sent=False)
        said = decode(line)
        if not said.ok:
            raise Forbidden("_auth", said.error or "")

    def _nobody(self, error: OSError) -> Lost:
        reason = error.strerror or str(error) or f"nothing within {self._seconds:g} s"
        return Lost(f"no broker answers at {words(self.address)}: {reason}; is `broker serve` running?", sent=False)

    async def call_many(self, calls: Iterable[tuple[str, Any]]) -> list[Reply | CallFailed]:
        """Runs (aid, inputs) pairs, all under way at once; results are in their order, failures among them."""

        async def one(aid: str, inputs: Any) -> Reply | CallFailed:
            try:
                return await self.call(aid, inputs)
            except CallFailed as failure:
                return failure

        return list(await asyncio.gather(*(one(aid, inputs) for aid, inputs in calls)))

    async def enqueue(
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
        call_id, text = id or queued.new_id(), input_text(inputs, input_json)

        async def once(connection: _Connection) -> bytes:
            number = connection.number()
            line = queued.enqueue_line(
                call_id,
                aid,
                text,
                number,
                timeout=timeout,
                idempotency_key=idempotency_key,
                lease_token=lease_token,
                session=session,
            )
            return await connection.ask(number, line, PATIENCE_SECONDS)

        return queued.enqueued(aid, await self._persist(aid, once, keyed=True))

    async def result(self, id: str, *, wait: float = 0.0) -> Reply | None:
        """What has come of a queued call, waiting so many seconds for it; none: it waits still, or runs. A call that
        failed, or is dead, raises its `CallFailed`."""
        while True:
            seconds = min(wait, queued.LONGEST_WAIT)

            async def once(connection: _Connection, seconds: float = seconds) -> bytes:
                number = connection.number()
                line = queued.result_line(id, seconds, number)
                return await connection.ask(number, line, seconds + PATIENCE_SECONDS)

            reply = queued.result(await self._persist("_result", once, keyed=True))
            wait -= seconds
            if reply is not None or wait <= 0:
                return reply

    async def tools(self) -> list[dict[str, Any]]:
        """What can be called, and what is known of it."""
        tools: list[dict[str, Any]] = (await self._word("_tools"))["tools"]
        return tools

    async def state(self, session: str) -> dict[str, Any]:
        """What event tools have made of this session."""
        state: dict[str, Any] = (await self._word("_state", session=named(session)))["state"]
        return state

    async def clear_state(self, session: str) -> bool:
        """It begins anew. Was there a state?"""
        return bool((await self._word("_state.clear", session=named(session)))["cleared"])

    async def _word(self, aid: str, **members: str) -> dict[str, Any]:
        """A question to the broker itself."""

        async def once(connection: _Connection) -> bytes:
            number = connection.number()
            line = encode({"id": number, "aid": aid, **members}) + b"\n"
            return await connection.ask(number, line, PATIENCE_SECONDS)

        line = await self._persist(aid, once, keyed=True)
        wire = decode(line)
        if not wire.succeeded():
            raise failed(aid, wire, line)
        reply: dict[str, Any] = msgspec.json.decode(line)
        return reply

    async def _persist(self, aid: str, once: Any, *, keyed: bool) -> bytes:
        first: Lost | None = None  # that may have run
        peer = 0  # who has it
        while True:
            fresh = self._connection is None
            connection = None
            try:
                connection = await self._connected()
                if first is not None and connection.peer() != peer:
                    raise first  # another broker does not know the key: there it would run again
                known = connection.peer()
                line: bytes = await once(connection)
                return line
            except Lost as lost:
                if not lost.late and connection is self._connection:
                    self._connection = None
                    if connection is not None and connection.lost is None:
                        connection.close()
                if not lost.sent and not fresh and connection is not None and not lost.late:
                    continue  # the connection had ended: nothing has happened
                if not keyed or lost.late or first is not None or not lost.sent:
                    raise _failure(aid, first or lost) from None
                first, peer = lost, known

    async def _connected(self) -> _Connection:
        if self._closed:
            raise Lost("this AsyncClient has been closed", sent=False)
        if self._connecting is None or self._loop is not asyncio.get_running_loop():  # a loop of before has ended
            self._loop = asyncio.get_running_loop()
            self._connecting = asyncio.Lock()
            self._connection = None
        async with self._connecting:
            if self._connection is None or self._connection.lost is not None:
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._seconds):
                if isinstance(self.address, str):
                    _, connection = await loop.create_unix_connection(_Connection, self.address)
                else:
                    _, connection = await loop.create_connection(_Connection, *self.address)
        except OSError as error:  # TimeoutError is one
            raise self._nobody(error) from None
        if self._token:
            try:
                await self._log_in(connection)
            except BaseException:
                connection.close()
                raise
        return connection

    async def _log_in(self, connection: _Connection) -> None:
        number = connection.number()
        line = b'{"id":%d,' % number + says_who(self._token)[1:]
        try:
            reply = decode(await connection.ask(number, line, self._seconds))
        except Lost as lost:  # of the call itself, nothing was sent
            raise Lost(str(lost), sent=False, late=lost.late) from None
        if not reply.ok:
            raise Forbidden("_auth", reply.error or "")
