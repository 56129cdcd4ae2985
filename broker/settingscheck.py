"""What is wrong with a configuration though each of its values is of the right type."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from broker.addresses import address
from broker.errors import ConfigError
from broker.origin import origin
from broker.settings import Config, EventTool, Jina, OneShot

NATS_SCHEMES = ("nats", "tls", "ws", "wss")


def check(config: Config, path: Path | None) -> None:
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
