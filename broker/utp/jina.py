"""Jina's search and reader, as options of a tool ask for them: what to ask of whom, and what an answer means. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import msgspec

from broker import errors, origin
from broker.origin import Origin
from broker.wire import is_json

SEARCH, READER = "search", "reader"
AT_JINA = {SEARCH: Origin("https", "s.jina.ai", 443), READER: Origin("https", "r.jina.ai", 443)}
KEY = "JINA_API_KEY"
LONGEST_TARGET = 16 * 1024  # of a request's first line; what is longer has to be posted
SAID = 300  # characters of an unhappy answer that are passed on
_PATH = re.compile(r"[A-Za-z0-9._~/-]*", re.ASCII)
_TEXTS = ("mode", "base_url", "path", "method", "auth_env")
_encode = msgspec.json.Encoder().encode


class BadAsk(Exception):
    """It cannot be asked; the words are for whoever wrote the options, or the arguments."""


class Ask(NamedTuple):
    origin: Origin
    method: str
    target: str
    body: bytes
    headers: dict[str, str]
    variable: str  # the key's
    named: bool  # the options name it: without a value there is no asking


class Trouble(NamedTuple):
    """An answer that is none, in CommonGround's terms."""

    code: str
    message: str
    detail: dict[str, Any]
    retryable: bool = False

    def written(self) -> str:
        """As a tool says an error."""
        error: dict[str, Any] = {"code": self.code, "message": self.message, "http_status": errors.UTP[self.code]}
        if self.detail:
            error["detail"] = self.detail
        if self.retryable:
            error["retryable"] = True
        return _encode({"error": error}).decode()


def ask(arguments: dict[str, Any], options: Any, places: dict[str, Origin]) -> Ask:
    """`places` are who is asked for a search, or to read: Jina, or whoever the configuration has put in its place."""
    jina = options.get("jina") if isinstance(options, dict) else None
    if not isinstance(jina, dict) or not jina:
        raise BadAsk("the tool's options have no jina: {mode, base_url, path, method, auth_env}")
    said = {name: _said(jina, name) for name in _TEXTS}
    mode, base = _mode_and_base(said["mode"].lower(), said["base_url"], places)
    method = said["method"].upper() or "GET"
    if method not in ("GET", "POST"):
        raise BadAsk(f"options.jina.method = {method!r}: it is GET or POST")
    path = said["path"] if not said["path"] or said["path"].startswith("/") else "/" + said["path"]
    if not _PATH.fullmatch(path):
        raise BadAsk(f"options.jina.path = {path!r}: a plain path, such as /search")
    given = {name: value for name, value in arguments.items() if value is not None}
    if mode == SEARCH:
        path, given = base + (path or "/search"), _query(given)
    else:
        path, given = _page(base + path, given, method)
    target, body = _carried(path, given, method)
    headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "toolhost-broker"}
    if body:
        headers["Content-Type"] = "application/json"
    return Ask(places[mode], method, target, body, headers, said["auth_env"] or KEY, bool(said["auth_env"]))


def _said(jina: dict[str, Any], name: str) -> str:
    value = jina.get(name)
    if not isinstance(value, str | None):
        raise BadAsk(f"options.jina.{name} has to be a string")
    return (value or "").strip()


def _mode_and_base(mode: str, base_url: str, places: dict[str, Origin]) -> tuple[str, str]:
    """Nothing of an address is used but its path: it may only say which of the two is meant."""
    if mode not in ("", SEARCH, READER):
        raise BadAsk(f"options.jina.mode = {mode!r}: it is {SEARCH} or {READER}")
    if not base_url:
        if not mode:
            raise BadAsk(f"options.jina has no mode: {SEARCH} or {READER}")
        return mode, ""
    found = origin.read(base_url)
    modes = [one for one in places if found is not None and found[0] in (places[one], AT_JINA[one])]
    if found is None or not modes:
        allowed = " and ".join(str(AT_JINA[one]) for one in places)
        raise BadAsk(f"options.jina.base_url = {base_url!r}: only {allowed} may be asked")
    if mode and mode not in modes:
        raise BadAsk(f"options.jina.base_url = {base_url!r} is not where to ask for mode {mode}")
    return mode or modes[0], found[1].rstrip("/")


def _query(given: dict[str, Any]) -> dict[str, Any]:
    words = given.pop("query", None)
    words = given.get("q") or words
    if not isinstance(words, str | int | float) or isinstance(words, bool) or not str(words).strip():
        raise BadAsk("a search needs an argument q (or query), a text")
    return {"q": str(words), **{name: value for name, value in given.items() if name != "q"}}


def _page(path: str, given: dict[str, Any], method: str) -> tuple[str, dict[str, Any]]:
    other = given.pop("target_url", None)
    page = given.pop("url", None) or other
    if not isinstance(page, str) or not page.strip():
        raise BadAsk("reading needs an argument url (or target_url), a text")
    if method == "POST":
        return path or "/", {"url": page.strip(), **given}
    return f"{path.rstrip('/')}/{quote(page.strip(), safe='')}", given


def _carried(path: str, given: dict[str, Any], method: str) -> tuple[str, bytes]:
    try:
        if method == "POST":
            return path, _encode(given)
        pairs = [(name, _word(one)) for name, value in given.items() for one in _several(value)]
        target = f"{path}?{urlencode(pairs)}" if pairs else path
    except UnicodeEncodeError:
        raise BadAsk("the arguments are no text: there is half of a surrogate pair in them") from None
    if len(target) > LONGEST_TARGET:
        raise BadAsk(f"the arguments are over {LONGEST_TARGET} bytes; options.jina.method = POST takes more")
    return target, b""


def _several(value: Any) -> list[Any]:
    return [one for one in value if one is not None] if isinstance(value, list) else [value]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- answers ----------------------------------------------------------------------------------------------------------


def meaning(
    who: Origin, status: int, kind: str, body: bytes, depth: int, hide: Callable[[str], str] = str
) -> str | Trouble:
    """The output's JSON; or what went wrong, with the beginning of what was said of it."""
    kind, _, rest = kind.lower().partition(";")
    text = _decoded(body, rest)
    if not 200 <= status < 300:
        return _unhappy(who, status, " ".join(hide(text).split())[:SAID])
    if kind.strip() != "application/json" and not kind.strip().endswith("+json"):
        return _encode({"data": text}).decode()
    if not is_json(body, depth):
        message = f"{who.host} answered with what is not JSON, though it says so"
        return Trouble("upstream_unavailable", message, {}, retryable=True)
    whole = body.decode().strip()
    return whole if whole.startswith("{") else f'{{"data":{whole}}}'


def _decoded(body: bytes, rest: str) -> str:
    found = re.search(r"charset\s*=\s*\"?([a-z0-9._-]+)", rest)
    try:
        return body.decode(found[1] if found else "utf-8", "replace")
    except (LookupError, ValueError):
        return body.decode("utf-8", "replace")


def _unhappy(who: Origin, status: int, said: str) -> Trouble:
    again = status in (408, 425, 429) or status >= 500
    if 300 <= status < 400:
        return Trouble(
            "upstream_unavailable", f"{who.host} answered {status}: it is somewhere else now, and is not followed", {}
        )
    code = {401: "auth_failed", 402: "auth_failed", 403: "auth_failed", 404: "not_found", 409: "conflict"}.get(status)
    if code is None:
        code = "bad_request" if 400 <= status < 500 and not again else "upstream_unavailable"
    message = f"{who.host} answered {status}" + (f": {said}" if said else "")
    return Trouble(code, message, {"http_status": status}, again)
