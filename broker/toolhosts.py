"""Which toolhosts there are: those of broker.toml, those that are named by flags, else the demo tools."""

from __future__ import annotations

import os
from collections.abc import Mapping

from broker import where
from broker.config import Loaded
from broker.errors import ConfigError, MissingFile
from broker.settings import Config, Toolhost

BY_NAME = "named"  # by flags, or by the program that embeds us


def add(
    loaded: Loaded, plugins: list[str], binary: str | None, environ: Mapping[str, str], *, demo: bool = True
) -> None:
    """Adds what was named, or the demo tools where nobody asked for any, and checks that the files are there."""
    hosts = loaded.config.toolhost
    if plugins or binary:
        program = binary or environ.get("MACHINA_TOOLHOST_BIN", "")
        name = os.path.basename(program) if program else "toolhost"
        added = Toolhost(name=_free_name(name, hosts), binary=program, plugins=plugins)
        added.min = _pool_size(added.min, environ)
        added.max = max(added.min, added.max)
        hosts.append(added)
        loaded.origins[f"toolhost.{added.name}"] = BY_NAME
    elif demo and not _has_tools(loaded.config):
        hosts.append(Toolhost(name="demo", plugins=[where.demo_plugin()]))
        loaded.origins["toolhost.demo"] = "nothing configured, so the demo tools"
    for host in hosts:
        _check_files(host, loaded)


def _has_tools(config: Config) -> bool:
    """Of its own, or those of others."""
    return bool(config.toolhost or config.oneshot or config.python or config.events or config.nats.remote)


def _pool_size(usual: int, environ: Mapping[str, str]) -> int:
    text = environ.get("MACHINA_TOOLHOST_POOL_SIZE") or str(usual)
    if not text.isdecimal():
        raise ConfigError(f"MACHINA_TOOLHOST_POOL_SIZE={text!r}: expected a whole number")
    return int(text)


def _free_name(name: str, hosts: list[Toolhost]) -> str:
    taken = {host.name for host in hosts}
    return next(candidate for candidate in (name, *(f"{name}-{i}" for i in range(2, 99))) if candidate not in taken)


def _check_files(host: Toolhost, loaded: Loaded) -> None:
    by_name = loaded.origins.get(f"toolhost.{host.name}") == BY_NAME
    binary = host.binary or where.toolhost()
    named = "--toolhost" if by_name else f"{loaded.file}: toolhost {host.name}: binary"
    if not os.path.isfile(binary):
        raise MissingFile(f"{named} {binary} does not exist; build it, or name another")
    if not os.access(binary, os.X_OK):
        raise ConfigError(f"{named} {binary} is not executable; chmod +x it")
    named = "--plugin" if by_name else f"{loaded.file}: toolhost {host.name}: plugin"
    for plugin in host.plugins:
        if not os.path.isfile(plugin):
            raise MissingFile(f"{named} {plugin} does not exist; is the path right, and is it built?")
    if host.cwd and not os.path.isdir(host.cwd):
        raise ConfigError(f"{loaded.file}: toolhost {host.name}: cwd {host.cwd} is not a directory")
