"""A TCP listener for a face: beyond loopback only where callers have to show who they are, or somebody has said so."""

from __future__ import annotations

import ipaddress
import socket

from broker.addresses import address
from broker.errors import ConfigError


def bind(text: str, flag: str, *, trusted: bool) -> tuple[socket.socket, bool]:
    """Bound to HOST:PORT, and whether that is loopback."""
    host, port = address(text, flag)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        loopback = ipaddress.ip_address(place[0]).is_loopback
        if not loopback and not trusted:
            raise ConfigError(
                f"{flag} {text} would let anybody who reaches this machine call every tool: make a token first "
                "(broker token new NAME), use 127.0.0.1, or say --insecure if the network in front of it is closed"
            )
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except OSError as error:
        raise ConfigError(f"cannot listen on {flag} {text}: {error.strerror or error}") from None
    return listener, loopback
