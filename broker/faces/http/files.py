"""An open file as a response: whole if it is small, else in parts, and never more than was announced."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from broker.faces.http.request import Response

CHUNK = 256 * 1024


def sent(fd: int, kind: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> Response:
    """The descriptor is closed in the end."""
    size = os.fstat(fd).st_size
    if size > CHUNK:
        return Response(200, _read(fd, size), kind, (*headers, (b"content-length", b"%d" % size)))
    try:
        return Response(200, os.read(fd, size), kind, headers)
    finally:
        os.close(fd)


async def _read(fd: int, size: int) -> AsyncIterator[bytes]:
    try:
        while size > 0 and (part := await asyncio.to_thread(os.read, fd, min(CHUNK, size))):
            size -= len(part)
            yield part
    finally:
        os.close(fd)
