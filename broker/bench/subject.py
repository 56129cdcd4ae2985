"""Who is measured: the broker that runs, a private one, or an `Embedded`; and the client on its own beside it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from broker import Embedded, where
from broker.bench import cases
from broker.bench.embedded import InProcess
from broker.bench.load import Unix
from broker.bench.model import Face, Plan
from broker.bench.private import Private
from broker.cli.common import Unreachable, ask
from broker.client.request import request_line

REPLY_ROOM = 120  # what a reply has beside the output


class Subject(NamedTuple):
    words: str
    plans: list[Plan]
    faces: dict[str, Face]
    passes: int = 1


def _subject(words: str, plans: list[Plan], *faces: Face, passes: int = 1) -> Subject:
    return Subject(words, plans, {face.name: face for face in faces}, passes)


def portrait(path: str, private: Private, *, named: bool, say: Callable[[str], None]) -> Subject:
    """Whoever serves this socket, if it has the demo tools; else a private broker, unless the user has named one."""
    words = "the broker that is running"
    try:
        if cases.ECHO not in _tools(path):
            raise Unreachable(f"the broker at {path} does not have {cases.ECHO}; name a tool that it has with --tool")
    except Unreachable as error:
        if named:
            raise
        say(f"{error}\nso a private one with the demo tools is measured")
        path = private.broker()
        words = "a private broker with the demo tools"

    def make() -> Embedded:
        return Embedded(file=private.config, plugins=[where.demo_plugin()], environ=private.environ())

    mirror = private.mirror(cases.SIZES[0] + REPLY_ROOM)
    words = f"{words}; embedded: the demo tools"
    faces = Unix(mirror, cases.CLIENT), InProcess(make), Unix(path)
    return _subject(words, cases.portrait(), *faces, passes=cases.PASSES)


def tool_behind_socket(plans: list[Plan], path: str, private: Private) -> Subject:
    """A tool of the broker that serves this socket. The mirror's replies are as long as the tool's."""
    tool = plans[0].tool
    _known(tool, _tools(path), f"the broker at {path} does not have")
    reply = ask(path, request_line(tool, plans[0].input).rstrip(b"\n"))
    alone = [
        msgspec.structs.replace(one, face=cases.CLIENT, warmup=0.05, seconds=min(0.5, one.seconds), rate=0.0)
        for one in plans
    ]
    mirror = Unix(private.mirror(len(reply)), cases.CLIENT)
    return _subject(f"{tool} of the broker that is running", [*alone, *plans], mirror, Unix(path))


def tool_embedded(plans: list[Plan], config: str | None) -> Subject:
    """A tool of the configuration that `broker serve` would read."""
    tool = plans[0].tool
    face = InProcess(lambda: Embedded(file=config))
    _known(tool, (one["aid"] for one in face.tools().tools()), "the configuration's plugins do not have")
    return _subject(f"{tool}, embedded", plans, face)


def _tools(path: str) -> set[str]:
    return {tool["aid"] for tool in msgspec.json.decode(ask(path, b'{"aid":"_tools"}', 10.0)).get("tools", [])}


def _known(aid: str, tools: Iterable[str], words: str) -> None:
    names = sorted(tools)
    if aid not in names:
        near = difflib.get_close_matches(aid, names, 1)
        hint = f"did you mean {near[0]}?" if near else "`broker tools` shows what there is"
        raise Unreachable(f"{words} {aid}; {hint}")
