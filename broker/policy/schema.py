"""The published schema of a tool's input, enforced. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from broker.errors import ConfigError

LONGEST = 300  # characters of a message: it may quote the input


class Schema:
    """A JSON Schema, ready to judge inputs. The rest of the world is not asked for what it refers to."""

    def __init__(self, schema: dict[str, Any], where: str) -> None:
        try:
            import jsonschema_rs
        except ImportError:
            text = f"{where} has a schema, and to enforce it takes: pip install 'toolhost-broker[http]'"
            raise ConfigError(text) from None
        self._wrong = jsonschema_rs.ValidationError
        linear = jsonschema_rs.RegexOptions()  # no pattern takes for ever
        try:
            self._validator = jsonschema_rs.validator_for(schema, retriever=_nothing, pattern_options=linear)
        except (ValueError, jsonschema_rs.ReferencingError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{where}: its schema is no JSON Schema: {reason}") from None

    def problem(self, text: str, hide: Callable[[str], str] = str) -> str:
        """Why this input (JSON) will not do, with the path to what is wrong; empty if it will. It quotes the input, but
        for what is hidden."""
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            return f"input is not JSON: {error}"
        try:
            self._validator.validate(value)  # stops at the first one: to find all of them can take seconds
            return ""
        except self._wrong as error:
            found = error
        said = hide(f"{path(found.instance_path)}: {found.message}")
        return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"


def path(steps: list[str | int]) -> str:
    """Where in the input: input.items[2].name"""
    return "input" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def _nothing(uri: str) -> Any:
    raise ValueError(f"{uri} is not looked up; write what it says into the schema")
