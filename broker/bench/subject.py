"""Who is measured: the broker that runs, a private one, or an `Embedded`; and the client on its own beside it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
from msgspec import Struct

from broker import Embedded, where
from broker.addresses import operator_socket
from broker.bench import cases
from broker.bench import http as web
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
    lacking = _http_lacks()
    try:
        if cases.ECHO not in _tools(path):
            raise Unreachable(f"the broker at {path} does not have {cases.ECHO}; name a tool that it has with --tool")
        url = _url(path)
    except Unreachable as error:
        if named:
            raise
        say(f"{error}\nso a private one with the demo tools is measured")
        path, url = private.broker(http=not lacking)
        words = "a private broker with the demo tools"

    def make() -> Embedded:
        return Embedded(file=private.config, plugins=[where.demo_plugin()], environ=private.environ())

    mirror = private.mirror(cases.SIZES[0] + REPLY_ROOM)
    words = f"{words}; embedded: the demo tools"
    faces: list[Face] = [Unix(mirror, cases.CLIENT), InProcess(make), Unix(path)]
    trouble = _no_http(url) if url or not lacking else lacking
    if trouble:
        say(f"HTTP is not measured: {trouble}")
    else:
        faces += _over_http(web.address(url), cases.ECHO, cases.echo_input(cases.SIZES[0]), private)
    return _subject(words, cases.portrait(http=not trouble), *faces, passes=cases.PASSES)


def tool_behind_socket(plans: list[Plan], path: str, private: Private) -> Subject:
    """A tool of the broker that serves this socket. The mirror's replies are as long as the tool's."""
    tool = plans[0].tool
    _known(tool, _tools(path), f"the broker at {path} does not have")
    reply = ask(path, request_line(tool, plans[0].input).rstrip(b"\n"))
    mirror = Unix(private.mirror(len(reply)), cases.CLIENT)
    plans = [*_alone(plans, cases.CLIENT), *plans]
    return _subject(f"{tool} of the broker that is running", plans, mirror, Unix(path))


def tool_over_http(plans: list[Plan], url: str, private: Private) -> Subject:
    """A tool of the broker that is reached there."""
    tool, place = plans[0].tool, web.address(url)
    try:
        status, body = web.ask(place, "GET", "/v1/tools")
        names = [one.name for one in msgspec.json.decode(body, type=_Listed).tools]
    except msgspec.DecodeError:
        raise Unreachable(f"what answers at {url} is no broker: /v1/tools has status {status} there") from None
    _known(tool, names, f"the broker at {url} does not have")
    plans = [*_alone(plans, cases.HTTP_CLIENT), *plans]
    return _subject(f"{tool} of the broker at {url}", plans, *_over_http(place, tool, plans[0].input, private))


def _alone(plans: list[Plan], face: str) -> list[Plan]:
    return [
        msgspec.structs.replace(one, face=face, warmup=0.05, seconds=min(0.5, one.seconds), rate=0.0) for one in plans
    ]


class _Named(Struct):
    name: str


class _Listed(Struct):
    tools: list[_Named]


def _over_http(place: web.Address, tool: str, text: str, private: Private) -> list[Face]:
    """The client alone, too: a mirror whose answers are as long as the tool's."""
    body = web.call(tool, text)
    lines = web.request(place, body).count(b"\n")
    size = len(web.ask(place, "POST", web.EXECUTE, body)[1])
    mirror = web.Address("127.0.0.1", private.http_mirror(size, lines))
    return [web.Http(mirror, cases.HTTP_CLIENT), web.Http(place)]


def _url(path: str) -> str:
    """Where the broker serves HTTP; empty if it does not, or if it is not ours to ask."""
    try:
        status = msgspec.json.decode(ask(operator_socket(path), b'{"aid":"_status"}', 10.0))
    except Unreachable:
        return ""
    return str(status.get("http", ""))


def _http_lacks() -> str:
    try:
        import broker.faces.http.face  # noqa: F401
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed (pip install 'toolhost-broker[http]')"
    return ""


def _no_http(url: str) -> str:
    """Why calls over HTTP would not succeed; empty if they do."""
    if not url:
        return "the broker that is running does not serve it (`broker serve --http 127.0.0.1:8080` does)"
    body = web.call(cases.ECHO, cases.echo_input(cases.SIZES[0]))
    try:
        status, answer = web.ask(web.address(url), "POST", web.EXECUTE, body)
    except Unreachable as error:
        return str(error)
    return "" if status == 200 else web.failure(status, answer)[1]


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
