"""AutoSage's contract: tools listed and executed, each call a job with files."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from broker import errors
from broker.errors import Refusal
from broker.faces.caller import Asked, Caller, FaceCall, Listener, Said, understood
from broker.faces.http import toolresult
from broker.faces.http.records import descriptor, keys_of, record
from broker.faces.http.request import Request, Response, answered, refused, retry_after, trouble
from broker.faces.http.stream import CallStream, is_wanted
from broker.faces.http.toolresult import DEFAULT, Artifact, AskedLimits, Limits, ToolResult
from broker.jobs import FAILED, SUCCEEDED, Job, Jobs, route, type_of
from broker.model import Tool, ToolInfo
from broker.wire import is_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from broker.faces.http.app import App
    from broker.server import Broker

STABILITIES = ("stable", "experimental", "deprecated")
BUSY_SECONDS = 0.01  # between two looks whether the disk has caught up
EXECUTE, JOBS = "/v1/tools/execute", "/v1/jobs"
NOT_JSON, FAILED_SUMMARY = "Failed to decode request JSON.", "Tool execution failed."
FAULTS = {errors.BAD_REQUEST: "invalid_input", errors.NOT_FOUND: "unknown_tool", errors.OVERLOADED: "too_many_requests"}


class Context(Struct):
    limits: AskedLimits | None = None

    def bounds(self) -> Limits | None:
        return self.limits.bounds() if self.limits is not None else None


class Execute(Struct):
    """POST /v1/tools/execute. What AutoSage does not know of is ours."""

    tool: str
    input: Raw | UnsetType = UNSET
    context: Context | None = None
    idempotency_key: str = ""
    lease_token: str = msgspec.field(name="_lease_token", default="")
    ds_state: Raw | UnsetType = UNSET


class NewJob(Struct):
    """POST /v1/jobs."""

    tool_name: str
    input: Raw | UnsetType = UNSET
    mode: Literal["sync", "async"] | None = None
    wait_ms: int | None = None
    limits: AskedLimits | None = None
    idempotency_key: str = ""
    lease_token: str = msgspec.field(name="_lease_token", default="")


class Slot(Struct):
    content_json: str = ""


class State(Struct):
    slots: dict[str, Slot] = {}


class Outcome(NamedTuple):
    """What became of a call: the HTTP status, the result, and how its job ends."""

    http: int
    result: ToolResult
    code: str = ""  # where it failed
    headers: tuple[tuple[bytes, bytes], ...] = ()


_execute = msgspec.json.Decoder(Execute)
_new_job = msgspec.json.Decoder(NewJob)
_state = msgspec.json.Decoder(State)


class AutoSage:
    def __init__(self, broker: Broker, caller: Caller, jobs: Jobs) -> None:
        self._broker = broker
        self._caller = caller
        self._jobs = jobs
        self._settings = broker.settings.http
        self._running = 0
        self._frames: dict[str, tuple[ToolInfo, bytes]] = {}  # of usual answers, by tool
        self._background: set[asyncio.Event] = set()  # jobs that nobody waits for

    def add_routes(self, app: App) -> None:
        app.route("GET", "/v1/tools", self.tools)
        app.route("POST", EXECUTE, self.execute)
        app.route("POST", JOBS, self.new_job)
        app.shape(EXECUTE, _shaped)
        app.start = self.start

    # --- tools ------------------------------------------------------------------------------------------------------

    async def tools(self, request: Request) -> Response:
        asked = request.parameters()
        stability = asked.get("stability", "").strip().lower()
        if stability and stability not in STABILITIES:
            text = "Invalid stability query value."
            return trouble(400, "invalid_request", text, field="stability", accepted=STABILITIES)
        tags = {tag.strip().lower() for tag in asked.get("tags", "").split(",")} - {""}
        shown = [
            descriptor(tool)
            for tool in self._broker.registry
            if request.asker.rights.allow(tool)
            and stability in ("", tool.info.stability)
            and (not tags or tags & {tag.lower() for tag in tool.info.tags})
        ]
        return answered({"tools": shown})

    # --- execute ----------------------------------------------------------------------------------------------------

    async def execute(self, request: Request) -> Response:
        body = await request.body(self._settings.body_bytes)
        if body is None:
            text = f"Request body exceeds max size ({self._settings.body_bytes} bytes)."
            return _error(request.name, 413, "unknown", text, "payload_too_large")
        listens = is_wanted(request.headers.get(b"accept", b""))
        stream = CallStream(self._broker.face.on_room) if listens else None
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        done = answer.set_result if stream is None else stream.done
        while True:
            started = self.start(request, body, done, stream)
            if isinstance(started, FaceCall) and request.link is not None:
                request.link.call = started
            if stream is not None and (started is None or isinstance(started, FaceCall)):
                return stream.answer or stream.begin()
            if started is None or isinstance(started, FaceCall):
                return await answer
            await started

    def start(
        self,
        request: Request,
        body: bytes,
        done: Callable[[Response], object],
        listener: Listener | None = None,
    ) -> FaceCall | Awaitable[object] | None:
        """Begins a call; its response is told to `done`, perhaps at once. If it cannot begin yet: what to wait for."""
        name = request.name
        if self._running >= self._settings.max_calls:
            done(_error(name, 429, "unknown", "Server is busy; retry shortly.", "too_many_requests", AGAIN))
            return None
        if self._jobs.behind():
            return asyncio.sleep(BUSY_SECONDS)
        asked = self._read(body)
        if isinstance(asked, str):
            stderr = NOT_JSON if body else "Missing request body."
            done(_error(name, 400, "unknown", asked, "invalid_request", stderr=stderr))
            return None
        registry = self._broker.registry
        tool = registry.get(asked.tool) or registry.get(asked.tool.strip())
        if tool is None:
            refreshed = self._broker.equipment.refreshed()  # perhaps a plugin that has just been replaced has it
            if refreshed is not None:
                return refreshed
            done(_unknown(name, asked.tool.strip()))
            return None
        job = self._jobs.new(tool.name, body.decode(), None, request.asker.principal)
        self._jobs.start(job)
        limits = asked.context.bounds() if asked.context is not None else None
        key = asked.idempotency_key or request.header(b"idempotency-key")
        lease = asked.lease_token or request.header(b"broker-lease")
        run = Run(self, tool, job, limits, name, done)
        return self._begin(run, request, asked.input, key, lease, asked.ds_state, listener)

    def _read(self, body: bytes) -> Execute | str:
        """The request, or what it lacks."""
        if not body:
            return "Tool execution request is missing a JSON body."
        try:
            if is_json(body, self._broker.settings.limits.depth):
                return _execute.decode(body)
        except msgspec.DecodeError:
            pass
        return "Tool execution request body is invalid JSON."

    def _begin(
        self,
        run: Run,
        request: Request,
        given: Raw | UnsetType,
        key: str,
        lease: str,
        ds_state: Raw | UnsetType = UNSET,
        listener: Listener | None = None,
    ) -> FaceCall:
        limits, tool = run.limits, run.tool
        place = asked = None
        if tool.info.files:
            place = self._jobs.place(run.job, (limits or DEFAULT).max_artifact_bytes)
        if limits is not None or key or lease or place is not None or ds_state is not UNSET or tool.info.live:
            timeout = max(1, limits.timeout_ms) if limits is not None else None
            state = None if ds_state is UNSET else bytes(ds_state)
            session = request.session()
            asked = Asked(timeout, key, lease, session, state, place, request.name, listener)
        text = bytes(given).decode() if given is not UNSET else "null" if tool.info.checks else "{}"
        self._running += 1
        return self._caller.begin(tool, text, request.asker, run.answered, asked)

    def finish(self, run: Run, answer: bytes | Refusal) -> None:
        """A run has its answer."""
        self._running -= 1
        reply = understood(run.tool, answer)
        took = round((time.perf_counter() - run.begun) * 1000, 3)
        usual = self._usual(run, reply, took) if isinstance(reply, Said) else b""
        if usual:
            self._jobs.succeed(run.job, usual, _ran(run.tool))
            run.done(Response(200, usual))
            return
        outcome = self._outcome(run.tool, reply, run.job)
        result = outcome.result
        if run.tool.info.stability != "stable":
            result.metrics["duration_ms"] = took
        result.metrics["job_id"] = run.job.id
        toolresult.limit(result, run.limits or DEFAULT)
        if run.request:
            result.metrics["request_id"] = run.request
        response = toolresult.encode(result)
        if outcome.code:
            self._jobs.fail(run.job, outcome.code, result.stderr, response)
        else:
            self._jobs.succeed(run.job, response, result.summary)
        run.done(Response(outcome.http, response, headers=outcome.headers))

    def _usual(self, run: Run, reply: Said, took: float) -> bytes:
        """Most answers are a tool's own output, with nothing to cut and no files: those are not taken apart and put
        together again. Empty for all others."""
        tool, output = run.tool, reply.output_json
        if reply.status != "OK" or run.limits is not None or not run.request or tool.info.files:
            return b""
        if b"content_json" in bytes(reply.ds_state) or toolresult.may_be_one(output) or output == "null":
            return b""
        info, frame = self._frames.get(tool.name, (None, b""))
        if info is not tool.info:
            frame = _frame(tool)
            self._frames[tool.name] = tool.info, frame
        whole = output.encode()
        if not frame or not is_json(whole, self._broker.settings.limits.depth):
            return b""
        return frame % (took, run.job.id.encode(), toolresult.encode(run.request), whole)

    def mistake(self, run: Run, error: Exception) -> None:
        """One of ours: it still has to be answered."""
        self._broker.log.error("internal error", aid=run.tool.name, reason=repr(error))
        text = "the broker made a mistake; its log says which"
        self._jobs.fail(run.job, errors.INTERNAL.code, text)
        run.done(
            _error(
                run.request, 500, run.tool.name, FAILED_SUMMARY, errors.INTERNAL.code, stderr=text, job_id=run.job.id
            )
        )

    def _outcome(self, tool: Tool, reply: Said | Refusal, job: Job) -> Outcome:
        """AutoSage's result of a reply, or of a refusal."""
        if isinstance(reply, Refusal):
            kind = reply.kind
            code = FAULTS.get(kind, kind.code)
            result = toolresult.failed(tool.name, FAILED_SUMMARY, reply.text, code, {})
            self._add_output(result, reply.extra.get("output_json", ""))
            return Outcome(kind.http, result, code, retry_after(reply))
        if reply.failed():
            code = reply.code or ("invalid_input" if reply.status == "INVALID_PICK" else errors.TOOL_ERROR.code)
            http = 400 if code == "invalid_input" else 500
            result = toolresult.failed(tool.name, FAILED_SUMMARY, reply.error or f"{tool.name} failed", code, {})
            self._add_output(result, reply.output_json)
            return Outcome(http, result, code)
        output = reply.output_json
        said = toolresult.reported(output, tool.name, job.id) if toolresult.may_be_one(output) else None
        if said is None:
            said = _plain(tool, reply.output_json, self._broker.settings.limits.depth)
            if said is None:
                text = "Tool output could not be normalized to the ToolResult contract."
                code = "invalid_tool_output"
                return Outcome(500, toolresult.failed(tool.name, FAILED_SUMMARY, text, code, {}), code)
        self._add_files(said, tool, job, reply)
        return Outcome(200 if said.status.lower() == "ok" else 500, said)

    def _add_output(self, result: ToolResult, output: str) -> None:
        """Also a tool that fails may have put something out."""
        whole = output.encode()
        if output not in ("", "{}", "null") and is_json(whole, self._broker.settings.limits.depth):
            result.output = Raw(whole)

    def _add_files(self, said: ToolResult, tool: Tool, job: Job, reply: Said) -> None:
        """Artifacts that the tool has left in its state's slots, or in its job's folder."""
        if b"content_json" in bytes(reply.ds_state):
            folder = Path(self._jobs.place(job).folder)
            try:
                slots = _state.decode(reply.ds_state).slots
                folder.mkdir(mode=0o700, exist_ok=True)
                for slot in sorted(slots, key=int):
                    (folder / f"ds{int(slot)}.json").write_text(slots[slot].content_json, encoding="utf-8")
            except (msgspec.DecodeError, ValueError, OSError) as error:
                self._broker.log.warning("artifacts of a call's state are not kept", aid=tool.name, reason=str(error))
        elif not tool.info.files:
            return
        known = {one.name for one in said.artifacts}
        for name, size in sorted(self._jobs.files(job).items()):
            if name not in known:
                said.artifacts.append(Artifact(size, type_of(name), name, route(job.id, name)))

    # --- jobs -------------------------------------------------------------------------------------------------------

    async def new_job(self, request: Request) -> Response:
        if self._running >= self._settings.max_calls:
            answer = trouble(429, "too_many_requests", "Server is busy; retry shortly.")
            return answer._replace(headers=AGAIN)
        body = await request.body(self._settings.body_bytes)
        if body is None:
            text = f"Request body exceeds max size ({self._settings.body_bytes} bytes)."
            return trouble(413, "payload_too_large", text)
        if not body:
            return trouble(400, "invalid_request", "Missing request body.", field="body")
        try:
            if not is_json(body, self._broker.settings.limits.depth):
                raise msgspec.DecodeError
            asked = _new_job.decode(body)
        except msgspec.DecodeError:
            return trouble(400, "invalid_request", "Invalid JSON body.", reason="Failed to decode JSON.")
        wanted = asked.tool_name.strip()
        if not wanted:
            return trouble(400, "invalid_request", "Missing required field: tool_name.", field="tool_name")
        tool = self._broker.registry.get(wanted)
        if tool is None and (refreshed := self._broker.equipment.refreshed()) is not None:
            await refreshed
            tool = self._broker.registry.get(wanted)
        if tool is None:
            return trouble(400, "unknown_tool", f"Unsupported tool: {wanted}.", tool_name=wanted)
        refusal = self._broker.dispatcher.refusal() or self._broker.dispatcher.rights(tool, request.asker)
        if refusal is not None:
            return refused(refusal)
        while self._jobs.behind():
            await asyncio.sleep(BUSY_SECONDS)
        job = self._jobs.new(tool.name, body.decode(), keys_of(asked.input), request.asker.principal)
        self._jobs.save(job)
        key = asked.idempotency_key or request.header(b"idempotency-key")
        lease = asked.lease_token or request.header(b"broker-lease")
        ended = asyncio.Event()
        self._background.add(ended)
        limits = asked.limits.bounds() if asked.limits is not None else None

        def done(_: Response) -> None:
            self._background.discard(ended)
            ended.set()

        run = Run(self, tool, job, limits, "", done)
        asyncio.get_running_loop().call_soon(self._work_off, run, request, asked.input, key, lease)
        if asked.mode != "sync":
            return answered({"job_id": job.id, "status": job.status})
        wait = max(1, min(5000 if asked.wait_ms is None else asked.wait_ms, 120_000))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), wait / 1000)
        if job.status in (SUCCEEDED, FAILED):
            return answered({"job_id": job.id, "status": job.status, "job": record(job)})
        return answered({"job_id": job.id, "status": job.status})

    def _work_off(self, run: Run, request: Request, given: Raw | UnsetType, key: str, lease: str) -> None:
        """In the background: who asked may hang up meanwhile."""
        self._jobs.start(run.job)
        self._begin(run, request, given, key, lease)

    async def close(self, seconds: float) -> None:
        """The broker stops: jobs in the background have so long to be written down."""
        deadline = time.monotonic() + seconds
        while self._background and time.monotonic() < deadline:
            await asyncio.sleep(0.002)


class Run:
    """A call on its way: what it is for, and whom its response is told."""

    __slots__ = ("_face", "begun", "done", "job", "limits", "request", "tool")

    def __init__(
        self,
        face: AutoSage,
        tool: Tool,
        job: Job,
        limits: Limits | None,
        request: str,
        done: Callable[[Response], object],
    ) -> None:
        self._face = face
        self.tool = tool
        self.job = job
        self.limits = limits
        self.request = request
        self.done = done
        self.begun = time.perf_counter()

    def answered(self, answer: bytes | Refusal) -> None:
        try:
            self._face.finish(self, answer)
        except Exception as error:
            self._face.mistake(self, error)


AGAIN = ((b"retry-after", b"1"),)


def _error(
    request: str,
    status: int,
    solver: str,
    summary: str,
    code: str,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    *,
    stderr: str = "",
    **metrics: str,
) -> Response:
    """What is wrong without an answer of a tool; mostly before there is a job."""
    result = toolresult.failed(solver, summary, stderr or code, code, {"request_id": request, **metrics})
    return Response(status, toolresult.encode(result), headers=headers)


def _unknown(request: str, tool: str) -> Response:
    if not tool:
        text, stderr = "tool must be a non-empty string.", "Missing required field: tool."
        return _error(request, 400, "unknown", text, "invalid_request", stderr=stderr)
    return _error(request, 404, tool, f"Unsupported tool: {tool}.", "unknown_tool", stderr="Unsupported tool.")


def _shaped(request: Request, response: Response, refusal: Refusal) -> Response:
    """Also who may not even ask gets a ToolResult."""
    kind = refusal.kind
    return _error(request.name, kind.http, "unknown", FAILED_SUMMARY, kind.code, response.headers, stderr=refusal.text)


def _plain(tool: Tool, output: str, depth: int) -> ToolResult | None:
    """A tool's own output; None where it is not JSON."""
    whole = output.encode()
    if not is_json(whole, depth):
        return None
    return ToolResult(
        artifacts=[],
        exit_code=0,
        metrics={},
        output=UNSET if whole.strip() == b"null" else Raw(whole),
        solver=tool.name,
        status="ok",
        stderr="",
        stdout="",
        summary=_ran(tool),
    )


def _ran(tool: Tool) -> str:
    return f"Ran {tool.name}."


def _frame(tool: Tool) -> bytes:
    """A ToolResult around an output of this tool; empty where its name is too long, or odd."""
    if len(_ran(tool)) > DEFAULT.max_summary_characters or "%" in tool.name or tool.info.stability == "stable":
        return b""
    return (
        b'{"artifacts":[],"exit_code":0,"metrics":{"duration_ms":%%.3f,"job_id":"%%b","request_id":%%b},"output":%%b,'
        b'"solver":%b,"status":"ok","stderr":"","stdout":"","summary":%b}'
        % (toolresult.encode(tool.name), toolresult.encode(_ran(tool)))
    )
