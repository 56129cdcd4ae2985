"""What people read about a tool, beside what its runtime says: from a manifest beside the plugin, and from broker.toml.

The broker.toml wins over the manifest, that over the plugin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from broker.errors import ConfigError
from broker.model import ToolInfo
from broker.policy.schema import Schema
from broker.settings import Card, Config
from broker.utp import args

NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*|AID(\.[A-Z][A-Z0-9_]*)+\.v[0-9]+")


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    tools: dict[str, Card]


def beside(plugin: Path) -> dict[str, Card]:
    """`demo_plugin.tools.json` beside `demo_plugin.so`, if it is there."""
    file = plugin.with_suffix(".tools.json")
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Manifest).tools
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {str(error)[0].lower()}{str(error)[1:]}") from None
    for name, card in found.items():
        if card.options is not None:  # they may name our environment's variables
            raise ConfigError(f"{file}: {name}: options stand in broker.toml, [[tool]]")
    return found


def cards(settings: Config) -> dict[str, Card]:
    """What broker.toml says of tools."""
    return {card.name: card for card in settings.tool}


def options(settings: Config) -> dict[str, dict[str, Any]]:
    """What broker.toml makes of tools' arguments."""
    return {card.name: msgspec.to_builtins(card.options) for card in settings.tool if card.options is not None}


def described(tools: Iterable[ToolInfo], *layers: Mapping[str, Card]) -> list[ToolInfo]:
    """The tools with what the layers say of them, the last one on top."""
    found = []
    for tool in tools:
        for layer in layers:
            card = layer.get(tool.aid)
            if card is not None:
                said = {field: value for field in card.__struct_fields__ if (value := getattr(card, field)) is not None}
                said.pop("name", None)
                options = said.pop("options", None)
                tool = msgspec.structs.replace(tool, **said)
                if options is not None and tool.schema is not None:
                    shown = args.published(tool.schema, msgspec.to_builtins(options))
                    tool = msgspec.structs.replace(tool, schema=shown)
        if tool.schema is not None:
            Schema(tool.schema, tool.aid)  # now, so that a mistake in it is the configuration's
        found.append(tool)
    return found


def advice(name: str) -> str:
    """What is not as AutoSage's users expect of a tool's name; empty if all is well."""
    if NAME.fullmatch(name):
        return ""
    return "a new tool is better called in lower_snake_case, with a prefix such as io_ or util_; it works all the same"
