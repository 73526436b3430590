"""What a user reads about a wrong value names key, value and what to write, in this project's
words.
"""

import math
import re
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import core_schema

from jax_agent_rl.agents.endpoint.answers import as_api_error
from jax_agent_rl.agents.endpoint.requests import ChatRequest
from jax_agent_rl.config.loading import build_tree
from jax_agent_rl.config.reference import KeyInfo, list_keys
from jax_agent_rl.config.roots import ROOTS, root_model
from jax_agent_rl.environments.users.builtin import ModelUserConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.testing.simulate.workload import Assumptions
from jax_agent_rl.tinker_server.requests import ModelRequest
from jax_agent_rl.tinker_server.wire import BadRequest
from jax_agent_rl.utils.http_server import Refused, check_body
from jax_agent_rl.utils.wrong_values import describe_value
from tests.messages import raises

FOREIGN = re.compile(
    r"Input should|Extra inputs|Field required|Value error|Assertion failed|should be|a valid "
    r"|unable to parse|unable to interpret|validation error|pydantic|instance of"
)
"""Wording of pydantic's, which knows Python's types and not the keys of a YAML file."""

TREES: dict[str, type[BaseModel]] = {name: root_model(name) for name in ROOTS} | {
    "simulate": Assumptions
}
KEYS = {name: list_keys(model) for name, model in TREES.items()}
PLACES = [(name, key) for name, keys in KEYS.items() for key in keys.values()]
WRONG = st.one_of(
    st.sampled_from(
        [
            {},
            {"odd": 1},
            [],
            [None],
            [{"a": [1]}],
            "",
            "x",
            True,
            -1,
            0,
            1.5,
            10**30,
            math.inf,
            math.nan,
        ]
    ),
    st.dictionaries(st.sampled_from(["a", "path"]), st.integers(-1, 1) | st.none(), max_size=2),
)


def refusal(name: str, tree: dict[str, Any]) -> list[str]:
    """What is said of a tree; nothing if it is right."""
    try:
        build_tree(TREES[name], tree)
    except ConfigError as error:
        return error.problems
    return []


@given(st.sampled_from(PLACES), WRONG)
@settings(max_examples=400)
def test_no_value_of_any_key_brings_up_foreign_words(place: tuple[str, KeyInfo], value: Any):
    name, key = place
    for part in reversed(key.path.split(".")):
        value = {part: value}
    for problem in refusal(name, value):
        assert not FOREIGN.search(problem), problem


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"trainer": {"steps": "many"}}, "trainer.steps='many': must be integer >= 1"),
        ({"trainer": {"steps": 0}}, "trainer.steps=0: must be integer >= 1"),
        (
            {"rollout": {"backend": 3}},
            "rollout.backend=3: must be jetstream | vllm | sglang | remote",
        ),
        ({"rollout": 3}, "rollout=3: must be a section"),
        ({"learner": {"learning_rate": [1]}}, "learner.learning_rate=[1]: must be number"),
        ({"seed": 1.5}, "seed=1.5: must be integer >= 0"),
        ({"trainer": {"logger": {"a": 1}}}, "trainer.logger={'a': 1}: must be "),
    ],
)
def test_key_value_and_what_to_write_are_named_once(tree: dict[str, Any], words: str):
    about = [line for line in refusal("train", tree) if line.startswith(words.partition("=")[0])]
    assert len(about) == 1
    assert about[0].startswith(words)


def test_a_key_that_must_be_set_says_what_it_takes():
    assert "run_dir: required, not set; must be text" in refusal("train", {})


@given(st.sampled_from(sorted(get_args(core_schema.ErrorType))))
@settings(max_examples=200)
def test_every_kind_of_problem_is_told_in_our_words(kind: str):
    about = dict.fromkeys(
        ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "expected"), 1
    )
    about |= {"pattern": "p", "discriminator": "type", "expected_tags": "'a'", "error": "e"}
    message = {"value_error": "Value error, odd", "assertion_error": "Assertion failed, odd"}.get(
        kind, "Input should be 3"
    )
    assert not re.search(
        "Input should|Value error", describe_value({"type": kind, "msg": message, "ctx": about})
    )


class Body(BaseModel, extra="forbid"):
    """A request's body with most kinds of fields."""

    count: int = Field(ge=1)
    share: float = Field(default=0.0, lt=1, allow_inf_nan=False)
    names: list[str] = Field(default=[], max_length=1)
    either: int | str | None = None
    table: dict[str, int] = {}


@given(
    st.dictionaries(st.sampled_from(["count", "share", "names", "either", "table", "odd"]), WRONG)
)
@settings(max_examples=100)
def test_servers_describe_bodies_in_the_same_words(body: dict[str, Any]):
    try:
        check_body(body, Body)
    except Refused as refused:
        assert not FOREIGN.search(str(refused))
    try:
        Body.model_validate(body)
    except ValidationError as error:
        assert not FOREIGN.search(str(as_api_error(error)))


def test_the_chat_endpoint_and_the_tinker_server_speak_likewise():
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"messages": 3, "temperature": "hot"})
    assert not FOREIGN.search(str(as_api_error(caught.value)))
    with raises(BadRequest, key="model_id", value="not set") as refused:
        ModelRequest.from_json(b'{"seq_id": "first"}')
    assert not FOREIGN.search(str(refused.value))


def test_a_simulated_user_s_settings_are_checked_as_every_configuration():
    with raises(ConfigError, key="timeout", value="'long'", fix="number") as caught:
        build_tree(ModelUserConfig, {"timeout": "long", "modle": "m"})
    assert not FOREIGN.search(str(caught.value))
