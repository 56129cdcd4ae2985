"""The page at `/`: a fixed list of files, read once, that load nothing from anywhere else."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from broker.faces.http.request import Request, Response

if TYPE_CHECKING:
    from broker.faces.http.app import App, Handler

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
NAMES = (
    INDEX,
    "page.css",
    "icon.svg",
    "page.js",
    "api.js",
    "charts.js",
    "dom.js",
    "fields.js",
    "format.js",
    "live.js",
    "operator.js",
    "panels.js",
    "parts.js",
    "picker.js",
    "pools.js",
    "report.js",
    "stream.js",
    "tools.js",
    "try.js",
)
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
POLICY = (  # what tools are called and say is theirs: none of it may become a program, here or in a frame
    b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
GUARDS = (
    (b"content-security-policy", POLICY),
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class _File(NamedTuple):
    content: bytes
    type: bytes
    tag: bytes


def add_routes(app: App) -> None:
    """Anybody may read them: there is nothing in them. What they show is asked for with the caller's token."""
    for name in NAMES:
        path = "/" if name == INDEX else f"/static/{name}"
        app.route("GET", path, _handler(_read(name)))
        app.open.add(path)


def _read(name: str) -> _File:
    content = (FOLDER / name).read_bytes()
    tag = b'"%s"' % hashlib.sha256(content).hexdigest()[:24].encode()
    return _File(content, TYPES[Path(name).suffix], tag)


def _handler(file: _File) -> Handler:
    headers = (*GUARDS, (b"etag", file.tag))

    async def answer(request: Request) -> Response:
        if file.tag in request.headers.get(b"if-none-match", b""):
            return Response(304, b"", b"", headers)
        return Response(200, file.content, file.type, headers)

    return answer
