"""What event tools have made: the state of a session, and their assets."""

from __future__ import annotations

import asyncio
import os
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from broker.assets import ROUTE, open_asset
from broker.faces.http.files import sent_in_part
from broker.faces.http.request import Request, Response, answered, trouble
from broker.policy.story import EMPTY

if TYPE_CHECKING:
    from broker.faces.http.app import App
    from broker.server import Broker

SESSIONS, STATE = "/v1/sessions/", "/state"
HARMLESS = ("image/", "audio/", "video/", "text/plain")  # a browser may show it; SVG can be a program
MEDIA_TYPE = re.compile(r"[\w!#$&^.+-]+/[\w!#$&^.+-]+( *;[ -~]*)?", re.ASCII)
SANDBOX = ((b"content-security-policy", b"sandbox; default-src 'none'"), (b"x-content-type-options", b"nosniff"))


class SessionRoutes:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def add_routes(self, app: App) -> None:
        app.route("GET", f"{SESSIONS}*", self.state)
        app.route("DELETE", f"{SESSIONS}*", self.clear)
        app.route("GET", ROUTE.rstrip("/"), self.assets)
        app.route("GET", f"{ROUTE}*", self.asset)
        app.route("HEAD", f"{ROUTE}*", self.asset)

    async def state(self, request: Request) -> Response:
        """The asker's own session of this name; one that nobody has patched is empty."""
        name = _session(request)
        if not name:
            return trouble(404, "not_found", "Unknown route.")
        session = self._broker.dispatcher.sessions.find((request.asker.principal, name))
        state = session.text if session is not None else EMPTY
        return answered({"session": name, "state": msgspec.Raw(state)})

    async def clear(self, request: Request) -> Response:
        name = _session(request)
        if not name:
            return trouble(404, "not_found", "Unknown route.")
        cleared = self._broker.dispatcher.sessions.forget_story((request.asker.principal, name))
        return answered({"session": name, "cleared": cleared})

    async def assets(self, request: Request) -> Response:
        asker = request.asker
        return answered(
            {"assets": [one.told() for one in self._broker.equipment.assets.of(asker.principal, asker.operator)]}
        )

    async def asset(self, request: Request) -> Response:
        """The file as it is now."""
        name, asker = request.path.removeprefix(ROUTE), request.asker
        asset = self._broker.equipment.assets.get(name)
        if asset is None or not (asker.operator or asset.who == asker.principal):
            return trouble(404, "not_found", f"Asset not found: {name}.")
        found = await asyncio.to_thread(open_asset, asset)
        if isinstance(found, str):
            return trouble(404, "not_found", f"The file of {name} is gone: {found}.")
        kind = _kind(asset.media_type)
        shown = kind.startswith(HARMLESS) and not kind.startswith("image/svg")
        place = b'%b; filename="%b"' % (b"inline" if shown else b"attachment", _file_name(asset.path))
        return sent_in_part(request, found, kind.encode(), (*SANDBOX, (b"content-disposition", place)))


def _session(request: Request) -> str:
    """The name between the two ends of the path; it may have a slash in it, as %2F."""
    path = request.raw_path
    inner = path.removeprefix(SESSIONS).removesuffix(STATE)
    return unquote(inner) if path.endswith(STATE) and inner and "/" not in inner else ""


def _file_name(path: str) -> bytes:
    """What may stand between quotes in a header."""
    plain = (one if " " <= one <= "~" and one not in '"\\' else "_" for one in os.path.basename(path))
    return "".join(plain).encode()


def _kind(media_type: str) -> str:
    """What stands in a header: a type that is none is unknown."""
    found = MEDIA_TYPE.fullmatch(media_type.strip())
    return found[0].lower() if found is not None else "application/octet-stream"
