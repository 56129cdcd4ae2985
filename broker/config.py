"""broker.toml + environment + flags → one typed, validated object. Errors name the file, the key and what was expected.

A flag wins over BROKER_<SECTION>_<KEY>, that over MACHINA_*, that over the file, that over the default.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from broker.errors import ConfigError
from broker.origin import origin

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


TABLES: dict[str, type[Struct]] = {
    "server": Server,
    "limits": Limits,
    "idempotency": Idempotency,
    "lease": Lease,
    "breaker": Breaker,
    "http": Http,
    "nats": Nats,
    "queue": Queue,
    "utp": Utp,
    "jina": Jina,
}

NATS_SCHEMES = ("nats", "tls", "ws", "wss")

# What Machina's users have in their environment, and which setting it is here.
MACHINA = {
    "MACHINA_BROKER_SOCKET": ("server", "socket"),
    "MACHINA_LEASE_ENFORCE": ("lease", "enforce"),
    "MACHINA_TOOLHOST_TIMEOUT": ("limits", "timeout_seconds"),
    "MACHINA_TOOLHOST_RLIMIT_AS_MB": ("limits", "rlimit_as_mb"),
    "MACHINA_TOOLHOST_RLIMIT_FSIZE_MB": ("limits", "rlimit_fsize_mb"),
    "MACHINA_TOOLHOST_RLIMIT_NOFILE": ("limits", "rlimit_nofile"),
    "MACHINA_TOOLHOST_RLIMIT_NPROC": ("limits", "rlimit_nproc"),
}
# These are defaults of every [[toolhost]].
MACHINA_TOOLHOST = {"MACHINA_TOOLHOST_BIN": "binary", "MACHINA_TOOLHOST_POOL_SIZE": "min"}


class Loaded(Struct):
    """A configuration and where each value that is not a default came from."""

    config: Config
    file: Path | None
    origins: dict[str, str]


def default_file(environ: Mapping[str, str]) -> Path | None:
    """The configuration that is used when nobody names one."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "/"), ".config")
    for candidate in (Path("broker.toml"), Path(home, "toolhost-broker", "broker.toml")):
        if candidate.is_file():
            return candidate
    return None


def load(file: str | Path | None, flags: Mapping[tuple[str, str], Any], environ: Mapping[str, str]) -> Loaded:
    """Puts the layers on top of each other. `flags` are {(section, key): value}; None means not given."""
    named = file or environ.get("BROKER_CONFIG")
    path = Path(named) if named else default_file(environ)
    tree = _read(path) if path else {}
    origins: dict[str, str] = {}
    for section, content in tree.items():
        if isinstance(content, dict):
            origins.update({f"{section}.{key}": str(path) for key in content})
    for name, (section, key) in MACHINA.items():
        if environ.get(name):
            _set(tree, origins, section, key, environ[name], name)
    for section, kind in TABLES.items():
        for name, value in environ.items():
            if name.startswith(prefix := f"BROKER_{section.upper()}_"):
                key = name[len(prefix) :].lower()
                if key not in kind.__struct_fields__:
                    raise ConfigError(f"{name}: there is no setting {section}.{key}; {_alternatives(kind, key)}")
                _set(tree, origins, section, key, value, name)
    for (section, key), value in flags.items():
        if value is not None:
            _set(tree, origins, section, key, value, "--" + key.replace("_", "-"))
    _toolhost_defaults(tree, origins, environ)
    config = _convert(tree, path, origins)
    _check(config, path)
    return Loaded(config, path, origins)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def _set(tree: dict[str, Any], origins: dict[str, str], section: str, key: str, value: Any, origin: str) -> None:
    table = tree.setdefault(section, {})
    if isinstance(table, dict):
        table[key] = value
        origins[f"{section}.{key}"] = origin


def _toolhost_defaults(tree: dict[str, Any], origins: dict[str, str], environ: Mapping[str, str]) -> None:
    for name, key in MACHINA_TOOLHOST.items():
        value = environ.get(name)
        if not value:
            continue
        entries = tree.get("toolhost", [])
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and key not in entry:
                entry[key] = value
                origins[f"toolhost.{entry.get('name')}.{key}"] = name


def _alternatives(kind: type[Struct], key: str) -> str:
    import difflib

    near = difflib.get_close_matches(key, kind.__struct_fields__, 1)
    return f"did you mean `{near[0]}`?" if near else "there are: " + ", ".join(kind.__struct_fields__)


_LISTS: dict[str, type[Struct]] = {
    "toolhost": Toolhost,
    "oneshot": OneShot,
    "python": Python,
    "events": EventTool,
    "principal": Principal,
    "tool": Card,
}
_SECTIONS: dict[str, type[Struct]] = {**TABLES, **_LISTS}
_INNER: dict[str, type[Struct]] = {  # tables in tables
    r"python\[.*\.tools\[.*": PythonTool,
    r"tool\[.*\.options": ToolOptions,
    r"tool\[.*\.options\.args": ToolArgs,
}


def _convert(tree: dict[str, Any], path: Path | None, origins: Mapping[str, str]) -> Config:
    try:
        return msgspec.convert(_from_text(tree, origins), Config)
    except msgspec.ValidationError as error:
        text = str(error)
        found = re.search(r"`\$\.?([^`]*)`", text)
        place = found.group(1) if found else ""
        origin = origins.get(place) or str(path or "the command line")
        where = re.sub(r"\[(\d+)\]", lambda m: f" no. {int(m.group(1)) + 1},", place).replace(",.", ", ")
        unknown = re.search(r"unknown field `([^`]*)`", text)
        if unknown:
            section = place.split("[")[0]
            inner = (kind for pattern, kind in _INNER.items() if re.fullmatch(pattern, place))
            kind = next(inner, _SECTIONS.get(section, Config))
            inside = f"[{where.rstrip(',')}]" if where else "the top level"
            raise ConfigError(
                f"{origin}: {inside} has no setting `{unknown.group(1)}`; {_alternatives(kind, unknown.group(1))}"
            ) from None
        said = re.sub(r"\s*- at `.*`$", "", text)
        said = said[0].lower() + said[1:]
        raise ConfigError(f"{origin}: {where or 'the file'}: {said}") from None


def _from_text(tree: dict[str, Any], origins: Mapping[str, str]) -> dict[str, Any]:
    """Values from the environment are text: reads them as what the setting is."""
    converted = dict(tree)
    for section in TABLES:
        table = converted.get(section)
        if isinstance(table, dict):
            kind = _SECTIONS[section]
            types = {field.name: field.type for field in msgspec.structs.fields(kind)}
            converted[section] = {
                key: _parse(value, types[key], f"{origins[f'{section}.{key}']}")
                if isinstance(value, str) and key in types and origins.get(f"{section}.{key}", "").isupper()
                else value
                for key, value in table.items()
            }
    hosts = converted.get("toolhost")
    if isinstance(hosts, list):
        converted["toolhost"] = [
            {**entry, "min": _parse(entry["min"], int, "MACHINA_TOOLHOST_POOL_SIZE")}
            if isinstance(entry, dict) and isinstance(entry.get("min"), str)
            else entry
            for entry in hosts
        ]
    return converted


def _parse(value: str, kind: Any, origin: str) -> Any:
    if kind is bool and origin == "MACHINA_LEASE_ENFORCE":
        return value in ("1", "true")  # as Machina reads it: anything else is off
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}={value!r}: {str(error)[0].lower()}{str(error)[1:]}") from None


def _check(config: Config, path: Path | None) -> None:
    """What one field's type cannot say."""
    seen: set[str] = set()
    file = path or "the command line"
    for host in config.toolhost:
        if host.name in seen:
            raise ConfigError(f"{file}: two [[toolhost]] are called `{host.name}`; give one of them another name")
        seen.add(host.name)
        if host.max < host.min:
            host.max = host.min
        _check_environment(f"{file}: toolhost {host.name}", host.env)
        for plugin, pin in host.sha256.items():
            if not re.fullmatch(r"[0-9a-fA-F]{64}", pin):
                raise ConfigError(f"{file}: toolhost {host.name}: sha256 of `{plugin}` is not 64 hexadecimal digits")
    named: set[str] = set()
    commands: dict[str, Sequence[OneShot | EventTool]] = {"[[oneshot]]": config.oneshot, "[[events]]": config.events}
    for section, ones in commands.items():
        for one in ones:
            if not one.name or one.name.startswith("_"):
                raise ConfigError(f"{file}: {section} {one.name!r} is no name for a tool")
            if not one.command or not one.command[0]:
                raise ConfigError(f"{file}: {section} {one.name}: command is a list, the program first")
            if "\0" in "".join((*one.command, one.cwd)):
                raise ConfigError(f"{file}: {section} {one.name}: command or cwd has a NUL character in it")
            _check_environment(f"{file}: {section} {one.name}", one.env)
            if one.name in named:
                raise ConfigError(f"{file}: two tools are called {one.name}; give one of them another name")
            named.add(one.name)
    _check_python(config, file, named)
    _check_jina(config.jina, file, named)
    cards: set[str] = set()
    for card in config.tool:
        if not card.name or card.name in cards:
            what = f"two [[tool]] are about {card.name}" if card.name else "a [[tool]] has no name"
            raise ConfigError(f"{file}: {what}; each says which tool it is about, once")
        cards.add(card.name)
    if config.server.tcp:
        address(config.server.tcp, "server.tcp")
    if config.http.listen:
        address(config.http.listen, "http.listen")
    if config.utp.targets and not config.nats.url:
        raise ConfigError(f"{file}: [utp] targets get their commands from NATS: set nats.url (or --nats URL)")
    if not config.http.tools_path.startswith("/"):
        raise ConfigError(f"{file}: http.tools_path = {config.http.tools_path!r}: expected a path, for example /tools")
    if config.nats.url:
        _check_nats(config.nats.url)
    elif config.nats.remote:
        raise ConfigError("nats.remote (--remote) needs nats.url (--nats nats://HOST:PORT)")


def _check_nats(text: str) -> None:
    """What would be looked for in vain for ever. What may be a password is not quoted."""
    for one in text.split(","):
        try:
            url = urlsplit(one.strip() if "://" in one else f"nats://{one.strip()}")
            good = url.scheme in NATS_SCHEMES and url.hostname and not url.path.strip("/") and url.port != 0
        except ValueError:  # its port
            good = False
        if not good or " " in one.strip():
            expected = "nats://HOST:PORT, or several with commas between them"
            raise ConfigError(f"nats.url: {one.strip().rpartition('@')[2]!r}: expected {expected}")


def _check_environment(where: str, env: Mapping[str, str]) -> None:
    for variable, value in env.items():
        if not variable or "=" in variable or "\0" in variable + value:
            raise ConfigError(f"{where}: env {variable!r} is not a name and a value for it")


def _check_python(config: Config, file: Path | str, named: set[str]) -> None:
    roots: set[str] = set()
    for app in config.python:
        root = os.path.realpath(app.app_root)
        if not app.app_root or not os.path.isdir(root):
            raise ConfigError(f"{file}: [[python]] app_root = {app.app_root!r}: there is no such folder")
        if root in roots:
            raise ConfigError(f"{file}: two [[python]] have the app root {root}; put their tools into one of them")
        roots.add(root)
        for tool in app.tools:
            if not tool.name or tool.name.startswith("_"):
                raise ConfigError(f"{file}: [[python.tools]] {tool.name!r} is no name for a tool")
            module, _, function = tool.entry.partition(":")
            if not module or not function:
                raise ConfigError(
                    f"{file}: [[python.tools]] {tool.name}: entry = {tool.entry!r}: write module:function"
                )
            if tool.name in named:
                raise ConfigError(f"{file}: two tools are called {tool.name}; give one of them another name")
            named.add(tool.name)


def _check_jina(jina: Jina, file: Path | str, named: set[str]) -> None:
    for setting, place in (("search", jina.search), ("reader", jina.reader)):
        if origin(place) is None:
            raise ConfigError(f"{file}: jina.{setting} = {place!r}: expected http(s)://HOST[:PORT], nothing else")
    for name in jina.tools:
        if not name or name.startswith("_"):
            raise ConfigError(f"{file}: jina.tools: {name!r} is no name for a tool")
        if name in named:
            raise ConfigError(f"{file}: two tools are called {name}; give one of them another name")
        named.add(name)


def address(text: str, setting: str) -> tuple[str, int]:
    """HOST:PORT, or [IPv6]:PORT."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{setting} = {text!r}: expected HOST:PORT, for example 127.0.0.1:7070")
    return host.strip("[]") or "127.0.0.1", int(port)


def default_socket(environ: Mapping[str, str]) -> str:
    """In a directory that only this user can enter."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    base = os.path.join(runtime, "toolhost-broker") if runtime else f"/tmp/toolhost-broker-{os.getuid()}"
    return os.path.join(base, "broker.sock")


OPERATOR = ".operator"


def operator_socket(socket: str) -> str:
    return socket + OPERATOR
