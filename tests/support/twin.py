"""The scanner's twin: what a caller's stream means, in Python, from the contract and wire.h alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Known members, and what their values begin with.
KNOWN = {
    "id": "",
    "aid": '"',
    "input_json": '"',
    "inputs": "{",
    "ds_state": "{",
    "idempotency_key": '"',
    "_lease_token": '"',
    "timeout_ms": "0123456789",
    "session": '"',
    "stream": "tf",
    "traceparent": '"',
    "run_id": '"',
    "request_id": '"',
}
HARMLESS = {"id", "aid", "input_json", "inputs", "traceparent", "run_id", "request_id"}
RESET = ('"ds_state"', '{"slots":{}}')
LONGEST_KEY, LONG_INPUTS, LONGEST_INTEGER = 128, 1 << 20, 4300

SPACE = re.compile(r"[ \t\r\n]*")
PLAIN_CHARACTER = r'[^"\\\x00-\x1f\ud800-\udfff]'
ESCAPE = r'\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
STRING = re.compile(f'"(?:{PLAIN_CHARACTER}|{ESCAPE})*"')
WORD = re.compile("true|false|null")
LIKE_A_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]*)?")
INTEGER, REAL = re.compile(r"-?[0-9]+"), re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


class Fault(Exception):
    """What is wrong with a line: one of wire.h's problems, in small letters, and with which member."""

    def __init__(self, problem: str, member: str | None = None) -> None:
        super().__init__(problem, member)
        self.problem = problem
        self.member = member


class Item(NamedTuple):
    """One line, as the scanner should see it. Texts are as the caller wrote them."""

    kind: str
    tool: int = -1
    problem: str = "ok"
    member: str | None = None
    id: str | None = None
    key: str | None = None
    members: Mapping[str, str] = {}
    sent: tuple[tuple[str, str], ...] | None = None  # names and values that go to the toolhost


class Reader:
    """JSON, strictly: reads a text from left to right, and raises at the first byte that does not belong."""

    def __init__(self, text: str, deepest: int) -> None:
        self.text = text
        self.deepest = deepest
        self.at = 0

    def comes(self, char: str) -> bool:
        """Behind white space. It is read, if so."""
        self.at = SPACE.match(self.text, self.at).end()
        found = self.text.startswith(char, self.at)
        self.at += found * len(char)
        return found

    def need(self, expected: re.Pattern[str] | str) -> str:
        if isinstance(expected, str):
            expected = re.compile(re.escape(expected))
        self.comes("")
        match = expected.match(self.text, self.at)
        if not match:
            raise Fault("invalid_json")
        self.at = match.end()
        return match[0]

    def number(self) -> None:
        text = self.need(LIKE_A_NUMBER)
        if INTEGER.fullmatch(text):
            good = len(text) <= LONGEST_INTEGER
        else:
            good = bool(REAL.fullmatch(text)) and math.isfinite(float(text))
        if not good:
            raise Fault("invalid_json")

    def value(self, around: int = 0) -> str:
        """Its text. So many levels are open around it."""
        self.comes("")
        start = self.at
        first = self.text[start : start + 1]
        if first and first in "{[":
            for _ in self.inside(first, around):
                pass
        elif first == '"':
            self.need(STRING)
        elif first.isalpha():
            self.need(WORD)
        else:
            self.number()
        return self.text[start : self.at]

    def inside(self, opening: str, around: int = 0) -> Iterator[tuple[str, str]]:
        """The members of an object; of an array, those without their names."""
        if around >= self.deepest:
            raise Fault("too_deep")
        self.need(opening)
        end = "}" if opening == "{" else "]"
        if self.comes(end):
            return
        while True:
            name = self.need(STRING) if opening == "{" else ""
            if name:
                self.need(":")
            yield name, self.value(around + 1)
            if self.comes(end):
                return
            self.need(",")

    def finish(self) -> None:
        self.comes("")
        if self.at < len(self.text):
            raise Fault("invalid_json")


def members(line: bytes, deepest: int) -> tuple[tuple[str, str], ...]:
    """Names and values of an object, as they are written."""
    reader = Reader(decoded(line), deepest)
    found = tuple(reader.inside("{"))
    reader.finish()
    return found


def decoded(line: bytes) -> str:
    """What is not UTF-8 becomes lone surrogates, which no string of the grammar has."""
    return line.decode("utf-8", "surrogateescape")


def framed(stream: bytes, cap: int) -> Iterator[tuple[bytes, bool]]:
    """Its lines, to the end; of those over the cap what fits, and that they are."""
    *lines, rest = stream.split(b"\n")
    for line in [*lines, rest] if rest else lines:
        text = line.removesuffix(b"\r")
        yield text[:cap], len(text) > cap


class Envelope:
    """The members of one line, and the first thing that is wrong with it."""

    def __init__(self, line: bytes, deepest: int) -> None:
        self.all: list[tuple[str, str]] = []
        self.known: dict[str, str] = {}
        self.twice: set[str] = set()
        self.fault: Fault | None = None
        self.ends_in: str | None = None  # the known member that ends where the line does
        try:
            self._read(Reader(decoded(line), deepest))
        except Fault as fault:
            self.fault = fault  # what is no JSON is nothing else, either

    def _read(self, reader: Reader) -> None:
        if not reader.comes("{"):
            reader.value()
            reader.finish()
            raise Fault("not_an_object")
        reader.at -= 1
        for raw, value in reader.inside("{"):
            self.all.append((raw, value))
            name = json.loads(raw)
            if "\0" in name:
                self._complain("nul_name")
            elif name in self.known:
                self.twice.add(name)
                self._complain("twice", name)
            elif name in KNOWN:
                self.known[name] = value
                self.ends_in = name if reader.at == len(reader.text) else None
                if KNOWN[name] and value[0] not in KNOWN[name]:
                    self._complain("wrong_type", name)
        reader.finish()
        if "input_json" in self.known and "inputs" in self.known:
            self._complain("both_inputs", "inputs")
        if self.known.get("aid", '""') == '""':
            self._complain("no_aid", "aid")

    def _complain(self, problem: str, member: str | None = None) -> None:
        self.fault = self.fault or Fault(problem, member)

    def sent(self) -> tuple[tuple[str, str], ...]:
        """What is the broker's is left out; the state is reset, unless the policy has to see to the caller's."""
        out = [] if "ds_state" in self.known else [RESET]
        for raw, value in self.all:
            name = json.loads(raw)
            if name == "inputs":
                out.append(('"input_json"', json.dumps(value, ensure_ascii=False)))
            elif name in ("aid", "input_json"):
                out.append((f'"{name}"', value))
            elif name not in KNOWN:
                out.append((raw, value))
        return tuple(out)

    def refusal(self, fault: Fault) -> Item:
        """It has the line's id, and names the tool where the line does: once, and as a string."""
        aid = self.known.get("aid", "")
        named = aid.startswith('"') and len(aid) > 2 and "aid" not in self.twice
        return Item(
            "bad",
            problem=fault.problem,
            member=fault.member,
            id=self.known.get("id"),
            members={"aid": aid} if named else {},
        )


def read(line: bytes, oversize: bool, deepest: int, tools: Mapping[str, int], is_open: set[int]) -> Item:
    """One line that is not empty."""
    envelope = Envelope(line, deepest)
    if oversize:
        if envelope.ends_in == "id":
            del envelope.known["id"]  # a number, perhaps cut
        return envelope.refusal(Fault("too_long"))
    if envelope.fault:
        return envelope.refusal(envelope.fault)
    known = envelope.known
    tool = tools.get(json.loads(known["aid"]), -1)
    key = known.get("idempotency_key")
    simple = key is None or (2 < len(key.encode()) <= LONGEST_KEY + 2 and "\\" not in key)
    grows = "inputs" in known and len(line) > LONG_INPUTS  # perhaps past the cap, when it becomes a string
    harmless = known.keys() <= HARMLESS | {"idempotency_key"}
    if tool in is_open and harmless and simple and not grows:
        kind = "plain" if key is None else "keyed"
        return Item(kind, tool, id=known.get("id"), key=key and key[1:-1], sent=envelope.sent())
    return Item("call", tool, id=known.get("id"), members=known, sent=envelope.sent())


def scanned(stream: bytes, cap: int, deepest: int, tools: Mapping[str, int], is_open: set[int]) -> list[Item]:
    """Every line of a caller that sends this and no more, up to its wish to close."""
    items = []
    for line, oversize in framed(stream, cap):
        if not line and not oversize:
            return [*items, Item("close")]
        items.append(read(line, oversize, deepest, tools, is_open))
    return items


def reply(line: bytes, name: str | None, deepest: int) -> tuple[bool, tuple[tuple[str, str], ...]] | None:
    """Did a toolhost's line succeed, by its own words, and what does the caller get? None: it is no reply."""
    try:
        found = members(line, deepest)
    except Fault:
        return None
    said = {json.loads(raw): value for raw, value in found}
    rest = tuple((raw, value) for raw, value in found if json.loads(raw) != "id")
    if len(found) - len(rest) > 1:
        return None  # two ids: nobody could say which one a reader takes
    succeeded = said["status"] == '"OK"' if "status" in said else said.get("ok") == "true"
    return succeeded, rest if name is None else (('"id"', name), *rest)
