"""What there is to set: the tables of broker.toml, with their defaults. docs/configuration.md says what each is for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Positive = Annotated[int, Meta(gt=0)]
Seconds = Annotated[float, Meta(gt=0)]
Natural = Annotated[int, Meta(ge=0)]
Variable = Annotated[str, Meta(pattern=r"^\s*[^\s=\0]+\s*$")]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+$")]
UtpName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]+$")]  # a token of a subject, and in a consumer's name

MB = 1024 * 1024


class Server(Struct, forbid_unknown_fields=True, kw_only=True):
    """[server]: where the broker listens and how it ends."""

    socket: str = ""  # empty: the default, in a private directory of this user
    socket_group: str = ""  # whose members may call, too; empty: this user alone
    tcp: str = ""  # HOST:PORT; empty: no TCP
    insecure: bool = False  # TCP beyond loopback without a token
    max_connections: Positive = 4096
    state_file: str = ""  # where the state of named sessions is kept across restarts; empty: nowhere
    drain_seconds: Annotated[float, Meta(ge=0)] = 10.0


class Limits(Struct, forbid_unknown_fields=True, kw_only=True):
    """[limits]: what one line, one caller and one toolhost may take."""

    request_bytes: Annotated[int, Meta(ge=64, le=256 * MB)] = 10 * MB
    reply_bytes: Annotated[int, Meta(ge=64, le=1024 * MB)] = 1 * MB
    depth: Annotated[int, Meta(ge=2, le=1024)] = 128
    timeout_seconds: Seconds = 30.0
    max_timeout_seconds: Seconds = 300.0
    processes: Positive = 64  # of all pools together
    queue_seconds: Seconds = 30.0
    queue_bytes: Positive = 256 * MB  # of all callers together
    connection_calls: Positive = 4096  # unanswered, of one caller
    connection_bytes: Positive = 32 * MB
    line_seconds: Seconds = 60.0  # from a line's first byte to its end
    sessions: Positive = 1024
    session_bytes: Positive = 64 * MB  # of all sessions together
    session_idle_seconds: Seconds = 900.0
    state_bytes: Positive = 256 * 1024  # of one session's state, which event tools patch
    rlimit_as_mb: Natural = 1024  # of one toolhost; 0: not set
    rlimit_fsize_mb: Natural = 16
    rlimit_nofile: Natural = 64
    rlimit_nproc: Natural = 32


class Toolhost(Struct, forbid_unknown_fields=True, kw_only=True):
    """[[toolhost]]: an executable that speaks `--serve`, its plugins, and the size of each plugin's pool."""

    name: Name
    binary: str = ""  # empty: ours
    plugins: list[str] = []
    min: Natural = 2
    max: Positive = 8
    env: dict[str, str] = {}
    cwd: str = ""
    isolate: Literal["none", "principal"] = "none"
    timeout_seconds: Annotated[float, Meta(ge=0)] = 0.0  # 0: limits.timeout_seconds
    pipeline: bool = True  # false: one call at a time in a process
    idle_seconds: Seconds = 60.0  # processes above `min` end after that
    lifetime_seconds: Seconds = 3600.0
    max_calls: Natural = 0  # 0: no recycling by count
    max_rss_growth_mb: Natural = 256  # 0: no recycling by growth
    sha256: dict[str, str] = {}  # plugin's file name → the only content that is loaded
    capabilities: list[str] | None = None  # what a plugin may declare; none: anything
    rerun: list[str] = []  # tools (globs) that are safe to run again when their toolhost died


class OneShot(Struct, forbid_unknown_fields=True, kw_only=True):
    """[[oneshot]]: a tool that is a command: started for each call, with the tool's name as its last argument."""

    name: str
    command: list[str]
    cwd: str = ""
    env: dict[str, str] = {}
    timeout_seconds: Annotated[float, Meta(ge=0)] = 0.0  # 0: limits.timeout_seconds
    max: Positive = 8  # at once
    deterministic: bool = False
    side_effects: list[str] = []
    tags: list[str] = []


class PythonTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """[[python.tools]]: a function of a Python app, by the name that it is called by."""

    name: str
    entry: str  # module:function
    timeout_seconds: Annotated[float, Meta(ge=0)] = 0.0  # 0: that of its [[python]]
    schema: dict[str, Any] | None = None


class Python(Struct, forbid_unknown_fields=True, kw_only=True):
    """[[python]]: a Python app whose functions are tools: each call in a process of its own, forked from a warm one."""

    app_root: str
    python: str = ""  # an interpreter or a virtual environment; empty: <app_root>/.venv where there is one, else ours
    reuse: bool = False  # processes are used again: modules keep what they hold, edits are not seen
    timeout_seconds: Seconds = 10.0
    max: Positive = 8  # calls at once
    tools: list[PythonTool] = []


class EventTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """[[events]]: a tool that is a command: started for each call, tells of itself in events until it is done."""

    name: str
    command: list[str]
    cwd: str = ""
    env: dict[str, str] = {}
    timeout_seconds: Seconds = 30.0
    input: Literal["wrapped", "flat"] = "wrapped"  # {requestId, tool, operation, input}, or the input itself
    operation: str = "run"  # what `operation` says where the input is wrapped
    assets: list[str] = []  # folders that its assets have to be in; empty: anywhere
    max: Positive = 8  # at once
    deterministic: bool = False
    side_effects: list[str] = []
    tags: list[str] = []


class Idempotency(Struct, forbid_unknown_fields=True, kw_only=True):
    """[idempotency]: how long, and how many, results under a key are kept."""

    ttl_seconds: Seconds = 60.0
    entries: Positive = 1024
    bytes: Positive = 64 * MB


class Lease(Struct, forbid_unknown_fields=True, kw_only=True):
    """[lease]: tools above tier 0 need a single-use token; every issue, use and rejection is written down."""

    enforce: bool = False
    audit: str = ""  # the audit log's file; empty: the default, in this user's state directory


class Breaker(Struct, forbid_unknown_fields=True, kw_only=True):
    """[breaker]: when a tool whose toolhosts fail is left alone, and for how long."""

    in_a_row: Positive = 5
    least_calls: Positive = 10
    share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    window_seconds: Seconds = 60.0
    open_seconds: Seconds = 30.0
    max_open_seconds: Seconds = 300.0
    count_tool_errors: list[str] = []  # tools (globs) whose own errors count, too


class Principal(Struct, forbid_unknown_fields=True, kw_only=True):
    """[[principal]]: what one caller may do. Whoever is not named here may call everything, and is no operator."""

    name: str  # uid:1000, token:ci, http:anonymous …
    tools: tuple[str, ...] = ("*",)
    tiers: tuple[Annotated[int, Meta(ge=0, le=3)], ...] = (0, 1, 2, 3)
    operator: bool = False


class ToolArgs(Struct, forbid_unknown_fields=True, kw_only=True):
    """[tool.options.args]: arguments that callers need not give, or may not."""

    defaults: dict[str, Any] = {}
    fixed: dict[str, Any] = {}


class ToolOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """[tool.options]: what becomes of a caller's arguments before the tool sees them."""

    args: ToolArgs = msgspec.field(default_factory=ToolArgs)
    envs: dict[str, Variable] = {}  # argument → the environment variable that its value is in
    jina: dict[str, Any] = {}  # for a tool of [jina]


class Card(Struct, forbid_unknown_fields=True, kw_only=True):
    """[[tool]]: what people read about a tool, and the schema that its input has to fit."""

    name: str = ""
    description: str | None = None
    version: str | None = None
    stability: Literal["stable", "experimental", "deprecated"] | None = None
    tags: tuple[str, ...] | None = None
    examples: tuple[dict[str, Any], ...] | None = None
    schema: dict[str, Any] | None = None
    options: ToolOptions | None = None


class Http(Struct, forbid_unknown_fields=True, kw_only=True):
    """[http]: tools over HTTP, metrics and the page."""

    listen: str = ""  # HOST:PORT; empty: no HTTP
    jobs: str = ""  # the folder of jobs and their artifacts; empty: the default, in this user's state directory
    job_seconds: Seconds = 7 * 86400.0  # jobs older than that are removed,
    job_bytes: Positive = 1024 * MB  # and the oldest ones, when all of them together are larger
    body_bytes: Positive = 2_000_000  # of AutoSage's routes; the others have limits.request_bytes
    max_connections: Positive = 4096
    max_calls: Positive = 1024  # under way; then 429
    header_seconds: Seconds = 10.0  # for a request's head; its body has limits.line_seconds
    idle_seconds: Seconds = 75.0  # between two requests
    tools_path: str = "/tools"  # namel3ss' service runner
    traces: str = ""  # a file for a line of each of its calls; empty: none
    cors: list[str] = []  # origins of other pages that may call; none


class Nats(Struct, forbid_unknown_fields=True, kw_only=True):
    """[nats]: the server through which brokers join, and UTP's callers call."""

    url: str = ""  # nats://HOST:PORT; empty: no NATS
    cluster: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = (
        "default"  # whose tools, keys and leases are shared
    )
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1  # of what NATS keeps for the cluster
    wait_seconds: Seconds = 5.0  # for NATS, before calls that need it are refused
    remote: bool = False  # tools that only other brokers of the cluster have can be called here, too


class Queue(Struct, forbid_unknown_fields=True, kw_only=True):
    """[queue]: calls that wait on NATS until a broker has run them."""

    bytes: Positive = 1024 * MB  # of calls that wait or run; then enqueueing is refused
    result_seconds: Seconds = 86400.0  # results are kept so long
    dead_seconds: Seconds = 7 * 86400.0  # and calls that did not end well
    redeliver_seconds: Annotated[float, Meta(ge=1)] = 10.0  # of silence from a broker, before its calls go to another
    deliveries: Positive = 5  # to brokers that were never heard of again; then a call is dead
    refusals: Positive = 100  # for the time being: overloaded, breaker open …; then a call is dead


class UtpTarget(Struct, forbid_unknown_fields=True, kw_only=True):
    """[utp.targets]: the tool that answers commands to cg.v1r3.*.*.cmd.tool.<target>.*"""

    tool: str
    author: str = ""  # of result cards; empty: tool.<target>
    envs: dict[str, Variable] = {}  # argument → environment variable; stronger than the tool's own options.envs
    timeout_seconds: Annotated[float, Meta(ge=0)] = 0.0  # 0: the tool's own
    max: Positive = 64  # commands in hand


class Utp(Struct, forbid_unknown_fields=True, kw_only=True):
    """[utp]: CommonGround's tool executor: commands from NATS, cards and reports in a store."""

    targets: dict[UtpName, str | UtpTarget] = {}  # target → the tool's name, or a table with more
    store: Literal["sqlite", "postgres"] = "sqlite"
    dsn: str = ""  # postgresql://…, or the SQLite file; empty: PG* variables, or a file in this user's state directory
    lease_seconds: Annotated[float, Meta(ge=1)] = 15.0  # a broker that has not been heard of for so long has died
    manage: Literal["local", "operator"] = "local"  # who defines tools over HTTP: also callers on loopback, or not
    variables: tuple[str, ...] = ("*",)  # globs: environment variables that definitions of tools may name

    def served(self) -> dict[str, UtpTarget]:
        """A name alone stands for a table with nothing else in it."""
        return {name: UtpTarget(tool=one) if isinstance(one, str) else one for name, one in self.targets.items()}


class Jina(Struct, forbid_unknown_fields=True, kw_only=True):
    """[jina]: Jina's search and reader as tools; what each of them asks for stands in its options."""

    tools: list[str] = []  # their names; none: no such tools
    search: str = "https://s.jina.ai"  # whoever is asked in its place
    reader: str = "https://r.jina.ai"
    max: Positive = 8  # requests at once


class Config(Struct, forbid_unknown_fields=True, kw_only=True):
    server: Server = msgspec.field(default_factory=Server)
    limits: Limits = msgspec.field(default_factory=Limits)
    idempotency: Idempotency = msgspec.field(default_factory=Idempotency)
    lease: Lease = msgspec.field(default_factory=Lease)
    breaker: Breaker = msgspec.field(default_factory=Breaker)
    principal: list[Principal] = msgspec.field(default_factory=list)
    toolhost: list[Toolhost] = msgspec.field(default_factory=list)
    oneshot: list[OneShot] = msgspec.field(default_factory=list)
    python: list[Python] = msgspec.field(default_factory=list)
    events: list[EventTool] = msgspec.field(default_factory=list)
    http: Http = msgspec.field(default_factory=Http)
    nats: Nats = msgspec.field(default_factory=Nats)
    queue: Queue = msgspec.field(default_factory=Queue)
    utp: Utp = msgspec.field(default_factory=Utp)
    jina: Jina = msgspec.field(default_factory=Jina)
    tool: list[Card] = msgspec.field(default_factory=list)
    alias: dict[str, str] = msgspec.field(default_factory=dict)  # another name → a tool's own, for machina_dispatch
