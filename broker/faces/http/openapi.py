"""The OpenAPI document of the HTTP face: what is there, as it is."""

from __future__ import annotations

from typing import Any

import msgspec

from broker import __version__
from broker.faces.http.request import Request, Response, answered
from broker.jobs import TYPES
from broker.registry import Registry

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
ANY: Schema = {}
JSON_OBJECT: Schema = {"type": "object", "additionalProperties": True}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


CAPS = ("timeout_ms", "max_stdout_bytes", "max_stderr_bytes", "max_artifact_bytes", "max_artifacts")
LIMITS = {**dict.fromkeys((*CAPS, "max_summary_characters"), WHOLE)}

SCHEMAS: dict[str, Schema] = {
    "Error": _object(["error"], error=_object(["code", "message"], code=TEXT, message=TEXT, details=JSON_OBJECT)),
    "Health": _object(["name", "status", "version"], name=TEXT, status=TEXT, version=TEXT),
    "Artifact": _object(["name", "path", "mime_type", "bytes"], name=TEXT, path=TEXT, mime_type=TEXT, bytes=WHOLE),
    "ToolResult": _object(
        ["status", "solver", "summary", "stdout", "stderr", "exit_code", "artifacts", "metrics"],
        status=TEXT,
        solver=TEXT,
        summary=TEXT,
        stdout=TEXT,
        stderr=TEXT,
        exit_code=WHOLE,
        artifacts=_list(_ref("Artifact")),
        metrics=JSON_OBJECT,
        output=ANY,
    ),
    "Tool": _object(
        ["name", "version", "stability", "description", "input_schema"],
        name=TEXT,
        version=TEXT,
        stability={"type": "string", "enum": ["stable", "experimental", "deprecated"]},
        tags=_list(TEXT),
        examples=_list(JSON_OBJECT),
        description=TEXT,
        input_schema=JSON_OBJECT,
    ),
    "Tools": _object(["tools"], tools=_list(_ref("Tool"))),
    "Limits": _object(sorted(LIMITS), **LIMITS),
    "Execute": _object(
        ["tool"],
        tool={"type": "string", "pattern": "\\S", "description": "A tool's name, as GET /v1/tools lists it."},
        input={"description": "The tool's input; its schema, where it has one, is enforced."},
        context={"type": ["object", "null"], "properties": {"limits": {"anyOf": [_ref("Limits"), {"type": "null"}]}}},
        idempotency_key=TEXT,
        _lease_token=TEXT,
        ds_state={"description": "The caller's DSState, whole or a delta, of the session that Broker-Session names."},
    ),
    "Job": _object(
        ["id", "tool_name", "status", "created_at"],
        id=TEXT,
        tool_name=TEXT,
        status={"type": "string", "enum": ["queued", "running", "succeeded", "failed"]},
        created_at=TEXT,
        started_at=TEXT,
        finished_at=TEXT,
        summary=TEXT,
        result=JSON_OBJECT,
        error=_object(["code", "message"], code=TEXT, message=TEXT),
    ),
    "JobMade": _object(["job_id", "status"], job_id=TEXT, status=TEXT, job=_ref("Job")),
    "JobFiles": _object(["job_id", "files"], job_id=TEXT, files=_list(_ref("Artifact"))),
    "Story": _object(["session", "state"], session=TEXT, state=JSON_OBJECT),
    "StoryGone": _object(["session", "cleared"], session=TEXT, cleared={"type": "boolean"}),
    "Asset": _object(
        ["id", "assetId", "kind", "mediaType", "bytes", "tool", "url"],
        id=TEXT,
        assetId=TEXT,
        kind=TEXT,
        mediaType=TEXT,
        bytes=WHOLE,
        tool=TEXT,
        url=TEXT,
        metadata=JSON_OBJECT,
    ),
    "QueuedCall": _object(
        ["aid"],
        aid={"type": "string", "pattern": "\\S", "description": "The tool; one that nobody has yet may be queued."},
        id={"type": "string", "minLength": 1, "maxLength": 128, "description": "The same id is the same call."},
        input_json={"type": "string", "description": "Its input, JSON in a string."},
        inputs={"type": "object", "description": "Or the same as an object; not both."},
        timeout_ms={"type": "integer", "minimum": 1},
        session={"type": "string", "maxLength": 256},
        idempotency_key=TEXT,
        _lease_token=TEXT,
    )
    | {"not": {"required": ["input_json", "inputs"]}},
    "Queued": _object(
        ["call_id", "state", "duplicate", "known"],
        call_id=TEXT,
        state={"type": "string", "enum": ["queued", "done", "dead"]},
        duplicate={"type": "boolean"},
        known={"type": "boolean", "description": "A broker that is known here has the tool."},
    ),
    "QueueResult": _object(
        ["call_id", "state", "tool"],
        call_id=TEXT,
        state={"type": "string", "enum": ["queued", "running", "done", "dead"]},
        tool=TEXT,
        time={"type": "number"},
        known={"type": "boolean"},
        result={"type": "object", "description": "The reply of the line protocol."},
    ),
    "Assets": _object(["assets"], assets=_list(_ref("Asset"))),
    "ServiceCall": _object(
        ["tool_name"],
        tool_name={"type": "string", "minLength": 1},
        protocol_version=ANY,
        kind=ANY,
        entry=ANY,
        payload=ANY,
        timeout_ms={"type": ["number", "null"]},
        trace_id=ANY,
        project=ANY,
    ),
    "ServiceResult": _object(
        ["ok"],
        ok={"type": "boolean"},
        result=ANY,
        protocol_version=ANY,
        error=_object(["type", "message"], type=TEXT, message=TEXT),
    ),
    "Handshake": _object([], required_guarantees={"anyOf": [{"type": ["object", "null"]}, _list(TEXT)]}),
    "Guarantees": _object(
        ["ok", "enforcement", "supported_guarantees"],
        ok={"type": "boolean"},
        enforcement={"enum": ["enforced", "partial", "none"]},
        supported_guarantees={"anyOf": [{"type": "object"}, _list(TEXT)]},
        error=_object(["type", "message"], type=TEXT, message=TEXT),
    ),
    "Word": {"type": "object", "description": "What the word is about: a name, or a lease's tool_aid, tier, ttl_ms."},
    "Operation": JSON_OBJECT,
    "Definition": _object(
        ["project_id", "tool_name", "description", "parameters", "target_subject", "after_execution", "options"],
        project_id=TEXT,
        tool_name=TEXT,
        description={"type": ["string", "null"]},
        parameters=JSON_OBJECT,
        target_subject=TEXT,
        after_execution={"enum": ["suspend", "terminate"]},
        options=JSON_OBJECT,
    ),
    "Detail": _object(
        ["detail"],
        detail={"anyOf": [_object(["error_code", "error_message"], error_code=TEXT, error_message=TEXT), _list(ANY)]},
    ),
}

# What a request may say in its head.
PARAMETERS: dict[str, Schema] = {
    "request-id": {"name": "X-Request-Id", "in": "header", "schema": TEXT, "description": "Repeated in the answer."},
    "key": {
        "name": "Idempotency-Key",
        "in": "header",
        "schema": TEXT,
        "description": "At most one execution of this tool under this key, for a minute.",
    },
    "lease": {"name": "Broker-Lease", "in": "header", "schema": TEXT, "description": "A single-use lease's token."},
    "session": {"name": "Broker-Session", "in": "header", "schema": TEXT, "description": "Whose state it is."},
    "story": {"name": "session", "in": "path", "required": True, "schema": TEXT, "example": "evening"},
    "asset": {"name": "id", "in": "path", "required": True, "schema": TEXT, "example": "asset_000001"},
    "job": {"name": "id", "in": "path", "required": True, "schema": TEXT, "example": "job_0001"},
    "file": {"name": "name", "in": "path", "required": True, "schema": TEXT, "example": "request.json"},
    "call": {"name": "id", "in": "path", "required": True, "schema": TEXT, "example": "order-17"},
    "wait": {"name": "wait", "in": "query", "schema": {"type": "number", "minimum": 0, "maximum": 300}},
    "stability": {
        "name": "stability",
        "in": "query",
        "schema": {"type": "string", "enum": ["", "stable", "experimental", "deprecated"]},
    },
    "tags": {"name": "tags", "in": "query", "schema": TEXT, "description": "Any of these, separated by commas."},
    "project": {"name": "project_id", "in": "path", "required": True, "schema": TEXT, "example": "proj_1"},
    "word": {
        "name": "word",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "example": "lease.list",
    },
}
CALL = ["key", "lease", "session"]


def _content(schema: Schema, kind: str = "application/json") -> Schema:
    return {kind: {"schema": schema}}


def _answers(good: str, *others: int, errors: str = "Error", status: int = 200) -> Schema:
    """The answers of a route: one good one, and refusals, which all look alike."""
    found: Schema = {str(status): {"description": "As asked.", "content": _content(_ref(good))}}
    for other in (403, *others):
        found[str(other)] = {"description": WORDS[other], "content": _content(_ref(errors))}
    return found


WORDS = {
    400: "The request cannot be understood, or the tool does not take this input.",
    403: "The caller has no right to this, or has shown no lease.",
    404: "There is no such thing.",
    413: "The request's body is over a limit.",
    422: "There is no file in the form.",
    429: "Too much at once; Retry-After says when to come again.",
    500: "The tool has failed.",
    503: "The tool's breaker is open, its toolhost does not start, or the broker is shutting down.",
    504: "The tool gave no answer in time; it may have run.",
}


def _new_job(tools: list[str]) -> Schema:
    return _object(
        ["tool_name"],
        tool_name={"enum": tools},
        input=ANY,
        mode={"enum": ["sync", "async", None]},
        wait_ms={"type": ["integer", "null"]},
        limits={"anyOf": [_ref("Limits"), {"type": "null"}]},
        idempotency_key=TEXT,
        _lease_token=TEXT,
    )


def _route(summary: str, parameters: list[str], answers: Schema, body: str = "") -> Schema:
    found: Schema = {
        "summary": summary,
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in ("request-id", *parameters)],
        "responses": answers,
    }
    if body:
        found["requestBody"] = {"required": True, "content": _content(_ref(body))}
    return found


def _plain(kind: str, *others: int) -> Schema:
    """An answer that is no JSON."""
    found = _answers("Error", *others)
    found["200"] = {"description": "As asked.", "content": _content(TEXT, kind)}
    for other in others:
        found[str(other)]["content"] = _content(TEXT, kind)
    return found


def _status() -> Schema:
    return {**_answers("Error"), "200": {"description": "As it is now.", "content": _content(JSON_OBJECT)}}


def _files() -> Schema:
    found = _answers("Error", 404)
    kinds = sorted({kind.partition(";")[0] for kind in TYPES.values()} | {"application/octet-stream"})
    found["200"] = {"description": "As it is.", "content": {kind: {"schema": ANY} for kind in kinds}}
    return found


def _definition() -> Schema:
    """CommonGround's: a file in, its words for what is wrong out."""
    codes = (400, 404, 413, 422, 503)
    found = _route("Define a tool of a CommonGround project.", ["project"], _answers("Definition", *codes, status=201))
    for code in (403, *codes):
        found["responses"][str(code)]["content"] = _content(_ref("Detail"))
    file = {"type": "string", "contentMediaType": "application/yaml", "description": "tool_name, target_subject …"}
    found["requestBody"] = {"required": True, "content": _content(_object(["file"], file=file), "multipart/form-data")}
    return found


def _queue_result() -> Schema:
    found = _answers("QueueResult", 400, 404, 503)
    found["202"] = {**found["200"], "description": "There is no result yet."}
    return found


def document(tools_path: str, tools: list[str], *, management: bool, durable: bool) -> Schema:
    """`tools` are the names of those that there are now; `management`: CommonGround's definitions can be written;
    `durable`: there is NATS, which keeps queued calls."""
    execute = _answers("ToolResult", 400, 404, 413, 429, 500, 503, 504, errors="ToolResult")
    execute["200"]["content"]["text/event-stream"] = {"schema": TEXT}  # with this in Accept: its events, and the result
    paths: Schema = {
        "/healthz": {"get": _route("Is it there?", [], _answers("Health"))},
        "/livez": {"get": _route("Is it alive?", [], _plain("text/plain"))},
        "/readyz": {"get": _route("May it be given calls? Else why not.", [], _plain("text/plain", 503))},
        "/v1/tools": {"get": _route("The tools, by name.", ["stability", "tags"], _answers("Tools", 400))},
        "/v1/tools/execute": {"post": _route("Call a tool.", CALL, execute, "Execute")},
        "/v1/jobs": {
            "post": _route("Call a tool in the background.", CALL, _answers("JobMade", 400, 413, 429, 503), "NewJob")
        },
        "/v1/jobs/{id}": {"get": _route("A job.", ["job"], _answers("Job", 404))},
        "/v1/jobs/{id}/artifacts": {"get": _route("A job's files.", ["job"], _answers("JobFiles", 404))},
        "/v1/jobs/{id}/artifacts/{name}": {
            "get": _route("One of a job's files.", ["job", "file"], _files()),
        },
        "/v1/sessions/{session}/state": {
            "get": _route("What event tools have made of a session.", ["story"], _answers("Story", 404)),
            "delete": _route("Begin anew.", ["story"], _answers("StoryGone", 404)),
        },
        "/v1/assets": {"get": _route("Files that event tools have told of.", [], _answers("Assets"))},
        "/v1/assets/{id}": {"get": _route("One of them.", ["asset"], _files())},
        tools_path: {
            "post": _route(
                "namel3ss' service runner.",
                ["key", "lease"],
                _answers("ServiceResult", 400, 413, errors="ServiceResult"),
                "ServiceCall",
            )
        },
        "/capabilities/handshake": {
            "post": _route(
                "What is enforced on namel3ss' tools.",
                [],
                _answers("Guarantees", 400, errors="ServiceResult"),
                "Handshake",
            )
        },
        "/status": {"get": _route("What an operator looks at; /status/stream has it each second.", [], _status())},
        "/operator/{word}": {
            "post": _route("The operator's words.", ["word"], _answers("Operation", 400, 404), "Word")
        },
        "/metrics": {"get": _route("Prometheus' text.", [], _plain("text/plain"))},
        "/openapi.json": {"get": _route("This document.", [], {"200": {"description": "It."}})},
        "/openapi.yaml": {"get": _route("This document; JSON is YAML.", [], {"200": {"description": "It."}})},
    }
    if durable:
        queued = _answers("Queued", 400, 413, 429, 503, status=202)
        paths["/v1/queue"] = {"post": _route("Queue a call, on NATS.", [], queued, "QueuedCall")}
        result = _route("What has come of it.", ["call", "wait"], _queue_result())
        paths["/v1/queue/{id}"] = {"get": result}
    if management:
        paths["/projects/{project_id}/tools"] = {"post": _definition()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "toolhost broker",
            "version": __version__,
            "description": "Warm, pooled tools behind one policy: AutoSage's contract, namel3ss' service runner.",
        },
        "paths": paths,
        "components": {
            "schemas": {**SCHEMAS, "NewJob": _new_job(tools)},
            "parameters": PARAMETERS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


class OpenApi:
    def __init__(self, registry: Registry, tools_path: str, *, management: bool, durable: bool) -> None:
        self._durable = durable
        self._registry = registry
        self._management = management
        self._tools_path = tools_path

    async def json(self, request: Request) -> Response:
        tools = [tool.name for tool in self._registry if request.asker.rights.allow(tool)]
        shown = document(self._tools_path, tools, management=self._management, durable=self._durable)
        return answered(shown)

    async def yaml(self, request: Request) -> Response:
        """Any JSON is YAML; laid out for people."""
        body = (await self.json(request)).body
        assert isinstance(body, bytes)
        return Response(200, msgspec.json.format(body, indent=2), b"application/yaml")
