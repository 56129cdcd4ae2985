"""Which server an address means. Only what can be read in one way is read at all."""

from __future__ import annotations

import re
from typing import NamedTuple

PORTS = {"http": 80, "https": 443}
# No user, no escapes, no backslash, no other alphabet, no dot at the end; nothing behind the path.
_ADDRESS = re.compile(
    r"(https?)://([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?((?:/[a-z0-9._~/-]*)?)",
    re.ASCII | re.IGNORECASE,
)


class Origin(NamedTuple):
    scheme: str
    host: str  # without the brackets of IPv6
    port: int

    @property
    def authority(self) -> str:
        """As the Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def read(address: str) -> tuple[Origin, str] | None:
    """The server, and the path behind it; None: it is not an address of the plain kind."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return None
    scheme = found[1].lower()
    port = int(found[3]) if found[3] else PORTS[scheme]
    return (Origin(scheme, found[2].lower().strip("[]"), port), found[4]) if 0 < port < 65536 else None


def origin(address: str) -> Origin | None:
    """The same where no path may be."""
    found = read(address)
    return found[0] if found is not None and found[1] in ("", "/") else None
