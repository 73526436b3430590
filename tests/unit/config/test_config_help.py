"""What is generated from the configuration's models: explanations, the editor's schema, the page of
all keys.
"""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from jax_agent_rl.cli.config import app
from jax_agent_rl.config import Config, load
from jax_agent_rl.config.commands import (
    DpoConfig,
    SftConfig,
    TinkerServerSettings,
    ToolServerSettings,
)
from jax_agent_rl.config.loading import read_tree, valid_keys
from jax_agent_rl.config.reference import describe_type, find, list_keys
from jax_agent_rl.errors import ConfigError
from tests.messages import raises

ROOT = Path(__file__).parents[3]
RECIPES = sorted(p for p in (ROOT / "configs").glob("*.yaml") if p.stem != "tool_server")
EXAMPLES = sorted((ROOT / "examples").glob("*/config.yaml"))
SCHEMA = jsonschema.Draft202012Validator(json.loads((ROOT / "configs" / "schema.json").read_text()))
KEYS = list_keys(Config)


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def complaints(tree: dict) -> list[str]:
    return [error.message for error in SCHEMA.iter_errors(tree)]


# --- generated files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("configs/schema.json", ["schema"]),
        ("configs/tool_server.schema.json", ["schema", "--command", "tool-server"]),
        ("configs/supervised/sft.schema.json", ["schema", "--command", "sft"]),
        ("configs/supervised/dpo.schema.json", ["schema", "--command", "dpo"]),
        ("docs/config.md", ["reference"]),
    ],
)
def test_generated_files_are_up_to_date(file: str, command: list[str]):
    assert (ROOT / file).read_text() == printed(*command), (
        f"run: jax-agent-rl config {' '.join(command)} > {file}"
    )


@pytest.mark.parametrize("path", RECIPES + EXAMPLES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_an_editor_finds_the_schema_of_every_recipe_and_nothing_wrong_in_it(path: Path):
    named = path.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == ROOT / "configs" / "schema.json"
    assert complaints(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize("name", ["tool_server", "supervised/sft", "supervised/dpo"])
def test_recipes_of_other_commands_have_schemas_of_their_own(name: str):
    path = ROOT / "configs" / f"{name}.yaml"
    named = path.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    jsonschema.validate(read_tree(path), json.loads((path.parent / named).read_text()))


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"rollout": {"group_sise": 8}}, "'group_sise' was unexpected"),
        ({"rollout": {"group_size": 0}}, "0 is less than the minimum of 1"),
        ({"trainer": {"mode": "async"}}, "'async' is not one of"),
    ],
)
def test_an_editor_marks_what_training_would_refuse(tree: dict, complaint: str):
    (message,) = complaints(tree)
    assert complaint in message


def test_an_editor_accepts_texts_where_the_configuration_does():
    assert complaints({"agent": {"action_stop_tokens": "```output,</tool>"}}) == []


def test_the_page_has_every_key_once():
    rows = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE)
    models = (Config, SftConfig, DpoConfig, ToolServerSettings, TinkerServerSettings)
    wanted = [k.path for model in models for k in list_keys(model).values() if not k.is_section]
    assert sorted(rows) == sorted(wanted)


# --- recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.stem)
def test_a_recipe_comments_each_key_it_sets(path: Path):
    lines = path.read_text().splitlines()
    sets = [i for i, line in enumerate(lines) if re.match(r"\s*\w+:\s+[^\s#]", line)]
    assert sets
    assert [
        lines[i] for i in sets if "#" not in lines[i] and not lines[i - 1].lstrip().startswith("#")
    ] == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_shown_configuration_is_the_same_when_it_is_loaded(path: Path, tmp_path: Path):
    shown_file = tmp_path / "shown.yaml"
    shown_file.write_text(printed("show", str(path), "seed=7"))
    assert load(shown_file) == load(path, ["seed=7"])


# --- explanations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [Config, SftConfig, DpoConfig, ToolServerSettings, TinkerServerSettings]
)
def test_every_key_and_section_is_described_and_says_what_it_takes(model):
    keys = list_keys(model)
    assert [
        k.path
        for k in keys.values()
        if not k.description or "anything" in k.type or "``" in k.description
    ] == []
    assert {k.path for k in keys.values() if not k.is_section or k.default} == set(
        valid_keys(model)
    )


def test_a_key_is_explained_with_its_type_its_default_and_what_it_may_be():
    text = printed("explain", "trainer.mode")
    assert "sync | one_step_off | fully_async" in text
    assert '"sync"' in text
    assert "roll out continuously" in text
    assert KEYS["data.train"].default is None
    assert "it must be set" in printed("explain", "data.train")


def test_a_section_is_explained_by_the_keys_in_it_and_nothing_by_the_sections():
    assert {"rank", "alpha", "targets"} <= set(printed("explain", "learner.lora").split())
    assert "group_size" not in printed("explain")
    assert "learner" in printed("explain")
    assert "sandbox" in printed("explain", "--command", "tool-server")


@given(st.sampled_from(sorted(KEYS)))
def test_a_key_is_found_by_its_path_and_by_its_last_part(path: str):
    assert find(path, KEYS) == [KEYS[path]]
    assert path.rpartition(".")[2] in {
        key.path.rpartition(".")[2] for key in find(path.rpartition(".")[2], KEYS)
    }


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("rollout.grup_size", "rollout.group_size"),
        ("learning_rat", "learner.learning_rate"),
        ("trainr", "trainer"),
    ],
)
def test_an_unknown_key_is_refused_with_those_that_are_near(typo: str, meant: str):
    with raises(ConfigError, fix=meant):
        find(typo, KEYS)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("rollout.group_size", "integer >= 1"),
        ("rollout.vllm.gpu_memory_utilization", "number > 0 and <= 1"),
        ("trainer.max_staleness", "integer >= 0, or null"),
        ("model.min_pixels", "integer >= 1, or null"),
        ("trainer.agreement_tolerance", "[number, number], or null"),
        ("rollout.vllm.multi_modal", "mapping of image | video to integer >= 1"),
        ("data.train", "text, or mapping, or list of text, or mapping"),
        ("reward.remote.data_sources", "list of text, at least 1"),
        ("reward.remote", "section, or null"),
    ],
)
def test_types_are_said_in_words(path: str, words: str):
    assert KEYS[path].type == words


def test_a_constant_is_the_only_choice():
    assert describe_type({"const": "a", "type": "string"}) == "a"
