"""A call as a request line, and where the broker is that gets it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from broker import addresses, config

Address = str | tuple[str, int]

encode = msgspec.json.Encoder().encode


def input_text(inputs: Any, input_json: str | None = None) -> str:
    """The input as the tool gets it: JSON."""
    if input_json is not None:
        if inputs is not None:
            raise ValueError("give inputs or input_json, not both")
        return input_json
    try:
        return encode({} if inputs is None else inputs).decode()
    except TypeError:  # what msgspec does not know, json may: keys that are None, for example
        return json.dumps(inputs, ensure_ascii=False, allow_nan=False)


def request_line(
    aid: str,
    text: str,
    *,
    timeout: float | None = None,
    idempotency_key: str = "",
    lease_token: str = "",
    ds_state: Any = None,
    session: str = "",
    number: int | None = None,
    stream: bool = False,
) -> bytes:
    members: dict[str, Any] = {} if number is None else {"id": number}
    members["aid"] = aid
    members["input_json"] = text
    if timeout is not None:
        members["timeout_ms"] = max(1, round(timeout * 1000))
    if idempotency_key:
        members["idempotency_key"] = idempotency_key
    if lease_token:
        members["_lease_token"] = lease_token
    if ds_state is not None:
        members["ds_state"] = ds_state
    if session:
        members["session"] = session
    if stream:
        members["stream"] = True
    return encode(members) + b"\n"


def named(session: str) -> str:
    """The name of a session that is asked about: connections, which have one of their own, come and go."""
    if not session:
        raise ValueError("a session is asked about by its name")
    return session


def find(address: Address | None, environ: Mapping[str, str] | None = None) -> Address:
    """A path, (host, port), "HOST:PORT" or "tcp:HOST:PORT"; without one, where `broker serve` listens by default."""
    if address is None:
        environ = os.environ if environ is None else environ
        loaded = config.load(None, {}, environ)
        return loaded.config.server.socket or addresses.default_socket(environ)
    if not isinstance(address, str):
        return address
    text = address.removeprefix("tcp:")
    if text != address or (os.sep not in address and ":" in address):
        return addresses.address(text, "address")
    return address.removeprefix("unix:")


def says_who(token: str) -> bytes:
    return encode({"aid": "_auth", "token": token}) + b"\n"


def words(address: Address) -> str:
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"
