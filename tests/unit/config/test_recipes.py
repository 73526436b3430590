"""Recipes: every command finds them by name, wherever it runs."""

from pathlib import Path

import pytest

from jax_agent_rl import config
from jax_agent_rl.config.recipes import find_config, recipe_files
from jax_agent_rl.errors import ConfigError
from tests.messages import raises

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_file_of_configs_has_a_name():
    assert {name: file.resolve() for name, file in recipe_files().items()} == {
        file.relative_to(CONFIGS).with_suffix("").as_posix(): file
        for file in CONFIGS.rglob("*.yaml")
    }


@pytest.mark.parametrize("name", ["dapo", "dapo.yaml"])
def test_a_recipe_is_found_by_name_with_or_without_its_ending(name: str):
    assert config.load(name, []).run_dir == "runs/dapo"


def test_a_file_is_found_before_a_recipe(elsewhere: Path):
    (elsewhere / "dapo.yaml").write_text("base: quickstart\nrun_dir: runs/mine\n")
    assert config.load("dapo.yaml", []).run_dir == "runs/mine"


def test_a_base_may_be_a_recipe_or_a_file_beside(elsewhere: Path):
    folder = elsewhere / "mine"
    folder.mkdir()
    (folder / "first.yaml").write_text("base: quickstart\nseed: 5\n")
    (folder / "second.yaml").write_text("base: first.yaml\nrun_dir: runs/second\n")
    merged = config.load(folder / "second.yaml", [])
    assert (merged.seed, merged.run_dir, merged.agent.tool_format) == (5, "runs/second", "pythonic")


def test_a_recipe_cannot_be_its_own_base(elsewhere: Path):
    (elsewhere / "loop.yaml").write_text("base: loop.yaml\n")
    with raises(ConfigError, key="base", value="leads back"):
        config.load("loop.yaml", [])


def test_what_is_neither_file_nor_recipe_is_answered_with_known_names():
    with raises(ConfigError, value="'no such'", fix=("dapo", "quickstart")):
        config.load("no such", [])


def test_an_absolute_path_is_never_a_recipe(elsewhere: Path):
    assert find_config(elsewhere / "dapo") == elsewhere / "dapo"


def test_a_misspelled_recipe_gets_a_guess():
    with raises(ConfigError, value="qickstart", fix="quickstart"):
        config.load("qickstart", [])


@pytest.mark.parametrize("content", ["[]", "false", "0", "''"])
def test_what_holds_no_sections_is_no_empty_configuration(content: str, tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with raises(ConfigError, fix="a mapping"):
        config.load(file, [])


@pytest.mark.parametrize("base", ["[quickstart]", "1", "{a: b}", "true"])
def test_a_base_is_text(base: str, tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"base: {base}\n")
    with raises(ConfigError, key="base", fix="text"):
        config.load(file, [])
