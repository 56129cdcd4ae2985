"""`options.args` and `options.envs`: what becomes of a model's arguments, and what a model is shown. Pure.

A malformed part of the options is as good as absent: who wrote them is not the one who calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from broker.utp.model import ToolDefinition

VARIABLES = (
    "project_id",
    "channel_id",
    "agent_id",
    "agent_turn_id",
    "step_id",
    "tool_call_id",
    "parent_step_id",
    "trace_id",
    "turn_epoch",
    "context_box_id",
)
_TEMPLATE = re.compile(r"\{(" + "|".join(VARIABLES) + r")\}")


class Environment(Protocol):
    """Where values of variables come from: os.environ, or what is lent of it."""

    def get(self, name: str, /) -> str | None: ...


class NoValue(Exception):
    """A variable that an argument is taken from has no value. Names both; there is nothing else to say."""

    def __init__(self, argument: str, variable: str) -> None:
        super().__init__(f"the argument {argument} comes from the environment variable {variable}, which has no value")
        self.argument = argument
        self.variable = variable


class Options(NamedTuple):
    """What of a tool's options concerns arguments."""

    defaults: dict[str, Any]
    fixed: dict[str, Any]
    envs: dict[str, str]  # argument → the variable that its value is in
    hidden: frozenset[str]  # no model is shown these


class CardArguments(NamedTuple):
    """What the agent's worker writes into a call's card."""

    arguments: dict[str, Any]
    defaults: list[str]
    fixed: list[str]
    envs: dict[str, str]

    def metadata(self) -> dict[str, Any]:
        """Beside the card's other metadata; what has not happened is not mentioned."""
        said = {
            "tool_args_defaults_applied": self.defaults,
            "tool_args_fixed_applied": self.fixed,
            "tool_args_envs": self.envs,
        }
        return {name: value for name, value in said.items() if value}


def read(options: Any, service_envs: Any = None) -> Options:
    """`service_envs` are the service's own configuration: argument → variable, too, and stronger."""
    whole = _object(options)
    args = _object(whole.get("args"))
    envs = _variables(whole.get("envs")) | _variables(service_envs)
    hidden = frozenset((*_object(args.get("fixed")), *_object(whole.get("envs")), *envs))
    return Options(_without(args.get("defaults"), envs), _without(args.get("fixed"), envs), envs, hidden)


def card_arguments(given: Any, options: Any, context: Mapping[str, Any]) -> CardArguments:
    """The worker's side: values of variables are nobody's to give; defaults where nothing is given (null is given);
    fixed ones over all."""
    rules = read(options)
    arguments = {name: value for name, value in _object(given).items() if name not in rules.envs}
    defaults = {name: value for name, value in rules.defaults.items() if name not in arguments}
    for name, value in (*defaults.items(), *rules.fixed.items()):
        arguments[name] = rendered(value, context)
    return CardArguments(arguments, sorted(defaults), sorted(rules.fixed), rules.envs)


def executor_arguments(
    arguments: Mapping[str, Any], options: Any, environment: Environment, service_envs: Any = None
) -> dict[str, Any]:
    """The executor's side: what a card says, and values of variables. The result is for the tool, nobody else."""
    return with_values(arguments, read(options, service_envs).envs, environment)


def all_arguments(
    given: Any, options: Any, context: Mapping[str, Any], environment: Environment, service_envs: Any = None
) -> dict[str, Any]:
    """Both sides, for a call without a worker."""
    return executor_arguments(card_arguments(given, options, context).arguments, options, environment, service_envs)


def with_values(arguments: Mapping[str, Any], envs: Mapping[str, str], environment: Environment) -> dict[str, Any]:
    """An empty variable has no value."""
    complete = {name: value for name, value in arguments.items() if name not in envs}
    for argument, variable in envs.items():
        value = environment.get(variable)
        if not value:
            raise NoValue(argument, variable)
        complete[argument] = value
    return complete


def rendered(value: Any, context: Mapping[str, Any]) -> Any:
    """IDs take the place of their names in a string; what is unknown or null stays as it is written."""
    if not isinstance(value, str):
        return value

    def put(found: re.Match[str]) -> str:
        known = context.get(found[1])
        return found[0] if known is None else str(known)

    return _TEMPLATE.sub(put, value)


# --- what a model is shown ------------------------------------------------------------------------------------------


def visible(parameters: Any, options: Any) -> dict[str, Any]:
    """The schema of a tool's arguments without those that no model sets, and with the defaults of the others."""
    rules = read(options)
    schema: dict[str, Any] = msgspec.to_builtins(_object(parameters)) or {"type": "object", "properties": {}}
    properties = schema.get("properties")
    if isinstance(properties, dict):
        for name in rules.hidden:
            properties.pop(name, None)
        for name, value in rules.defaults.items():
            shown = properties.get(name)
            if name not in rules.hidden and isinstance(shown, dict):
                shown.setdefault("default", msgspec.to_builtins(value))
    required = schema.get("required")
    if isinstance(required, list):
        schema["required"] = [name for name in required if not isinstance(name, str) or name not in rules.hidden]
    return schema


def published(schema: dict[str, Any], options: Any) -> dict[str, Any]:
    """The same for callers of our own faces, who need not give what has a default either."""
    shown = visible(schema, options)
    defaults = read(options).defaults
    if isinstance(shown.get("required"), list):
        shown["required"] = [name for name in shown["required"] if name not in defaults]
    return shown


def model_spec(tool: ToolDefinition) -> dict[str, Any]:
    """A tool as a model reads of it."""
    parameters = visible(tool.parameters, tool.options)
    function = {"name": tool.tool_name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _object(value: Any) -> dict[str, Any]:
    return {name: one for name, one in value.items() if isinstance(name, str)} if isinstance(value, dict) else {}


def _without(value: Any, envs: Mapping[str, str]) -> dict[str, Any]:
    return {name: one for name, one in _object(value).items() if name not in envs}


def _variables(envs: Any) -> dict[str, str]:
    named = _object(envs).items()
    return {argument: name.strip() for argument, name in named if isinstance(name, str) and name.strip()}
