"""broker.toml + environment + flags → one typed, validated object. Errors name the file, the key and what was expected.

A flag wins over BROKER_<SECTION>_<KEY>, that over MACHINA_*, that over the file, that over the default.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from broker.errors import ConfigError
from broker.settings import (
    Breaker,
    Card,
    Config,
    EventTool,
    Http,
    Idempotency,
    Jina,
    Lease,
    Limits,
    Nats,
    OneShot,
    Principal,
    Python,
    PythonTool,
    Queue,
    Server,
    ToolArgs,
    Toolhost,
    ToolOptions,
    Utp,
)
from broker.settingscheck import check

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
    check(config, path)
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
