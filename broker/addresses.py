"""Where the broker listens: HOST:PORT, and its sockets."""

from __future__ import annotations

import os
from collections.abc import Mapping

from broker.errors import ConfigError

OPERATOR = ".operator"


def address(text: str, setting: str) -> tuple[str, int]:
    """HOST:PORT, or [IPv6]:PORT."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{setting} = {text!r}: expected HOST:PORT, for example 127.0.0.1:7070")
    return host.strip("[]") or "127.0.0.1", int(port)


def default_socket(environ: Mapping[str, str]) -> str:
    """In a directory that only this user can enter."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    base = os.path.join(runtime, "toolhost-broker") if runtime else f"/tmp/toolhost-broker-{os.getuid()}"
    return os.path.join(base, "broker.sock")


def operator_socket(socket: str) -> str:
    return socket + OPERATOR
