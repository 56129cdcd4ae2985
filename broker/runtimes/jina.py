"""[jina]: tools that ask Jina, in the broker's own process: a thread for each request, so many at once."""

from __future__ import annotations

import asyncio
import threading
import time

import msgspec

from broker import errors
from broker.errors import Refusal
from broker.model import ToolInfo, Work
from broker.observe.log import Log
from broker.origin import Origin, origin
from broker.pool import verdicts
from broker.pool.core import Core
from broker.runtimes.builtin import UNCHANGED
from broker.runtimes.fetch import Answer, Fetch, NoAnswer, TooLong
from broker.runtimes.oneshot import count
from broker.runtimes.waiting import Waiting
from broker.secrets import Lent, Secrets
from broker.settings import Jina as Settings
from broker.settings import Limits
from broker.utp import jina
from broker.utp.jina import Ask, BadAsk, Trouble

DOES = "Asks Jina's search (s.jina.ai) or reader (r.jina.ai), as its options say."

_encode = msgspec.json.Encoder().encode


def describe(name: str) -> ToolInfo:
    return ToolInfo(name, name, False, ("network",), ("network",), description=DOES)


def places(settings: Settings) -> dict[str, Origin]:
    said = {jina.SEARCH: origin(settings.search), jina.READER: origin(settings.reader)}
    return {mode: place for mode, place in said.items() if place is not None}  # the configuration has been checked


class Flight:
    """A request on its way. It is answered once, in time; its thread ends when it can."""

    __slots__ = ("answered", "begun", "fetch", "timer", "work")

    def __init__(self, work: Work, fetch: Fetch, timer: asyncio.TimerHandle) -> None:
        self.work = work
        self.fetch = fetch
        self.timer = timer
        self.begun = time.monotonic()
        self.answered = False


class Jina(Waiting):
    source = "[jina]"

    def __init__(self, settings: Settings, limits: Limits, core: Core, secrets: Secrets, lent: Lent, log: Log) -> None:
        super().__init__(settings.max, limits, core)
        self.timeout = limits.timeout_seconds
        self.tools = [describe(name) for name in settings.tools]
        self._places = places(settings)
        self._secrets = secrets
        self._lent = lent
        self._log = log
        self._flights: set[Flight] = set()

    def _room(self) -> int:
        return self._most - self.running  # there are no processes in it

    # --- one call ---------------------------------------------------------------------------------------------------

    def _start(self, work: Work) -> None:
        self.running += 1
        try:
            ask, key = self._asked(work)
        except BadAsk as error:
            self._core.loop.call_soon(self._unasked, work, Refusal(errors.BAD_REQUEST, f"{work.tool.name}: {error}"))
            return
        if isinstance(key, Trouble):
            self._core.loop.call_soon(self._unasked, work, _failed(key))
            return
        if work.ticket is not None:
            work.ticket.handed_over()
        headers = ask.headers | ({"Authorization": f"Bearer {key}"} if key else {})
        most = self._limits.reply_bytes
        fetch = Fetch(ask.origin, ask.method, ask.target, headers, ask.body, work.timeout, most)
        flight = Flight(work, fetch, self._core.loop.call_later(work.timeout, self._late, work))
        self._flights.add(flight)
        threading.Thread(target=self._run, args=(flight, ask.origin), name="broker-jina", daemon=True).start()

    def _asked(self, work: Work) -> tuple[Ask, str | Trouble]:
        """What is asked, and the key that goes with it."""
        try:
            given = msgspec.json.decode(msgspec.json.decode(work.lines, type=_Line).input_json)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadAsk(f"the input is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise BadAsk("the input has to be an object")
        ask = jina.ask(given, work.options, self._places)
        source = self._secrets if work.options is work.tool.options else self._lent
        key = (source.get(ask.variable) or "").strip()
        if not key and ask.named:
            message = f"the environment variable {ask.variable} has no value (options.jina.auth_env)"
            return ask, Trouble("auth_failed", message, {"variable": ask.variable})
        if not all("!" <= character <= "~" for character in key):
            message = f"what the environment variable {ask.variable} has is no key: a header cannot carry it"
            return ask, Trouble("auth_failed", message, {"variable": ask.variable})
        return ask, key

    def _unasked(self, work: Work, outcome: bytes | Refusal) -> None:
        self.running -= 1
        self._settle(work, outcome)

    def _run(self, flight: Flight, who: Origin) -> None:
        """In a thread."""
        outcome: bytes | Refusal
        try:
            outcome = self._line(who, flight.fetch.run())
        except TooLong:
            outcome = self._too_long(flight.work)
        except NoAnswer as error:
            outcome = _failed(Trouble("upstream_unavailable", str(error), {}, retryable=True))
        except Exception as error:  # its text might quote the request
            outcome = Refusal(errors.INTERNAL, f"the broker made a mistake: {type(error).__name__}", ran=True)
        try:
            self._core.loop.call_soon_threadsafe(self._ended, flight, outcome)
        except RuntimeError:  # the loop is gone, and with it all who waited
            return

    def _line(self, who: Origin, answer: Answer) -> bytes:
        hide, depth = self._secrets.hidden.text, self._limits.depth
        found = jina.meaning(who, answer.status, answer.kind, answer.body, depth, hide)
        if isinstance(found, Trouble):
            return _failed(found)
        return self._secrets.line(
            b'{"ok":true,"status":"OK","error":"","output_json":%b%b' % (_encode(found), UNCHANGED)
        )

    def _too_long(self, work: Work) -> Refusal:
        text = f"{work.tool.name}: the answer is over {self._limits.reply_bytes} bytes (limits.reply_bytes)"
        return Refusal(errors.REPLY_TOO_LARGE, text)

    # --- its end ----------------------------------------------------------------------------------------------------

    def _late(self, work: Work) -> None:
        flight = next(one for one in self._flights if one.work is work)
        self._answer(flight, verdicts.timeout(work.tool.name, work.timeout))
        flight.fetch.cancel()

    def _ended(self, flight: Flight, outcome: bytes | Refusal) -> None:
        self.running -= 1
        self._flights.discard(flight)
        if not flight.answered:
            self._answer(flight, outcome)
        else:
            self.pump()

    def _answer(self, flight: Flight, outcome: bytes | Refusal) -> None:
        flight.answered = True
        flight.timer.cancel()
        if isinstance(outcome, bytes):
            flight.work.tool.took(flight.work.caller.face, time.monotonic() - flight.begun)
        self._settle(flight.work, outcome)

    def _settle(self, work: Work, outcome: bytes | Refusal) -> None:
        if isinstance(outcome, bytes) and len(outcome) > self._limits.reply_bytes:
            outcome = self._too_long(work)
        count(self._core.policy, work.tool, outcome)
        if isinstance(outcome, Refusal):
            if outcome.ran:
                self._log.warning("request failed", aid=work.tool.name, reason=outcome.text)
            work.sink.refuse(work, outcome)
        else:
            ids = b"" if work.ids is None else b'"id":' + work.ids[:-1] + b","
            work.sink.deliver(work, b"{" + ids + outcome[1:], 1)
        self.pump()
        self._core.flush()

    def busy(self) -> bool:
        return any(not flight.answered for flight in self._flights) or bool(self.queue)

    def alive(self) -> bool:
        """Its threads end with the process."""
        return self.busy()

    def close(self, refusal: Refusal) -> None:
        self.drain(refusal)
        for flight in tuple(self._flights):
            if not flight.answered:
                self._answer(flight, refusal)
            flight.fetch.cancel()


class _Line(msgspec.Struct):
    input_json: str = "{}"


def _failed(trouble: Trouble) -> bytes:
    said = _encode(trouble.message), _encode(trouble.written()), _encode(trouble.code)
    return b'{"ok":false,"status":"TOOL_ERROR","error":%b,"output_json":%b,"code":%b' % said + UNCHANGED
