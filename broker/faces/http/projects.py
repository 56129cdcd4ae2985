"""CommonGround's management of tools: `POST /projects/{project_id}/tools`, a definition in YAML."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from broker import errors
from broker.errors import Refusal
from broker.faces.http.form import FORM, BadForm, file_of, is_form
from broker.faces.http.request import Request, Response, answered
from broker.utp import definitions

if TYPE_CHECKING:
    from broker.faces.http.app import App
    from broker.observe.log import Log
    from broker.utp.management import Management

PREFIX = "/projects/"
PATH = re.compile(r"/projects/([^/]+)/tools")
PART = "file"
FORM_BYTES = definitions.MOST_BYTES + 16 * 1024
OPERATORS_ONLY = (
    'definitions of tools are the operator\'s here (utp.manage = "operator"): Authorization: Bearer TOKEN of one, '
    "or `broker utp tool add FILE`"
)
NOT_OVER_THE_NET = (
    "from other machines only an operator defines tools: Authorization: Bearer TOKEN of one (see [[principal]])"
)


class Projects:
    def __init__(self, management: Management, manage: str, loopback: bool, log: Log) -> None:
        self._management = management
        self._open = manage == "local" and loopback  # to whoever may call
        self._closed = OPERATORS_ONLY if manage == "operator" else NOT_OVER_THE_NET
        self._log = log

    def add_routes(self, app: App) -> None:
        app.route("POST", f"{PREFIX}*", self._add)
        app.take_forms(PREFIX, refused)

    async def _add(self, request: Request) -> Response:
        path = PATH.fullmatch(request.path)
        if path is None:
            return _said(errors.NOT_FOUND, "there is only POST /projects/{project_id}/tools")
        if not self._open and not request.asker.operator:
            return _said(errors.FORBIDDEN, self._closed)
        kind = request.headers.get(b"content-type", b"")
        body = await request.body(FORM_BYTES)
        if body is None:
            return _said(errors.TOO_LARGE, f"the form is over {FORM_BYTES} bytes; a definition is a few kilobytes")
        try:
            file = file_of(kind, body, PART) if is_form(kind) else None
        except BadForm as error:
            return _said(errors.BAD_REQUEST, f"the body is not {FORM}: {error}")
        if file is None:
            return _missing()
        definition = await self._management.add(path[1], file)
        if isinstance(definition, Refusal):
            return _said(definition.kind, definition.text)
        self._log.info(
            "tool defined", project=definition.project_id, tool=definition.tool_name, who=request.asker.principal
        )
        return answered(definition, 201)


def refused(response: Response, refusal: Refusal) -> Response:
    """What the app does not even ask about, in this route's words."""
    return _said(refusal.kind, refusal.text)._replace(headers=response.headers)


def _said(kind: errors.Kind, text: str) -> Response:
    return answered({"detail": {"error_code": kind.utp, "error_message": text}}, kind.http)


def _missing() -> Response:
    """As FastAPI, on which its own management is built, says it."""
    missing = {"type": "missing", "loc": ["body", PART], "msg": "Field required", "input": None}
    return answered({"detail": [missing]}, 422)
