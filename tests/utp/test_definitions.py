"""Definitions of tools in YAML: what is taken, what is refused, and in which words."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from broker.utp.definitions import MOST_BYTES, BadDefinition, check_external, read
from broker.utp.model import ToolDefinition

BASE = "tool_name: t\ntarget_subject: cg.v1r3.{project_id}.{channel_id}.cmd.tool.svc.call\nafter_execution: suspend\n"


def kept(more: str = "", base: str = BASE) -> ToolDefinition:
    return read("p", (base + more).encode())


def refused(more: str = "", base: str = BASE) -> str:
    with pytest.raises(BadDefinition) as caught:
        kept(more, base)
    return str(caught.value)


def external(**changes: str) -> str:
    """What is wrong with a definition that differs in this; empty: nothing."""
    base = "".join(f"{name}: {changes.get(name, value)}\n" for name, _, value in
                   (line.partition(": ") for line in BASE.splitlines()))  # fmt: skip
    try:
        check_external(read("p", base.encode()))
    except BadDefinition as error:
        return str(error)
    return ""


def test_a_definition_of_the_seed_is_kept_as_it_is_written() -> None:
    definition = kept(
        """description: Searches.
parameters:
  type: object
  properties: {q: {type: string}, tags: {type: array, items: {type: string}}}
  required: [q]
options:
  args: {defaults: {session_id: "{agent_turn_id}"}, fixed: {project_id: "{project_id}"}}
  envs: {api_key: SEARCH_API_KEY}
  jina: {mode: search, base_url: "https://s.jina.ai", path: /search, method: GET, auth_env: JINA_API_KEY}
"""
    )
    assert definition.description == "Searches."
    assert definition.parameters["properties"]["tags"] == {"type": "array", "items": {"type": "string"}}
    assert definition.options["jina"]["mode"] == "search"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("parameters: null", "parameters"),
        ("parameters: []", "parameters"),
        ("options: text", "options"),
        ("description: 5", "description"),
        ("5: 6", "key 5"),
        ("options: {1: 2}", "key 1"),
        ("options: {on: 1}", "key True"),
        ("options: {a: 2024-01-01}", "options.a: a date"),
        ("options: {a: [.nan]}", "options.a[0]"),
        ("options: {a: .inf}", "options.a"),
        ('options: {a: "\\0"}', "options.a"),
        ('options: {"\\0": a}', "options"),
        ('options: {a: "\\ud800"}', "options.a"),
        ("options: {a: 99999999999999999999999}", "options.a"),
        ("options: {a: !!binary aGk=}", "options.a: a bytes"),
        ("options: {a: !!set {b}}", "options.a: a set"),
        ("x: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("x: *nobody", "found undefined alias"),
        ("x: 2024-99-99", "month"),
        ("---\nx: 1", "expected a single document"),
        ("? [a]\n: b", "unhashable"),
        ("x: 'open", "while scanning a quoted scalar"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_the_place_is_named(more: str, words: str) -> None:
    assert words in refused(more)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "YAML root must be a mapping"),
        ("just text", "YAML root must be a mapping"),
        ("target_subject: a.cmd.tool.b\nafter_execution: suspend", "tool_name is required"),
        ("tool_name: ' '\ntarget_subject: a.cmd.tool.b\nafter_execution: suspend", "tool_name is required"),
        ("tool_name: 5\ntarget_subject: a.cmd.tool.b\nafter_execution: suspend", "tool_name is required"),
        ("tool_name: t\nafter_execution: suspend", "target_subject is required"),
        ("tool_name: t\ntarget_subject: a.cmd.tool.b", "after_execution is required"),
        ("tool_name: t\ntarget_subject: [a]\nafter_execution: suspend", "target_subject must be a string"),
        ("tool_name: t\ntarget_subject: ''\nafter_execution: suspend", "target_subject must not be empty"),
    ],
)
def test_what_is_missing_is_named(text: str, words: str) -> None:
    assert refused(text, base="") == words


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(BadDefinition, match="failed to read file: 'utf-8' codec"):
        read("p", b"\xff\xfe")


def test_the_last_of_two_keys_counts_and_a_mark_at_the_beginning_does_not() -> None:
    assert kept("tool_name: u").tool_name == "u"
    assert read("p", b"\xef\xbb\xbf" + BASE.encode()).tool_name == "t"


def test_aliases_and_merges_of_the_usual_kind_are_understood() -> None:
    definition = kept(
        "x: &text {type: string}\nparameters:\n  type: object\n  properties: {a: *text, b: {<<: *text, description: B}}"
    )
    assert definition.parameters["properties"] == {
        "a": {"type": "string"},
        "b": {"type": "string", "description": "B"},
    }


@pytest.mark.parametrize("name", ["delegate_async", "launch_principal", "ask_expert", "fork_join", "provision_agent"])
def test_an_agents_own_tools_cannot_be_redefined(name: str) -> None:
    assert external(tool_name=f"' {name} '") == f"tool_name is reserved for internal tools: {name}"


@pytest.mark.parametrize(
    ("subject", "taken"),
    [
        ("cg.v1r3.{project_id}.{channel_id}.cmd.tool.svc.call", True),
        ("cg.v1r3.p.c.cmd.sys.pmo.internal", False),
        ("cg.v1r3.p.c.cmd.tool.x.cmd.sys.y", False),
        ("cmd.tool.svc.call", False),
        ("cg.v1r3.p.c.cmd.tools.svc", False),
    ],
)
def test_only_subjects_of_tools_are_taken(subject: str, taken: bool) -> None:
    assert (external(target_subject=f"'{subject}'") == "") is taken


@pytest.mark.parametrize("value", ["suspend", "terminate"])
def test_a_turn_is_suspended_or_terminated(value: str) -> None:
    assert external(after_execution=value) == ""


@pytest.mark.parametrize("value", ["resume", "Suspend", "' suspend '"])
def test_a_turn_does_nothing_else(value: str) -> None:
    assert "after_execution must be" in external(after_execution=value)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ("{type: array}", "$ is array"),
        ("{type: array, items: {}}", "$ is array"),
        ("{type: array, items: true}", "$ is array"),
        ("{properties: {a: {type: array}}}", "$.properties.a is array"),
        ("{properties: {a: {type: array, items: {type: array}}}}", "$.properties.a.items is array"),
        ("{properties: {a: {anyOf: [{type: string}, {type: array}]}}}", "$.properties.a.anyOf[1] is array"),
        ("{oneOf: [{allOf: [{type: array}]}]}", "$.oneOf[0].allOf[0] is array"),
        ("{$defs: {x: {type: array}}}", "$.$defs.x is array"),
        ("{definitions: {x: {type: array}}}", "$.definitions.x is array"),
        ("{additionalProperties: {type: array}}", "$.additionalProperties is array"),
        ("{properties: {a: {type: [array, 'null']}}}", "$.properties.a is array"),
    ],
)
def test_an_array_says_what_its_items_are_at_any_depth(schema: str, place: str) -> None:
    assert refused(f"parameters: {schema}") == f"tool_yaml[t].parameters: {place} but missing `items` object"


@pytest.mark.parametrize(
    "schema",
    [
        "{type: array, items: {type: string}}",
        "{properties: {type: {type: string}, items: {type: string}}}",  # arguments of these names
        "{default: {type: array}, enum: [{type: array}], const: {type: array}, examples: [{type: array}]}",
        "{}",
    ],
)
def test_what_only_looks_like_an_array_is_none(schema: str) -> None:
    kept(f"parameters: {schema}")


@pytest.mark.parametrize(
    "schema",
    [
        "{type: nothing}",
        "{properties: {a: 5}}",
        "{properties: []}",
        "{required: a}",
        "{properties: {a: {minimum: low}}}",
        "{$schema: 5}",
    ],
)
def test_parameters_are_a_json_schema(schema: str) -> None:
    assert refused(f"parameters: {schema}").startswith("tool_yaml[t].parameters: invalid JSON Schema (")


def test_nothing_is_looked_up_anywhere() -> None:
    """A schema may say where to find another one; a definition comes from somebody whom we do not do errands for."""
    asked = threading.Event()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.3)
        where = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        for schema in (
            f"$schema: '{where}'",
            f"$ref: '{where}'",
            f"$defs: {{a: {{$id: '{where}', $schema: '{where}'}}}}",
        ):
            kept(f"parameters: {{{schema}}}")
        try:
            listener.accept()
            asked.set()
        except TimeoutError:
            pass
    assert not asked.is_set()


def _levels(line: str, count: int = 20) -> str:
    return "".join(line.format(i + 1, ",".join([f"*a{i}"] * 10)) for i in range(count))


HOSTILE = {
    "laughs": "options:\n  a0: &a0 [x,x]\n" + _levels("  a{0}: &a{0} [{1}]\n"),
    "a long text, often": "options:\n  a: &a " + "x" * 50_000 + "\n  b: [" + ",".join(["*a"] * 5000) + "]\n",
    "merged laughs": "x0: &a0 {k: 1, l: 2}\n" + _levels("x{0}: &a{0}\n  <<: [{1}]\n"),
    "much, merged often": "x0: &a {"
    + ",".join(f"k{i}: 1" for i in range(8000))
    + "}\nx1:\n  <<: ["
    + ",".join(["*a"] * 10_000)
    + "]\n",
    "itself": "options: &a {b: *a}\n",
    "itself, merged": "x: &a\n  <<: *a\n",
    "lists in lists": "x: " + "[" * 60_000,
    "mappings in mappings": "x: " + "{a: " * 20_000,
    "deep": "options: " + "{a: " * 70 + "1" + "}" * 70,
    "digits": "x: " + "9" * 100_000,
    "too long": "x: " + "a" * MOST_BYTES,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_before_it_costs_much(name: str) -> None:
    begun = time.process_time()
    refused(HOSTILE[name])
    assert time.process_time() - begun < 3.0
