"""Files that event tools have told of: looked at before they are registered, and again when they are asked for."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

MOST = 4096  # the oldest ones go
ROUTE = "/v1/assets/"
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Found(NamedTuple):
    """A file that may be registered."""

    path: str  # its real one
    size: int


class Asset(msgspec.Struct):
    """One that is registered."""

    id: str
    asset_id: str  # the tool's own name for it
    kind: str
    media_type: str
    bytes: int
    tool: str
    metadata: Any
    path: str
    who: str
    roots: tuple[str, ...]

    def told(self) -> dict[str, Any]:
        """What its caller may know of it."""
        shown = {name: getattr(self, name) for name in ("id", "kind", "bytes", "tool")}
        shown |= {"assetId": self.asset_id, "mediaType": self.media_type, "url": ROUTE + self.id}
        return shown | ({"metadata": self.metadata} if self.metadata is not None else {})


def examine(path: str, roots: Sequence[str]) -> Found | str:
    """An existing, readable, regular file, below one of the roots where there are any; or why not. May block."""
    try:
        fd = os.open(path, READ)
    except ValueError:
        return "its path has a NUL character in it"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    try:
        found = os.fstat(fd)
        real = os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    if not stat.S_ISREG(found.st_mode):
        return f"{path} is not a regular file"
    if roots and not any(_is_below(real, root) for root in roots):
        return f"{path} is not below one of the allowed roots (assets, of its [[events]])"
    return Found(real, found.st_size)


def _is_below(path: str, root: str) -> bool:
    return path.startswith(os.path.realpath(root).rstrip("/") + "/")


class Assets:
    """All that are registered, the oldest first."""

    def __init__(self) -> None:
        self._assets: OrderedDict[str, Asset] = OrderedDict()
        self._count = 0

    def register(self, found: Found, body: Any, tool: str, who: str, roots: tuple[str, ...]) -> Asset:
        """`body` is the event; `who` its caller's principal."""
        self._count += 1
        name = f"asset_{self._count:06d}"
        metadata = body.metadata if body.metadata is not msgspec.UNSET else None
        asset = Asset(
            name, body.id, body.kind, body.media_type, found.size, tool, metadata, found.path, who, roots
        )  # fmt: skip
        self._assets[name] = asset
        if len(self._assets) > MOST:
            self._assets.popitem(last=False)
        return asset

    def of(self, who: str, everybody: bool) -> list[Asset]:
        return [asset for asset in self._assets.values() if everybody or asset.who == who]

    def get(self, name: str) -> Asset | None:
        return self._assets.get(name)


def open_asset(asset: Asset) -> int | str:
    """A descriptor of the file as it is now, under the same rules; or why not. May block."""
    found = examine(asset.path, asset.roots)
    if isinstance(found, str):
        return found
    try:
        return os.open(found.path, READ | os.O_NOFOLLOW)
    except OSError as error:
        return f"{asset.path} cannot be read: {error.strerror}"
