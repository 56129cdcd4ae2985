"""namel3ss' service runner: an app with `runner: "service"` finds its tools here.

Its client takes any status but success for a broken service, so errors of a call are said in the body, with status 200.
Only what is no request of the protocol has another one.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from broker import errors
from broker.errors import Refusal
from broker.faces.caller import Asked, Caller, understood
from broker.faces.http.request import Request, Response, answered
from broker.observe import traces
from broker.wire import is_json

if TYPE_CHECKING:
    from broker.faces.http.app import App
    from broker.model import Tool
    from broker.server import Broker

HANDSHAKE = "/capabilities/handshake"
USUAL_MS = 10_000
MARGIN = 0.9  # of the client's patience: it has to hear of a timeout before it gives up
CLASSES = {  # what a Python program would call them
    errors.NOT_FOUND: "ToolNotFound",
    errors.TIMEOUT: "TimeoutError",
    errors.FORBIDDEN: "PermissionError",
    errors.BAD_REQUEST: "ValueError",
    errors.TOO_LARGE: "ValueError",
}


class Asking(Struct):
    """The service protocol's request; what is not named here is tolerated."""

    tool_name: str = ""
    tool: str = ""
    entry: Any = None
    project: Any = None
    protocol_version: Any = 1
    payload: Raw | UnsetType = UNSET
    timeout_ms: float | None = None
    kind: Any = "python"
    trace_id: Any = ""
    idempotency_key: str = ""


class Handshake(Struct):
    """What is required: an object, of whose members those that are false mean nothing; or a list of names."""

    required_guarantees: dict[str, Any] | list[str] | None = None


_asking = msgspec.json.Decoder(Asking)
_said = msgspec.json.Decoder(traces.Said).decode


class Namel3ss:
    def __init__(self, broker: Broker, caller: Caller) -> None:
        self._broker = broker
        self._caller = caller
        file = broker.settings.http.traces
        self._traces = traces.Traces(file, broker.log) if file else None

    def add_routes(self, app: App) -> None:
        app.route("POST", self._broker.settings.http.tools_path, self.call)
        app.route("POST", HANDSHAKE, self.handshake)

    async def call(self, request: Request) -> Response:
        limits = self._broker.settings.limits
        body = await request.body(limits.request_bytes)
        if body is None:
            return _error("ValueError", f"the request is over {limits.request_bytes} bytes (limits.request_bytes)", 413)
        try:
            if not is_json(body, limits.depth):
                raise msgspec.DecodeError(f"invalid JSON, or nested deeper than {limits.depth} levels (limits.depth)")
            asked = _asking.decode(body)
        except msgspec.DecodeError as error:
            return _error("ValueError", f"the request is not of the service protocol: {error}", 400)
        name = asked.tool_name or asked.tool
        if not name:
            return _error("ValueError", 'the request has no "tool_name"', 400)
        began = time.monotonic()
        response = await self._call(request, asked, name)
        if self._traces is not None:
            self._traces.write(self._trace(asked, name, began, response))
        return response

    async def _call(self, request: Request, asked: Asking, name: str) -> Response:
        limits = self._broker.settings.limits
        found = self._by_entry(asked)
        if isinstance(found, tuple):
            return _error(*found)
        tool = found or self._broker.registry.get(name)
        if tool is None:
            return _error("ToolNotFound", f"tool not found: {name}")
        reply = understood(tool, await self._answer(request, tool, asked))
        if isinstance(reply, Refusal):
            return _error(CLASSES.get(reply.kind, reply.kind.code), reply.text)
        if reply.failed():
            if reply.code:  # of a Python tool: its exception's class
                return _error(reply.code, reply.error or "")
            return _error("ToolError", reply.error or f"{name} failed")
        result = reply.output_json.encode()
        if not is_json(result, limits.depth) and not _is_pythons(result):
            return _error("ToolError", f"{name} put out what is not JSON")
        return answered({"ok": True, "result": Raw(result), "protocol_version": asked.protocol_version})

    def _trace(self, asked: Asking, name: str, began: float, response: Response) -> dict[str, Any]:
        """What we know of it: how the app has come to this tool, its client knows."""
        assert self._broker.http is not None
        assert isinstance(response.body, bytes)
        given = b"{}" if asked.payload is UNSET else bytes(asked.payload)
        url = self._broker.http.url + self._broker.settings.http.tools_path
        project = asked.project if isinstance(asked.project, dict) else {}
        return {
            **traces.event(name, asked.kind, asked.entry, given, began, _said(response.body)),
            "runner": "service",
            "service_url": url,
            "timeout_ms": _milliseconds(asked),
            "trace_id": traces.short(asked.trace_id),
            "flow": traces.short(project.get("flow")),
        }

    def close(self) -> None:
        if self._traces is not None:
            self._traces.close()

    def _by_entry(self, asked: Asking) -> Tool | tuple[str, str] | None:
        """A function of one of our apps; what is said of other apps' is what their tools' names say."""
        root = asked.project.get("app_root") if isinstance(asked.project, dict) else None
        if not asked.entry or not isinstance(asked.entry, str) or not isinstance(root, str):
            return None
        if not os.path.isabs(root) or "\0" in root + asked.entry:
            return None
        return self._broker.equipment.entry(root, asked.entry)

    async def _answer(self, request: Request, tool: Tool, asked: Asking) -> bytes | Refusal:
        """Within the client's own time: a tool that takes longer is answered for."""
        milliseconds = _milliseconds(asked)
        key = asked.idempotency_key or request.header(b"idempotency-key")
        more = Asked(milliseconds, key, request.header(b"broker-lease"), request.session(), request=request.name)
        given = "{}" if asked.payload is UNSET else bytes(asked.payload).decode()
        answer: asyncio.Future[bytes | Refusal] = asyncio.get_running_loop().create_future()
        call = self._caller.begin(tool, given, request.asker, answer.set_result, more)
        if request.link is not None:
            request.link.call = call
        try:
            return await asyncio.wait_for(asyncio.shield(answer), milliseconds / 1000 * MARGIN)
        except TimeoutError:
            self._caller.hang_up(call)
            return Refusal(errors.TIMEOUT, f"{tool.name} gave no answer within {milliseconds / 1000:g} s")
        finally:
            if request.link is not None:
                request.link.call = None

    async def handshake(self, request: Request) -> Response:
        """Honestly: tools run as this user, and nothing that namel3ss could ask for is enforced on them."""
        body = await request.body(self._broker.settings.limits.request_bytes)
        try:
            asked = msgspec.json.decode(body or b"", type=Handshake)
        except msgspec.DecodeError as error:
            return _error("ValueError", f"the handshake cannot be understood: {error}", 400)
        required = asked.required_guarantees
        if isinstance(required, dict):
            missing = [name for name, value in required.items() if value not in (False, None)]
        else:
            missing = required or []
        said = {"ok": not missing, "enforcement": "none", "supported_guarantees": [] if required == [] else {}}
        if missing:
            words = f"the broker does not enforce: {', '.join(missing)}"[: traces.LONGEST]
            said["error"] = {"type": "CapabilityViolation", "message": words}
        return answered(said)


def _is_pythons(text: bytes) -> bool:
    """Its client reads with Python's own JSON, which has halves of characters, and is as deep as Python is."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _milliseconds(asked: Asking) -> int:
    return max(1, int(USUAL_MS if asked.timeout_ms is None else asked.timeout_ms))


def _error(kind: str, message: str, status: int = 200) -> Response:
    return answered({"ok": False, "error": {"type": kind, "message": message}}, status)
