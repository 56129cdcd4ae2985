"""An open file as a response: whole if it is small, else in parts, and never more than was announced."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator

from broker.faces.http.request import Request, Response

CHUNK = 256 * 1024
RANGE = re.compile(rb"bytes=(\d{0,18})-(\d{0,18})")

Headers = tuple[tuple[bytes, bytes], ...]


def sent(fd: int, kind: bytes, headers: Headers) -> Response:
    """The descriptor is closed in the end."""
    return _response(200, fd, os.fstat(fd).st_size, kind, headers)


def sent_in_part(request: Request, fd: int, kind: bytes, headers: Headers) -> Response:
    """The same; or the one part of it that is asked for, as players of sound and film do; or its head alone."""
    size = os.fstat(fd).st_size
    headers = (*headers, (b"accept-ranges", b"bytes"))
    if request.method == "HEAD":
        os.close(fd)
        return Response(200, _nothing(), kind, (*headers, (b"content-length", b"%d" % size)))
    part = _part(request, size)
    if part is None:
        return _response(200, fd, size, kind, headers)
    start, length = part
    if not length:
        os.close(fd)
        return Response(416, b"", b"", (*headers, (b"content-range", b"bytes */%d" % size)))
    os.lseek(fd, start, os.SEEK_SET)
    shown = b"bytes %d-%d/%d" % (start, start + length - 1, size)
    return _response(206, fd, length, kind, (*headers, (b"content-range", shown)))


def _part(request: Request, size: int) -> tuple[int, int] | None:
    """Where it starts, and its length, 0 where there is no such part; None: all of it."""
    found = RANGE.fullmatch(request.headers.get(b"range", b"").strip())
    if found is None or b"if-range" in request.headers or not any(found.groups()):
        return None
    first, last = found.groups()
    if not first:
        length = min(int(last), size)
        return size - length, length
    if last and int(last) < int(first):
        return None
    end = min(int(last), size - 1) if last else size - 1
    return int(first), max(0, end - int(first) + 1)


def _response(status: int, fd: int, size: int, kind: bytes, headers: Headers) -> Response:
    if size > CHUNK:
        return Response(status, _read(fd, size), kind, (*headers, (b"content-length", b"%d" % size)))
    try:
        return Response(status, os.read(fd, size), kind, headers)
    finally:
        os.close(fd)


async def _read(fd: int, size: int) -> AsyncGenerator[bytes, None]:
    try:
        while size > 0 and (part := await asyncio.to_thread(os.read, fd, min(CHUNK, size))):
            size -= len(part)
            yield part
    finally:
        os.close(fd)


async def _nothing() -> AsyncGenerator[bytes, None]:
    yield b""
