"""One command, from its arrival to its acknowledgement: read, look up, claim, run, write the card, report, wake.

Nothing is acknowledged before what it comes to is durable. A store or a NATS that is away is asked again, for as long
as it takes; NATS hears meanwhile that the command is being worked on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from broker import errors
from broker.cluster.kv import Away
from broker.errors import Refusal
from broker.faces.caller import Asked, Asker, Caller, understood
from broker.faces.utp.claims import Claims
from broker.faces.utp.hand import Hand
from broker.faces.utp.targets import Target
from broker.faces.utp.wake import Doorbell
from broker.utp import args, outcome, result, span, subjects
from broker.utp.command import Flaw, Nameless, read
from broker.utp.model import CALL_CONTENT, Callback, Card, Command, Report
from broker.utp.outcome import Outcome
from broker.utp.stores.base import ReportRefused, StoreAway, StoreRefused, Stores
from broker.wire import is_json

if TYPE_CHECKING:
    from broker.faces.utp.face import UtpFace
    from broker.server import Broker

T = TypeVar("T")

PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # before one asks again; then the last one
AGAIN_SECONDS = 5.0  # before a command that we could not handle comes again
GONE = "the executor that ran this call is gone; it may have run, and is not run again"

_encode = msgspec.json.Encoder().encode


class Given(NamedTuple):
    """What a tool gets."""

    text: str
    options: dict[str, Any]  # of the definition
    secret: bool  # values of variables are in it


class NotRun(Exception):
    """The broker is stopping: the command goes to somebody else."""


class Executor:
    def __init__(self, broker: Broker, stores: Stores, claims: Claims, doorbell: Doorbell, face: UtpFace) -> None:
        self._broker = broker
        self._stores = stores
        self._claims = claims
        self._doorbell = doorbell
        self._face = face
        self._caller = Caller(broker, "utp")
        self._depth = broker.settings.limits.depth

    async def handle(self, target: Target, hand: Hand) -> None:
        """Whatever happens, the message is let go of."""
        message = hand.message
        try:
            await self._answer(target, hand)
        except Nameless as error:
            self._face.bury(target, hand, f"nobody can be told of it: {error}")
            await hand.end()
        except StoreRefused as error:
            self._face.bury(target, hand, str(error))
            await hand.end()
        except NotRun:
            await hand.give_back()
        except asyncio.CancelledError:
            if target.last(hand):
                self._face.bury(target, hand, "the broker stopped before it could write what came of it")
            await hand.give_back()
        except Exception as error:  # a mistake of ours: it may be better elsewhere, or later
            text = f"{type(error).__name__}: {error}"
            self._broker.log.error("utp: a command could not be handled", subject=message.subject, reason=text)
            if target.last(hand):
                self._face.bury(target, hand, text)
                await hand.end()
            else:
                await hand.give_back(AGAIN_SECONDS)
        else:
            await hand.done()

    async def _answer(self, target: Target, hand: Hand) -> None:
        message = hand.message
        place = subjects.place(message.subject)
        if place is None:
            raise Nameless("its subject is no command to a tool")
        command, flaw = read(message.data, place)
        card_id = command.tool_call_card_id
        call = await self._steadily(lambda: self._card(command.project_id, card_id))
        if flaw is not None:
            callback = await self._write(target, command, call, outcome.flawed(flaw))
        else:
            callback = await self._outcome(target, hand, command, call)
        await self._report(target, hand, command, callback, span.known(message.headers))

    async def _card(self, project_id: str, card_id: str | None) -> Card | None:
        return await self._stores.cards.card(project_id, card_id) if card_id else None

    # --- what comes of it ---------------------------------------------------------------------------------------------

    async def _outcome(self, target: Target, hand: Hand, command: Command, call: Card | None) -> Callback:
        """Of this command, or of the one like it that came before."""
        written = await self._written(command, call)
        if written is not None:
            await self._steadily(lambda: self._claims.done(command, written))
            target.counts["again"] += 1
            return written
        given = await self._given(target, command, call)
        claim = self._claims.attempt(command)
        told = await self._steadily(lambda: self._claims.take(claim))
        if told is not None:
            target.counts["again"] += 1
            return told
        hand.claim = claim
        callback = await self._led(target, hand, command, call, given)
        hand.claim = None  # not to be renewed while it is brought to its end
        await self._steadily(lambda: self._claims.done(command, callback, claim))
        return callback

    async def _led(
        self, target: Target, hand: Hand, command: Command, call: Card | None, given: Given | Outcome
    ) -> Callback:
        """The call is ours."""
        claim = hand.claim
        assert claim is not None
        if claim.inherited:
            written = await self._written(command, call)
            if written is not None:
                return written
            target.counts["taken_over"] += 1
            return await self._write(target, command, call, outcome.failed("internal_error", GONE))
        if isinstance(given, Outcome):
            return await self._write(target, command, call, given)
        answer = await self._run(target, command, given)
        drained = isinstance(answer, Refusal) and answer.kind is errors.DRAINING and not answer.ran
        if drained and not target.last(hand):  # else NATS would not bring it to anybody
            await self._steadily(claim.release)
            raise NotRun
        return await self._write(target, command, call, self._told(target, answer))

    async def _written(self, command: Command, call: Card | None) -> Callback | None:
        """There is a card already: it has come before."""
        found = await self._steadily(lambda: self._stores.cards.result_of(command.project_id, command.tool_call_id))
        return result.callback(command, call, found) if found is not None else None

    async def _given(self, target: Target, command: Command, call: Card | None) -> Given | Outcome:
        """The tool's input, or why there is none."""
        if call is None:
            return outcome.failed("not_found", f"tool_call_card_id not found: {command.tool_call_card_id}")
        content = call.content
        if not isinstance(content, dict) or content.get("__type__") != CALL_CONTENT:
            detail = {"card_id": call.card_id}
            return outcome.flawed(Flaw("tool.call content must be ToolCallContent", detail))
        arguments = content.get("arguments") or {}
        if not isinstance(arguments, dict):
            return outcome.flawed(Flaw("tool.call arguments must be an object", {"card_id": call.card_id}))
        name = command.tool_name or ""
        definition = await self._steadily(lambda: self._stores.resources.tool(command.project_id, name))
        options = definition.options if definition is not None else {}
        envs = args.read(options, target.settings.envs).envs
        try:
            complete = args.with_values(arguments, envs, self._broker.lent)
        except args.NoValue as error:
            return outcome.failed("internal_error", str(error))
        text = _encode(complete)
        if not is_json(text, self._depth):
            deep = f"tool.call arguments are nested in more than {self._depth} levels (limits.depth)"
            return outcome.flawed(Flaw(deep, {"card_id": call.card_id}))
        return Given(text.decode(), options, bool(envs))

    async def _run(self, target: Target, command: Command, given: Given) -> bytes | Refusal:
        tool = self._broker.registry.get(target.settings.tool)
        if tool is None:
            return Refusal(errors.NOT_FOUND, f"tool not found: {target.settings.tool} (utp.targets.{target.name})")
        principal = f"utp:{command.project_id}"
        rights = self._caller.rights_of(principal)
        asker = Asker(principal, rights, False, self._broker.registry.plain_of(rights))
        milliseconds = int(target.settings.timeout_seconds * 1000) or None
        answer: asyncio.Future[bytes | Refusal] = asyncio.get_running_loop().create_future()

        def tell(said: bytes | Refusal) -> None:
            if not answer.done():
                answer.set_result(said)

        asked = Asked(milliseconds, request=command.tool_call_id, options=given.options, secret=given.secret)
        running = self._caller.begin(tool, given.text, asker, tell, asked)
        try:
            return await answer
        except asyncio.CancelledError:
            self._caller.hang_up(running)
            raise

    def _told(self, target: Target, answer: bytes | Refusal) -> Outcome:
        """Without the values that were lent to the tool, should it repeat them."""
        hidden = self._broker.log.hidden
        tool = self._broker.registry.get(target.settings.tool)
        said = understood(tool, answer) if tool is not None else answer
        if isinstance(said, bytes):
            said = Refusal(errors.NOT_FOUND, f"{target.settings.tool} has just been taken out of the configuration")
        if isinstance(said, Refusal):
            extra = {name: hidden.json(one) for name, one in said.extra.items() if isinstance(one, str)}
            return outcome.of_refusal(Refusal(said.kind, hidden.text(said.text), ran=said.ran, **extra), self._depth)
        said.output_json, said.error = hidden.json(said.output_json), hidden.text(said.error or "")
        return outcome.of_reply(said, self._depth)

    # --- what is written ----------------------------------------------------------------------------------------------

    async def _write(self, target: Target, command: Command, call: Card | None, came: Outcome) -> Callback:
        card = result.card(command, call, came, target.author)
        try:
            saved = await self._steadily(lambda: self._stores.cards.save_result(card))
        except StoreRefused as error:
            reason = self._broker.log.hidden.text(str(error))
            card = result.card(
                command, call, outcome.failed("internal_error", f"the result cannot be kept: {reason}"), target.author
            )
            saved = await self._steadily(lambda: self._stores.cards.save_result(card))
        if saved is card:
            target.counts[came.status] += 1
        return result.callback(command, call, saved)

    async def _report(
        self, target: Target, hand: Hand, command: Command, callback: Callback, headers: Mapping[str, str]
    ) -> None:
        trace = span.child(headers)
        place = subjects.Place(command.project_id, command.channel_id, command.target)
        report = Report(place.project_id, place.channel_id, callback, trace, target.source, span.depth(headers))
        try:
            depth = await self._steadily(lambda: self._stores.reports.report(report))
        except ReportRefused as error:
            target.counts["not_reported"] += 1
            self._face.bury(target, hand, f"its report was refused: {error}", command.tool_call_id)
            return
        worker = await self._steadily(
            lambda: self._stores.resources.worker_target(command.project_id, callback.agent_id)
        )
        if worker is not None:
            onwards = span.onwards(headers, trace, depth)
            await self._steadily(lambda: self._doorbell.ring(place, worker, callback.agent_id, onwards))

    async def _steadily(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Until there is an answer: whoever is away is asked again."""
        attempts = 0
        while True:
            try:
                answer = await ask()
            except (StoreAway, Away) as error:
                self._face.troubled(str(error))
                pause = PAUSES[min(attempts, len(PAUSES) - 1)]
                attempts += 1
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            else:
                if attempts:
                    self._face.well()
                return answer
