"""Definitions of tools, as people write them in YAML: read, and checked as CommonGround's management checks them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from broker.utp.model import ToolDefinition

MOST_BYTES = 128 * 1024  # of a file
MOST_WEIGHT = 1_000_000  # of what it says, with all its aliases written out; about as many characters of JSON
MOST_DEPTH = 64
MOST_MERGED = 20_000  # members that `<<` brings in
NODE_WEIGHT = 4

RESERVED = ("delegate_async", "launch_principal", "ask_expert", "fork_join", "provision_agent")
AFTER_EXECUTION = ("suspend", "terminate")

LATEST = "https://json-schema.org/draft/2020-12/schema"
DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/(2019-09|2020-12))/schema#?")
# Where schemas stand in a schema: behind names of any kind, in lists, or themselves.
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTED_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SCHEMAS = (
    "items",
    "additionalProperties",
    "additionalItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)


class BadDefinition(Exception):
    """Why a definition is not taken; the words are for whoever has written it."""


def check_external(definition: ToolDefinition) -> None:
    """It is not an agent's own tool."""
    subject = definition.target_subject or ""
    if definition.tool_name in RESERVED:
        raise BadDefinition(f"tool_name is reserved for internal tools: {definition.tool_name}")
    if definition.after_execution not in AFTER_EXECUTION:
        raise BadDefinition("after_execution must be 'suspend' or 'terminate'")
    if ".cmd.tool." not in subject or ".cmd.sys." in subject:
        raise BadDefinition(
            "target_subject must be an external tool subject (contain '.cmd.tool.' and not '.cmd.sys.')"
        )


def read(project_id: str, file: bytes) -> ToolDefinition:
    """What a file says, if it can be kept at all. Takes a while: not for the loop."""
    said = _mapping(file)
    name = said.get("tool_name") or said.get("name")
    if not isinstance(name, str) or not name.strip():
        raise BadDefinition("tool_name is required")
    for key in said:
        if not isinstance(key, str):
            raise BadDefinition(f"the key {key!r} is no string; put it in quotes")
    definition = ToolDefinition(
        project_id,
        name.strip(),
        _text(said, "description") if said.get("description") is not None else None,
        _object(said, "parameters"),
        _text(said, "target_subject"),
        _text(said, "after_execution"),
        _object(said, "options"),
    )
    weigh({name: value for name, value in msgspec.structs.asdict(definition).items() if name != "project_id"})
    _check_schema(definition.parameters, f"tool_yaml[{definition.tool_name}].parameters")
    return definition


# --- YAML -------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """PyYAML's safe one, which would multiply without end what `<<` merges of what `<<` has merged."""

    merged = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for one in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(one, yaml.MappingNode):
                        self.flatten_mapping(one)
                        self.merged += len(one.value)
                    if self.merged > MOST_MERGED:
                        raise BadDefinition(f"the file merges more than {MOST_MERGED} members (<<)")
        super().flatten_mapping(node)


def _mapping(file: bytes) -> dict[Any, Any]:
    if len(file) > MOST_BYTES:
        raise BadDefinition(f"the file has more than {MOST_BYTES} bytes")
    try:
        text = file.decode()
    except UnicodeDecodeError as error:
        raise BadDefinition(f"failed to read file: {error}") from None
    try:
        said = yaml.load(text, _Loader)
    except BadDefinition:
        raise
    except RecursionError:
        raise BadDefinition("the file is nested too deeply") from None
    except Exception as error:  # a date such as 2024-99-99 is a ValueError
        raise BadDefinition(str(error)) from None
    if not isinstance(said, dict):
        raise BadDefinition("YAML root must be a mapping")
    return said


def _text(said: dict[Any, Any], name: str) -> str:
    if name not in said:
        raise BadDefinition(f"{name} is required")
    value = said[name]
    if not isinstance(value, str):
        raise BadDefinition(f"{name} must be a string")
    if not value and name != "description":
        raise BadDefinition(f"{name} must not be empty")
    return value


def _object(said: dict[Any, Any], name: str) -> dict[str, Any]:
    value = said.get(name, {})
    if not isinstance(value, dict):
        raise BadDefinition(f"{name} must be a mapping")
    return value


# --- what JSON, and Postgres, can say ---------------------------------------------------------------------------------


def is_text(text: str) -> bool:
    """Postgres has no zero, and nobody has half a surrogate."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def weigh(value: Any) -> None:
    """It can be written as JSON, and is not too much, also where aliases stand for the same thing many times."""
    left = MOST_WEIGHT
    waiting: list[tuple[Any, str, int]] = [(value, "", 0)]
    while waiting:
        one, place, depth = waiting.pop()
        left -= NODE_WEIGHT
        if depth > MOST_DEPTH:
            raise BadDefinition(f"{place[:200]}… is nested too deeply (more than {MOST_DEPTH} levels)")
        if isinstance(one, dict):
            for key, member in one.items():
                if not isinstance(key, str):
                    raise BadDefinition(f"{place or 'it'}: the key {key!r} is no string; put it in quotes")
                left -= len(key)
                waiting.append((member, f"{place}.{key}" if place else key, depth + 1))
                _text_only(key, place)
        elif isinstance(one, list):
            waiting.extend((member, f"{place}[{number}]", depth + 1) for number, member in enumerate(one))
        elif isinstance(one, str):
            left -= len(one)
            _text_only(one, place)
        elif isinstance(one, float):
            if not math.isfinite(one):
                raise BadDefinition(f"{place}: {one} is no number in JSON")
        elif isinstance(one, int):
            if not -(2**63) <= one < 2**64:
                raise BadDefinition(f"{place}: the number is too large")
        elif one is not None:
            raise BadDefinition(f"{place}: a {type(one).__name__} cannot be written as JSON; put it in quotes")
        if left < len(waiting) * NODE_WEIGHT:
            raise BadDefinition("the file says too much, with its aliases written out")


def _text_only(text: str, place: str) -> None:
    if not is_text(text):
        raise BadDefinition(f"{place}: there is a character that cannot be stored (\\0, or half of a pair)")


# --- JSON Schema ------------------------------------------------------------------------------------------------------


def _check_schema(schema: dict[str, Any], where: str) -> None:
    """It is one, and models' makers take it: they want to know of what an array is."""
    import jsonschema_rs

    for place, one in _schemas(schema, "$"):
        kind = one.get("type")
        items = one.get("items")
        if (kind == "array" or (isinstance(kind, list) and "array" in kind)) and not (
            isinstance(items, dict) and items
        ):
            raise BadDefinition(f"{where}: {place} is array but missing `items` object")
    draft = schema.get("$schema", LATEST)
    if not isinstance(draft, str):
        raise BadDefinition(f"{where}: invalid JSON Schema ($schema is no string)")
    try:  # nothing is looked up: what we do not know is read as the latest one
        jsonschema_rs.meta.validate({**schema, "$schema": draft if DRAFTS.fullmatch(draft) else LATEST})
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        said = getattr(error, "message", None) or str(error).partition("\n")[0]
        steps = "".join(f"[{step!r}]" for step in getattr(error, "instance_path", ()))
        raise BadDefinition(f"{where}: invalid JSON Schema ({said}{f', at {steps}' if steps else ''})") from None


def _schemas(schema: dict[str, Any], place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """It, and all schemas in it; what stands in `enum`, `default` and the like is none."""
    yield place, schema
    for word in NAMED_SCHEMAS:
        named = schema.get(word)
        for name, one in named.items() if isinstance(named, dict) else ():
            if isinstance(one, dict):
                yield from _schemas(one, f"{place}.{word}.{name}")
    for word in LISTED_SCHEMAS:
        listed = schema.get(word)
        for number, one in enumerate(listed) if isinstance(listed, list) else ():
            if isinstance(one, dict):
                yield from _schemas(one, f"{place}.{word}[{number}]")
    for word in SCHEMAS:
        one = schema.get(word)
        if isinstance(one, dict):
            yield from _schemas(one, f"{place}.{word}")
