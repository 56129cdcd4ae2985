"""Options of a tool: what becomes of a model's arguments, and what a model is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.utp import args
from broker.utp.model import ToolDefinition

VECTOR = json.loads((Path(__file__).parents[1] / "vectors" / "utp_30_args_options.json").read_text())
CONTEXT = VECTOR["template_context"]
SECRET = {"SEARCH_API_KEY": "s3cret-value", "K": "k-value"}


@pytest.mark.parametrize("case", VECTOR["cases"], ids=range(len(VECTOR["cases"])))
def test_a_card_has_the_arguments_that_were_recorded(case: dict[str, Any]) -> None:
    card = args.card_arguments(case["llm_args"], case["options"], CONTEXT)
    expected = case["expect"]
    assert card.arguments == expected["card_arguments"]
    said = {f"metadata.{name}": value for name, value in card.metadata().items()}
    assert said == {name: value for name, value in expected.items() if name != "card_arguments" and value}


def test_a_model_is_shown_what_was_recorded() -> None:
    case = VECTOR["llm_visible_spec"]
    before = json.dumps(case)
    tool = ToolDefinition("p", "t", "d", case["parameters"], "s", "suspend", case["options"])
    assert [args.model_spec(tool)] == case["expect"]
    assert json.dumps(case) == before


def test_a_tool_without_parameters_is_shown_as_one_that_takes_none() -> None:
    spec = args.model_spec(ToolDefinition("p", "t", None, {}, "s", "suspend", {}))
    assert spec["function"] == {"name": "t", "description": "", "parameters": {"type": "object", "properties": {}}}


def test_a_default_of_the_schema_itself_stays() -> None:
    schema = {"properties": {"n": {"type": "integer", "default": 1}, "m": {}, "flag": True}, "required": ["n", "m"]}
    options = {"args": {"defaults": {"n": 2, "m": 3, "flag": 4, "other": 5}}}
    shown = args.visible(schema, options)
    assert shown == {"properties": {"n": {"type": "integer", "default": 1}, "m": {"default": 3}, "flag": True},
                     "required": ["n", "m"]}  # fmt: skip
    assert args.published(schema, options)["required"] == []


def test_an_argument_whose_variable_has_no_name_is_hidden_but_the_models_to_give() -> None:
    options = {"envs": {"a": " ", "b": 5, "c": None}}
    assert args.visible({"properties": {"a": {}, "b": {}, "c": {}, "d": {}}}, options)["properties"] == {"d": {}}
    assert args.card_arguments({"a": 1}, options, CONTEXT).arguments == {"a": 1}
    assert args.executor_arguments({"a": 1}, options, {}) == {"a": 1}


@pytest.mark.parametrize(
    "options",
    [None, [], "x", 5, {}, {"args": None}, {"args": []}, {"args": {"defaults": [], "fixed": "x"}}, {"envs": ["a"]},
     {"args": {"defaults": {1: "x"}, "fixed": {None: 1}}, "envs": {2: "K"}}],
)  # fmt: skip
def test_malformed_options_are_as_good_as_none(options: Any) -> None:
    assert args.all_arguments({"q": 1}, options, CONTEXT, SECRET) == {"q": 1}
    assert args.visible({"properties": {"q": {}}}, options) == {"properties": {"q": {}}}


@pytest.mark.parametrize("given", [None, [], "text", 5])
def test_arguments_that_are_no_object_are_none(given: Any) -> None:
    assert args.card_arguments(given, {"args": {"fixed": {"a": 1}}}, CONTEXT).arguments == {"a": 1}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("{agent_id}", "agent_a"),
        ("hello-{agent_id}/{turn_epoch}", "hello-agent_a/7"),
        ("{parent_step_id} {context_box_id}", "{parent_step_id} {context_box_id}"),  # null
        ("{nobody} {AGENT_ID} { agent_id } {}", "{nobody} {AGENT_ID} { agent_id } {}"),
        ("{{agent_id}}", "{agent_a}"),
        ({"deep": "{agent_id}"}, {"deep": "{agent_id}"}),
        (["{agent_id}"], ["{agent_id}"]),
        (None, None),
        (7, 7),
    ],
)
def test_templates_are_rendered_in_strings_of_the_first_level(value: Any, expected: Any) -> None:
    options = {"args": {"defaults": {"a": value}, "fixed": {"b": value}}}
    assert args.card_arguments({}, options, CONTEXT).arguments == {"a": expected, "b": expected}


def test_what_an_id_says_is_not_a_template() -> None:
    context = {"agent_id": "{project_id}", "project_id": "p"}
    assert args.rendered("{agent_id}", context) == "{project_id}"


def test_what_a_model_gives_is_not_a_template() -> None:
    assert args.card_arguments({"q": "{agent_id}"}, {}, CONTEXT).arguments == {"q": "{agent_id}"}


def test_a_variable_wins_over_everything_and_is_not_in_the_card() -> None:
    options = {
        "args": {"defaults": {"api_key": "d"}, "fixed": {"api_key": "f", "x": 1}},
        "envs": {"api_key": " SEARCH_API_KEY "},
    }
    card = args.card_arguments({"api_key": "models"}, options, CONTEXT)
    assert card.arguments == {"x": 1}
    assert args.executor_arguments({**card.arguments, "api_key": "theirs"}, options, SECRET) == {
        "x": 1,
        "api_key": "s3cret-value",
    }
    assert args.all_arguments({"api_key": "models"}, options, CONTEXT, SECRET) == {"x": 1, "api_key": "s3cret-value"}


def test_the_services_configuration_wins_over_the_tools_options() -> None:
    options = {"envs": {"api_key": "SEARCH_API_KEY"}}
    assert args.executor_arguments({}, options, SECRET, {"api_key": "K", "more": "K"}) == {
        "api_key": "k-value",
        "more": "k-value",
    }


@pytest.mark.parametrize("environment", [{}, {"SEARCH_API_KEY": ""}])
def test_a_variable_without_a_value_is_named_and_nothing_else_is_said(environment: dict[str, str]) -> None:
    options = {"envs": {"other": "K", "api_key": "SEARCH_API_KEY"}}
    with pytest.raises(args.NoValue) as caught:
        args.executor_arguments({"api_key": "given"}, options, {**environment, "K": "k-value"})
    assert "api_key" in str(caught.value)
    assert "SEARCH_API_KEY" in str(caught.value)
    assert "k-value" not in str(caught.value)
    assert "given" not in str(caught.value)


def test_nothing_that_comes_in_is_changed() -> None:
    given = {"q": [1]}
    options = {"args": {"defaults": {"d": {"x": 1}}, "fixed": {"q": 2}}, "envs": {"k": "K"}}
    kept = json.dumps([given, options])
    args.all_arguments(given, options, CONTEXT, SECRET)
    assert json.dumps([given, options]) == kept
