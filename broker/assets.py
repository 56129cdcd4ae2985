"""Files that event tools have told of: looked at before they are registered, and again when they are asked for."""

from __future__ import annotations

import os
import secrets
import stat
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

MOST = 4096  # the oldest ones go,
MOST_BYTES = 4 * 1024 * 1024  # also when all that is known of them together is longer
ROUTE = "/v1/assets/"
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
LOOK = os.O_PATH | os.O_CLOEXEC  # nothing happens to a device, or a pipe
LONGEST_PATH = 200  # that is quoted

_encode = msgspec.json.Encoder().encode


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
    metadata: Raw | None
    path: str
    who: str
    roots: tuple[str, ...]

    def told(self) -> dict[str, Any]:
        """What its caller may know of it."""
        shown = {name: getattr(self, name) for name in ("id", "kind", "bytes", "tool")}
        shown |= {"assetId": self.asset_id, "mediaType": self.media_type, "url": ROUTE + self.id}
        return shown | ({"metadata": self.metadata} if self.metadata is not None else {})

    def size(self) -> int:
        """What it costs to know of it."""
        return len(_encode(self.told())) + len(self.path)


def examine(path: str, roots: Sequence[str]) -> Found | str:
    """An existing, readable, regular file, below one of the roots where there are any; or why not. May block."""
    opened = _opened(path, roots)
    if isinstance(opened, str):
        return opened
    fd, found = opened
    os.close(fd)
    return found


def _opened(path: str, roots: Sequence[str]) -> tuple[int, Found] | str:
    """The file is opened when it is known what it is, and where: whatever stands at its path by then."""
    shown = path if len(path) <= LONGEST_PATH else f"{path[:LONGEST_PATH]} …"
    try:
        look = os.open(path, LOOK)
    except ValueError:
        return "its path has a NUL character in it"
    except OSError as error:
        return f"{shown} cannot be read: {error.strerror}"
    try:
        found, itself = os.fstat(look), f"/proc/self/fd/{look}"
        real = os.readlink(itself)
        real.encode()
        if not stat.S_ISREG(found.st_mode):
            return f"{shown} is not a regular file"
        if roots and not any(_is_below(real, root) for root in roots):
            return f"{shown} is not below one of the allowed roots (assets, of its [[events]])"
        return os.open(itself, READ), Found(real, found.st_size)
    except UnicodeEncodeError:
        return f"{shown} leads to a name that is not UTF-8"
    except OSError as error:
        return f"{shown} cannot be read: {error.strerror}"
    finally:
        os.close(look)


def _is_below(path: str, root: str) -> bool:
    return path.startswith(os.path.realpath(root).rstrip("/") + "/")


class Assets:
    """All that are registered, the oldest first."""

    def __init__(self) -> None:
        self._assets: OrderedDict[str, tuple[Asset, int]] = OrderedDict()  # with what they cost
        self._run = secrets.token_hex(4)  # a name is never given out twice, also not after a restart
        self._count = 0
        self._size = 0

    def register(self, found: Found, body: Any, tool: str, who: str, roots: tuple[str, ...]) -> Asset:
        """`body` is the event; `who` its caller's principal."""
        self._count += 1
        name = f"asset_{self._run}_{self._count:06d}"
        metadata = Raw(_encode(body.metadata)) if body.metadata is not msgspec.UNSET else None
        asset = Asset(
            name, body.id, body.kind, body.media_type, found.size, tool, metadata, found.path, who, roots
        )  # fmt: skip
        size = asset.size()
        self._assets[name] = asset, size
        self._size += size
        while len(self._assets) > MOST or (self._size > MOST_BYTES and len(self._assets) > 1):
            _, (_, size) = self._assets.popitem(last=False)
            self._size -= size
        return asset

    def of(self, who: str, everybody: bool) -> list[Asset]:
        return [asset for asset, _ in self._assets.values() if everybody or asset.who == who]

    def get(self, name: str) -> Asset | None:
        found = self._assets.get(name)
        return found[0] if found is not None else None


def open_asset(asset: Asset) -> int | str:
    """A descriptor of the file as it is now, under the same rules; or why not. May block."""
    opened = _opened(asset.path, asset.roots)
    if isinstance(opened, str):
        return opened
    fd, found = opened
    if found.path != asset.path:
        os.close(fd)
        return f"{asset.path} leads elsewhere now"
    return fd
