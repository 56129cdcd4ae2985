"""A call goes into the queue: checked, known by its id, and kept by NATS before its caller is told so."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from broker import errors
from broker.cluster.kv import Away
from broker.cluster.queue import names
from broker.cluster.queue.dead import DeadLetters
from broker.cluster.queue.names import Names
from broker.cluster.queue.records import Letter, digest_of, stored
from broker.cluster.queue.requests import Requests, with_id
from broker.cluster.queue.results import Results
from broker.cluster.queue.store import SAME_SECONDS, Store
from broker.cluster.queue.turns import Answer, Turns
from broker.errors import Refusal
from broker.faces.nats.line import Line, Reader
from broker.ticket import Call

if TYPE_CHECKING:
    from broker.control import Asker
    from broker.server import Broker

LONGEST_SESSION = 256
WATCH_SECONDS = 2  # between two looks at the queue's length


class Producer:
    def __init__(
        self,
        broker: Broker,
        names: Names,
        store: Store,
        requests: Requests,
        results: Results,
        dead: DeadLetters,
        turns: Turns,
    ) -> None:
        self._broker = broker
        self._names = names
        self._store = store
        self._requests = requests
        self._results = results
        self._dead = dead
        self._patience = broker.settings.nats.wait_seconds
        self._turns = turns
        self.kept = 0  # bytes that the queue had when it was looked at last
        self._bytes = 0  # of calls that NATS has not acknowledged yet
        self._reader = Reader(broker.registry.strict, broker.settings.limits)

    async def enqueue(self, asker: Asker, text: bytes) -> Answer:
        settings = self._broker.settings
        if self.kept + len(text) > settings.queue.bytes:
            why = f"the queue has {self.kept} bytes, and may have {settings.queue.bytes} (queue.bytes)"
            return Refusal(errors.OVERLOADED, why, retry_after=WATCH_SECONDS)
        most = settings.limits.queue_bytes
        if self._bytes and self._bytes + len(text) > most:
            why = f"calls of {most} bytes are on their way to NATS (limits.queue_bytes)"
            return Refusal(errors.OVERLOADED, why, retry_after=1)
        self._bytes += len(text)
        try:
            return await self._turns.take(lambda: self._enqueue(asker, text))
        finally:
            self._bytes -= len(text)

    async def _enqueue(self, asker: Asker, text: bytes) -> Answer:
        line, ids = self._reader.read(text, "")
        if isinstance(line, Refusal):
            return line
        given = msgspec.json.decode(ids) if ids is not None else None
        if ids is not None and not (isinstance(given, str) and names.is_id(given)):
            text_ = f'the "id" of a queued call is a string of 1 to {names.LONGEST_ID} characters'
            return Refusal(errors.BAD_REQUEST, text_)
        refusal = self._problem(asker, line)
        if refusal is not None:
            return refusal
        call_id = given or secrets.token_hex(16)
        letter = Letter(call_id, line.aid, asker.principal, digest_of(line), text if given else with_id(text, call_id))
        try:
            return await self._send(letter, known=given is not None)
        except Away as error:
            again = "it may be in the queue all the same: enqueue it again with this id, and it is one call"
            text_ = f"{error}; {again if error.heard else 'the call is not queued'}"
            return Refusal(errors.UNAVAILABLE, text_, retry_after=1, call_id=call_id)

    # --- may it? ------------------------------------------------------------------------------------------------------

    def _problem(self, asker: Asker, line: Line) -> Refusal | None:
        """What is wrong already. What is right here is asked again where it runs."""
        name, asked = line.aid, line.asked
        if name.startswith("_"):
            return Refusal(errors.BAD_REQUEST, f"{name} is a word to the broker, and no tool")
        milliseconds = line.timeout_ms()
        if isinstance(milliseconds, Refusal):
            return milliseconds
        if asked.stream:
            return Refusal(errors.BAD_REQUEST, 'nobody can listen to a queued call: leave out "stream"')
        if len(asked.session) > LONGEST_SESSION:
            return Refusal(errors.BAD_REQUEST, f'"session" may have {LONGEST_SESSION} characters')
        broker = self._broker
        tool = broker.registry.get(name)
        if tool is None:
            if asker.rights.allow_any(name):
                return None
            text = f"{asker.principal} may not call {name}, or it cannot be told: no broker that is known here has it"
            return Refusal(errors.FORBIDDEN, text)
        refusal = broker.dispatcher.rights(tool, asker)
        if refusal is None and broker.dispatcher.wants_lease(tool) and not asked.lease:
            refusal = broker.dispatcher.lease_required(asker, tool)
        if refusal is None and tool.schema is not None and tool.options is None:  # else more is added where it runs
            given = Call(tool, line.text, None, 0.0).input_json()
            problem = tool.schema.problem(given, broker.secrets.hidden.text)
            refusal = Refusal(errors.BAD_REQUEST, problem) if problem else None
        return refusal

    # --- it goes ------------------------------------------------------------------------------------------------------

    async def _send(self, letter: Letter, *, known: bool) -> Answer:
        """`known`: its id has been chosen, and may have been enqueued before."""
        if known and (answer := await self._same(letter)) is not None:
            return answer
        letter = await self._requests.pack(letter)
        name = letter.name
        if await self._store.consumer(letter.tool, self._patience):
            self._tell(letter.tool)
        subject = self._names.call(letter.tool, name)
        kept = await self._store.publish(subject, letter.data, letter.headers(name), self._patience)
        if kept.duplicate:
            self._requests.forget(letter)
            same = await self._same(letter)
            if same is not None:
                return same
            text = f"the call {letter.id!r} has just ended, and what came of it has expired: ask again in a while"
            return Refusal(errors.UNAVAILABLE, text, retry_after=SAME_SECONDS, call_id=letter.id)
        return self._told(letter, "queued", duplicate=False)

    async def _same(self, letter: Letter) -> Answer | None:
        """What is known of this id. Another call's id is refused: one of the two would be lost."""
        outcome, queued, dead = await asyncio.gather(
            self._results.find(letter.name),
            self._store.call_by(letter.name, self._patience),
            self._dead.find(letter.id),
        )
        state: str
        if outcome is not None:
            principal, digest, state = outcome.principal, outcome.digest, outcome.state
        elif queued is not None:
            before = stored(queued)
            principal, digest, state = before.principal, before.digest, "queued"
        elif dead is not None:
            principal, digest, state = dead.letter.principal, dead.letter.digest, "dead"
        else:
            return None
        if (principal, digest) != (letter.principal, letter.digest):
            text = f"the id {letter.id!r} is that of another call, which was enqueued before: choose another one"
            return Refusal(errors.BAD_REQUEST, text)
        return self._told(letter, state, duplicate=True)

    def _told(self, letter: Letter, state: str, *, duplicate: bool) -> dict[str, Any]:
        known = self._broker.registry.get(letter.tool) is not None
        return {"call_id": letter.id, "state": state, "duplicate": duplicate, "known": known}

    def _tell(self, tool: str) -> None:
        """Those who have the tool need not find out for themselves."""
        assert self._broker.bus is not None
        self._broker.bus.say(self._names.news, tool.encode())
