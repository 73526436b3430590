"""A configuration is given in one way to every command, and one for another command is named as
that.
"""

from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.cli.options import given_config
from jax_agent_rl.config import Config
from jax_agent_rl.config.loading import load_tree
from jax_agent_rl.config.recipes import recipe_files
from jax_agent_rl.config.roots import ROOTS, meant_command, root_model
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.config_words import split_config


def commands() -> dict[str, Any]:
    """Every command by its words, those of groups among them."""
    named = {}
    for name, command in typer.main.get_command(app).commands.items():
        for inner, subcommand in getattr(command, "commands", {"": command}).items():
            named[f"{name} {inner}".strip()] = subcommand
    return named


def takes_overrides(command) -> bool:
    return "overrides" in {parameter.name for parameter in command.params}


WITH_KEYS = sorted(name for name, command in commands().items() if takes_overrides(command))
OTHER_ARGUMENTS = {"plan": ["--topology=v5e:4x4"], "rollout": ["--out=rows.parquet"]}
WITHOUT_CONFIG = {"quickstart", "replay", "rescore"}  # their subjects are a recipe and runs


def said(*words: str) -> tuple[int, str]:
    """Run a command here; return its status and all that it said, including a ConfigError."""
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output + (str(result.exception) if result.exception else "")


def test_commands_that_take_a_configuration_are_found():
    assert {
        "train",
        "sft",
        "eval",
        "plan",
        "certify",
        "tool-server",
        "config show",
        "simulate",
    } <= set(WITH_KEYS)


@pytest.mark.parametrize("name", [name for name in WITH_KEYS if name not in WITHOUT_CONFIG])
@pytest.mark.parametrize(
    "form", [["missing.yaml", "seed=1"], ["seed=1", "--config", "missing.yaml"]]
)
def test_every_command_takes_its_configuration_in_both_forms(
    name: str, form: list[str], tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    status, text = said(*name.split(), *form, *OTHER_ARGUMENTS.get(name, []))
    assert status != 0
    assert "'missing.yaml' does not exist" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in WITH_KEYS if name not in WITHOUT_CONFIG])
def test_two_configurations_are_refused_by_every_command(name: str):
    status, text = said(
        *name.split(), "one.yaml", "--config", "two.yaml", *OTHER_ARGUMENTS.get(name, [])
    )
    assert status != 0
    assert "'one.yaml'" in text
    assert "'two.yaml'" in text
    assert "give one" in text


WORD = st.sampled_from(
    ["quickstart", "my.yaml", "seed=1", "trainer.steps=2", "agent.tool_server_url=http://h:1/a=b"]
)


@given(st.lists(WORD, max_size=4), st.none() | st.sampled_from(["my.yaml", "quickstart"]))
@settings(max_examples=50)
def test_keys_keep_their_order_and_one_file_may_stand_anywhere(
    words: list[str], option: str | None
):
    files = {word for word in words if "=" not in word} | ({option} if option else set())
    if len(files) > 1:
        with pytest.raises(ConfigError):
            split_config(words, option)
        return
    file, keys = split_config(words, option)
    assert keys == [word for word in words if "=" in word]
    assert {str(file)} == files or (file is None and not files)


def test_a_file_with_an_equals_sign_in_its_name_is_a_file(tmp_path: Path):
    odd = tmp_path / "a=b.yaml"
    odd.write_text("")
    assert given_config(str(odd), None, None).file == odd


# --- configurations of another command ------------------------------------------------------------


def kind_of(recipe: str) -> str:
    """Return a recipe's kind, by its place in the folder of recipes."""
    return {"supervised/sft": "sft", "supervised/dpo": "dpo", "tool_server": "tool-server"}.get(
        recipe, "train"
    )


@pytest.mark.parametrize("command", ROOTS)
@pytest.mark.parametrize("recipe", recipe_files())
def test_a_recipe_given_to_another_command_is_named_with_its_own(recipe: str, command: str):
    meant = kind_of(recipe)
    try:
        load_tree(root_model(command), recipe)
    except ConfigError as error:
        text = str(error)
        assert meant != command
        assert f"configuration of `{meant}`" in text or "configuration of `distill`" in text
        assert f"not of `{command}`" in text
        assert f" {recipe}" in text
    else:
        assert meant == command or {meant, command} == {
            "sft",
            "dpo",
        }, "it was taken for one of this command"


@pytest.mark.parametrize(
    ("command", "recipe", "meant"),
    [("sft", "quickstart", "train"), ("train", "supervised/sft", "sft")],
)
def test_the_command_line_names_the_command_to_use(command: str, recipe: str, meant: str):
    status, text = said(command, recipe)
    assert status != 0
    assert f"run jax-agent-rl {meant} {recipe}" in text


@pytest.mark.parametrize(
    "tree",
    [
        {"trainer": {"step": 3}},
        {"modle": {"path": "m"}},
        {
            "run_dir": "r",
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rolout": {"group_size": 2},
        },
    ],
)
def test_a_misspelt_key_makes_no_other_command_of_it(tree: dict[str, Any]):
    assert meant_command(tree, Config) is None


def test_one_key_too_many_in_a_section_is_told_as_that():
    tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t", "train_on": ["user"]}}
    assert meant_command(tree, root_model("dpo")) is None
    assert (
        meant_command({**tree, "rollout": {"group_size": 2}}, root_model("sft")) is None
    )  # of none, or of both
    without = {**tree, "data": {"train": "t"}, "rollout": {"group_size": 2}}
    assert meant_command(without, root_model("sft")) == "train"


def test_a_run_folder_s_configuration_says_whose_it_is():
    recorded = {"command": "dpo", "run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
    assert meant_command(recorded, Config) == "dpo"
    assert meant_command(recorded, root_model("dpo")) is None
