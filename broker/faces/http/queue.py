"""Durable calls over HTTP: enqueued with the request object of the line protocol, results by id."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

import msgspec

from broker import errors
from broker.errors import Refusal
from broker.faces.http.request import Request, Response, answered, refused
from broker.wire import is_json

if TYPE_CHECKING:
    from broker.faces.http.app import App
    from broker.server import Broker

QUEUE = "/v1/queue"
QUEUED = 202
WAITING = 202  # there is no result yet

_encode = msgspec.json.Encoder().encode


class QueueRoutes:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def add_routes(self, app: App) -> None:
        app.route("POST", QUEUE, self.enqueue)
        app.route("GET", f"{QUEUE}/*", self.result)

    async def enqueue(self, request: Request) -> Response:
        limits = self._broker.settings.limits
        body = await request.body(limits.request_bytes)
        if body is None:
            text = f"the request is over {limits.request_bytes} bytes (limits.request_bytes)"
            return refused(Refusal(errors.TOO_LARGE, text))
        if not is_json(body, limits.depth):
            return refused(Refusal(errors.BAD_REQUEST, "the body is not JSON"))
        answer = await self._broker.control(request.asker, "_enqueue", b'{"call":%b}' % body)
        if isinstance(answer, Refusal):
            return refused(answer)
        place = f"{QUEUE}/{quote(answer['call_id'], safe='')}".encode()
        return answered(answer, QUEUED)._replace(headers=((b"location", place),))

    async def result(self, request: Request) -> Response:
        """200 with a result, 202 while there is none."""
        call_id = unquote(request.raw_path.removeprefix(f"{QUEUE}/"))
        try:
            seconds = float(request.parameters().get("wait", "0"))
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            return refused(Refusal(errors.BAD_REQUEST, "wait is a number of seconds"))
        asked = _encode({"call_id": call_id, "wait_ms": seconds * 1000})
        answer = await self._broker.control(request.asker, "_result", asked)
        if isinstance(answer, Refusal):
            return refused(answer)
        return answered(answer, 200 if "result" in answer else WAITING)
