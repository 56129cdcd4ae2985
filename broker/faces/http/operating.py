"""What an operator looks at, and says, over HTTP: metrics, health, the status, once or as a stream; control words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec

from broker import errors
from broker.errors import Refusal
from broker.faces.http.request import Request, Response, answered, refused
from broker.observe import health, metrics, status
from broker.pool.verdicts import unquoted
from broker.wire import is_json

if TYPE_CHECKING:
    from broker.faces.http.app import App
    from broker.server import Broker

WORDS = (
    *("lease.issue", "lease.list", "lease.revoke", "lease.gc", "breaker.reset", "pause", "resume", "reload"),
    *("queue.status", "queue.dead", "queue.requeue"),
)
PREFIX = "/operator/"
BODY_BYTES = 64 * 1024
MOST_WATCHERS = 64
BEAT_SECONDS = 1.0
TEXT = b"text/plain; charset=utf-8"
FRESH = ((b"cache-control", b"no-store"),)
OPERATORS_ONLY = (
    "this is the operator's: `broker token new NAME` makes a token; the configuration makes it an operator's: "
    '[[principal]] name = "token:NAME" operator = true; then Authorization: Bearer TOKEN'
)


class Operating:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._watchers: set[_Watcher] = set()
        self._beat: asyncio.Task[None] | None = None
        self._last = b""  # what all that watch have been told last
        self._ended = False

    def add_routes(self, app: App) -> None:
        self._app = app
        app.route("GET", "/metrics", self._metrics)
        app.route("GET", "/livez", self._live)
        app.route("GET", "/readyz", self._ready)
        app.route("GET", "/status", self._status)
        app.route("GET", "/status/stream", self._stream)
        app.route("POST", f"{PREFIX}*", self._word)

    # --- what it says of itself -------------------------------------------------------------------------------------

    async def _metrics(self, request: Request) -> Response:  # noqa: ARG002
        body, kind = metrics.exposition(self._broker)
        return Response(200, body, kind.encode(), FRESH)

    async def _live(self, request: Request) -> Response:  # noqa: ARG002
        return Response(200, b"ok\n", TEXT, FRESH)

    async def _ready(self, request: Request) -> Response:  # noqa: ARG002
        reasons = health.ready(self._broker)
        text = "\n".join(reasons) if reasons else "ok"
        return Response(503 if reasons else 200, f"{text}\n".encode(), TEXT, FRESH)

    async def _status(self, request: Request) -> Response:  # noqa: ARG002
        return answered(public(self._broker))._replace(headers=FRESH)

    # --- once a second ----------------------------------------------------------------------------------------------

    async def _stream(self, request: Request) -> Response:
        if self._ended:
            return refused(Refusal(errors.DRAINING, "the broker is shutting down; ask again when it is back"))
        if len(self._watchers) >= MOST_WATCHERS:
            text = f"{MOST_WATCHERS} watch already, and that is the most; /status says the same once"
            return refused(Refusal(errors.OVERLOADED, text, retry_after=1))
        watcher = _Watcher(request)
        self._watchers.add(watcher)
        if self._beat is None:
            self._beat = asyncio.create_task(self._go_on())
        elif self._last:
            watcher.tell(self._last)
        return Response(200, self._parts(watcher), b"text/event-stream", FRESH)

    async def _parts(self, watcher: _Watcher) -> AsyncGenerator[bytes, None]:
        try:
            while part := await watcher.next():
                yield part
        finally:
            self._watchers.discard(watcher)

    async def _go_on(self) -> None:
        """One report for all; none when nobody watches."""
        try:
            while self._watchers:
                self._last = b"data: " + msgspec.json.encode(public(self._broker)) + b"\n\n"
                for watcher in self._watchers:
                    watcher.tell(self._last)
                await asyncio.sleep(BEAT_SECONDS)
                for watcher in [one for one in self._watchers if one.has_left() or self._app.turned_away(one.request)]:
                    watcher.end()
                    self._watchers.discard(watcher)
        except Exception as error:
            self._broker.log.error("internal error", route="/status/stream", reason=repr(error))
            for watcher in self._watchers:
                watcher.end()
        finally:
            self._beat, self._last = None, b""

    def end(self) -> None:
        """The broker stops: nobody waits for those who only watch."""
        self._ended = True
        if self._beat is not None:
            self._beat.cancel()
        last = b""
        if self._watchers:
            last = b"data: " + msgspec.json.encode(public(self._broker) | {"draining": True}) + b"\n\n"
        for watcher in self._watchers:
            watcher.end(last)

    # --- the operator's words ---------------------------------------------------------------------------------------

    async def _word(self, request: Request) -> Response:
        word = request.path.removeprefix(PREFIX)
        if not request.asker.operator:
            return refused(Refusal(errors.FORBIDDEN, OPERATORS_ONLY))
        if word not in WORDS:
            return refused(Refusal(errors.NOT_FOUND, f"there is no such word; there are: {', '.join(WORDS)}"))
        body = await request.body(BODY_BYTES)
        if body is None:
            return refused(Refusal(errors.TOO_LARGE, f"the body is over {BODY_BYTES} bytes"))
        if body and not is_json(body, self._broker.settings.limits.depth):
            return refused(Refusal(errors.BAD_REQUEST, "the body is not JSON"))
        answer = await self._broker.control(request.asker, f"_{word}", body or b"{}")
        self._broker.core.flush()
        return refused(answer) if isinstance(answer, Refusal) else answered({"ok": True, **answer})


class _Watcher:
    """One who watches. Who reads too slowly misses some, and holds no more than the newest."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._link = request.link
        self._newest = b""
        self._bell = asyncio.Event()
        self._over = False

    def tell(self, part: bytes) -> None:
        self._newest = part
        self._bell.set()

    async def next(self) -> bytes:
        """Empty at the end."""
        await self._bell.wait()
        newest, self._newest = self._newest, b""
        if not self._over:
            self._bell.clear()
        return newest

    def has_left(self) -> bool:
        """Writing to somebody who is gone would not fail."""
        return self._link is None or bool(self._link.transport.is_closing())

    def end(self, last: bytes = b"") -> None:
        """After this, where there is something to say."""
        self._newest = last
        self._over = True
        self._bell.set()
        if self._link is not None and self._link.transport.get_write_buffer_size():  # it does not read what it has
            self._link.transport.abort()


def public(broker: Broker) -> dict[str, Any]:
    """The status for everybody who may call: nothing that a tool has said is quoted in it."""
    report = status.report(broker)
    for pool in report["pools"]:
        pool["reason"] = unquoted(pool["reason"])
    for tool in report["tools"]:
        tool["breaker_reason"] = unquoted(tool["breaker_reason"])
    if "utp" in report:
        del report["utp"]["given_up"]  # agents' own names
    return report
