"""The ASGI app: who asks, which route, and an answer to every request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from broker import errors
from broker.addresses import address
from broker.errors import Refusal
from broker.faces.caller import Asker, FaceCall
from broker.faces.http.request import HungUp, Request, Response, refused, trouble

if TYPE_CHECKING:
    from broker.policy.rights import Book
    from broker.server import Broker
    from broker.settings import Http

Start = Callable[[Request, bytes, Callable[[Response], object]], FaceCall | Awaitable[object] | None]
Handler = Callable[[Request], Awaitable[Response]]
ANONYMOUS = "http:anonymous"
OPEN = {"/healthz", "/livez", "/readyz"}  # whoever watches us has no token
USUAL = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
AUTOSAGES = ("/v1/", "/healthz", "/openapi.")  # a wrong method is an unknown route there
# Of other pages; `*` would not mean tokens.
MAY_SEND = b"authorization, broker-lease, broker-session, content-type, idempotency-key, traceparent, x-request-id"
PREFLIGHT = (
    (b"access-control-allow-headers", MAY_SEND),
    (b"access-control-max-age", b"600"),
)
UNKNOWN = trouble(404, "not_found", "Unknown route.")


class App:
    def __init__(self, broker: Broker, settings: Http, loopback: bool) -> None:
        self._broker = broker
        self._cors = {origin.encode() for origin in settings.cors}
        self._loopback = loopback
        self._insecure = broker.settings.server.insecure
        host = address(settings.listen, "--http")[0].lower()
        self._hosts = {b"localhost", b"127.0.0.1", b"[::1]", host.encode(), f"[{host}]".encode()}
        self.start: Start | None = None  # how the route of most calls begins
        self._routes: dict[tuple[str, str], Handler] = {}
        self._prefixes: list[tuple[str, str, Handler]] = []
        self._shapes: dict[str, Callable[[Request, Response, Refusal], Response]] = {}
        self._forms: dict[str, Callable[[Response, Refusal], Response]] = {}
        self.open = set(OPEN)
        self.use_rights(broker.face.rights)

    def use_rights(self, rights: Book) -> None:
        self._rights = rights
        self._anonymous = self._asker(ANONYMOUS)

    def _asker(self, principal: str) -> Asker:
        rights = self._rights.of(principal)
        plain = self._broker.registry.plain_of(rights)
        return Asker(principal, rights, rights.operator and principal != ANONYMOUS, plain)

    def route(self, method: str, path: str, handler: Handler) -> None:
        """A path that ends with `/*` stands for all below it."""
        if path.endswith("/*"):
            self._prefixes.append((method, path[:-1], handler))
        else:
            self._routes[method, path] = handler

    def shape(self, path: str, refuse: Callable[[Request, Response, Refusal], Response]) -> None:
        """How a route says what it is not even asked about: its clients know one form of answer."""
        self._shapes[path] = refuse

    def take_forms(self, prefix: str, refuse: Callable[[Response, Refusal], Response]) -> None:
        """What is posted below it is a form with a file; and how it says what it is not even asked about."""
        self._forms[prefix] = refuse

    def _form(self, request: Request) -> Callable[[Response, Refusal], Response] | None:
        posted = self._forms.items() if request.method == "POST" else ()
        return next((refuse for prefix, refuse in posted if request.path.startswith(prefix)), None)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        request = Request(
            scope["method"],
            scope["path"],
            scope["headers"],
            scope.get("broker"),
            receive,
            scope["query_string"],
            scope.get("raw_path") or scope["path"].encode(),
        )
        try:
            response = await self._answer(request)
        except HungUp:
            return
        except Exception as error:
            self._broker.log.error("internal error", route=request.path, reason=repr(error))
            response = refused(Refusal(errors.INTERNAL, "the broker made a mistake; its log says which"))
        await self._send(request, response, send)

    def begin(self, request: Request, body: bytes, done: Callable[[Response], object]) -> None:
        """A call whose body is here already, without a task of its own (see protocol.py)."""
        assert self.start is not None
        started: FaceCall | Awaitable[object] | None = None
        try:
            refusal = self._identify(request)
            if refusal is None:
                started = self.start(request, body, done)
            else:
                done(self._shapes[request.path](request, refused(refusal), refusal))
        except Exception as error:
            self._broker.log.error("internal error", route=request.path, reason=repr(error))
            done(refused(Refusal(errors.INTERNAL, "the broker made a mistake; its log says which")))
        if isinstance(started, FaceCall):
            if started.waiting() and request.link is not None:
                request.link.call = started
        elif started is not None:
            waiting = asyncio.ensure_future(started)
            waiting.add_done_callback(lambda _: self.begin(request, body, done))

    async def _answer(self, request: Request) -> Response:
        method, path = request.method, request.path
        handler = self._routes.get((method, path))
        if handler is None:
            handler = next((h for m, start, h in self._prefixes if m == method and path.startswith(start)), None)
        if method == "OPTIONS" and request.headers.get(b"origin") in self._cors:
            return Response(204, b"", b"", PREFLIGHT)  # a browser shows no token when it asks whether it may
        refusal = self._identify(request)
        if refusal is not None and path not in self.open:
            response, shape = refused(refusal), self._shapes.get(path)
            if (form := self._form(request)) is not None:
                return form(response, refusal)
            return shape(request, response, refusal) if shape is not None and method == "POST" else response
        if handler is not None:
            return await handler(request)
        known = [m for m, start, _ in self._prefixes if path.startswith(start)] + [
            m for m, p in self._routes if p == path
        ]
        if known and (method not in USUAL or not path.startswith(AUTOSAGES)):
            answer = trouble(405, "method_not_allowed", f"{method} is not served here.")
            return answer._replace(headers=((b"allow", ", ".join(sorted(known)).encode()),))
        return UNKNOWN

    def turned_away(self, request: Request) -> bool:
        """Its token has been revoked since."""
        return self._identify(request) is not None

    # --- who is it? -------------------------------------------------------------------------------------------------

    def _identify(self, request: Request) -> Refusal | None:
        headers = request.headers
        shown = headers.get(b"authorization")
        request.asker = self._anonymous
        if shown is not None:
            kind, _, secret = shown.decode("latin-1").partition(" ")
            token = self._broker.door.find(secret.strip()) if kind.lower() == "bearer" else None
            if token is None:
                text = "there is no such token (Authorization: Bearer …); `broker token new NAME` makes one"
                return Refusal(errors.FORBIDDEN, text)
            request.asker = self._asker(f"token:{token.name}")
            return None
        if not self._loopback:
            if self._insecure:
                return None
            return Refusal(
                errors.FORBIDDEN, "a token is needed: Authorization: Bearer …; `broker token new NAME` makes one"
            )
        return self._from_a_page(request)

    def _from_a_page(self, request: Request) -> Refusal | None:
        """Whoever has no token is on this machine; but so is a browser, which pages from elsewhere may use."""
        headers = request.headers
        host = headers.get(b"host", b"localhost").lower()
        if host not in self._hosts and host.rpartition(b":")[0] not in self._hosts:  # the port is anybody's
            shown = host.decode("latin-1")
            return Refusal(errors.FORBIDDEN, f"Host {shown!r} is not this machine; use 127.0.0.1, or a token")
        origin = headers.get(b"origin")
        if origin is not None and origin not in self._cors and origin.partition(b"://")[2] != host:
            return Refusal(errors.FORBIDDEN, "pages from elsewhere may not call (http.cors)")
        if request.method == "POST":
            wanted = b"application/json" if self._form(request) is None else b"multipart/form-data"
            kind = headers.get(b"content-type")
            if kind is not None and kind.partition(b";")[0].strip().lower() != wanted:
                return Refusal(errors.BAD_REQUEST, f"Content-Type must be {wanted.decode()}")
            # Any page may have a browser post a form, without asking first. It says where from: in Origin, and here.
            elsewhere = headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
            if elsewhere and origin is None:
                return Refusal(errors.FORBIDDEN, "pages from elsewhere may not call")
        return None

    # --- the answer -------------------------------------------------------------------------------------------------

    def lines(self, request: Request, response: Response) -> bytes:
        """The response's headers, as they are written."""
        body = response.body
        if response.headers or self._cors or b"traceparent" in request.headers or not isinstance(body, bytes):
            return b"".join([b"%b: %b\r\n" % header for header in self.headers(request, response)])
        return b"x-request-id: %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n" % (
            request.id,
            response.type,
            len(body),
        )

    def headers(self, request: Request, response: Response) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", request.id), *response.headers]
        if response.type:
            headers.append((b"content-type", response.type))
        if isinstance(response.body, bytes):
            headers.append((b"content-length", b"%d" % len(response.body)))
        if b"traceparent" in request.headers and (trace := request.trace()):
            headers.append((b"traceparent", trace))
        if self._cors and (origin := request.headers.get(b"origin")) in self._cors:
            headers += [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
            headers.append((b"access-control-expose-headers", b"retry-after, traceparent, x-request-id"))
        return headers

    async def _send(self, request: Request, response: Response, send: Any) -> None:
        body = response.body
        headers = self.headers(request, response)
        endless = not isinstance(body, bytes) and not any(name == b"content-length" for name, _ in headers)
        old = endless and request.link is not None and request.link.is_old()
        if old:
            headers.append((b"connection", b"close"))
            request.link.begin_unmeasured()
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        if isinstance(body, bytes):
            await send({"type": "http.response.body", "body": body})
            return
        async with aclosing(body):
            async for part in body:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                if request.link is not None and request.link.transport.is_closing():
                    return  # nobody is there any more
        if old:
            request.link.end_unmeasured()
        await send({"type": "http.response.body", "body": b""})
