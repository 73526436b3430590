"""The strategy section: sizes that cannot be, keys that nothing would read, estimators that do not
fit.
"""

from pathlib import Path

import pytest

from jax_agent_rl.config import build, load
from jax_agent_rl.errors import ConfigError

MINIMAL = {"run_dir": "runs/x", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
CONFIGS = Path(__file__).parents[3] / "configs"


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        build(MINIMAL, overrides)
    return error.value.problems


@pytest.mark.parametrize("name", ["tree_grpo", "treerl", "arpo"])
def test_the_recipes_are_valid_and_use_the_strategy_of_their_estimator(name: str):
    config = load(CONFIGS / f"{name}.yaml")
    assert config.rollout.strategy.name == config.algorithm.adv_estimator == name


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (
            ["name=tree_grpo"],
            "m * k = 2 * 3 = 6 trajectories, rollout.group_size is 8; set rollout.group_size=6",
        ),
        (["name=treerl"], "= 30 trajectories, rollout.group_size is 8; set rollout.group_size=30"),
        (
            ["name=arpo", "arpo.initial_rollouts=8"],
            "initial_rollouts=8 leaves nothing of rollout.group_size=8",
        ),
        (
            ["name=tree_grpo", "tree_grpo.m=2", "tree_grpo.k=4"],
            "it has only 1 + l * n = 3; lower k",
        ),
        (
            ["name=arpo", "treerl.m=3"],
            "rollout.strategy.treerl.m=3 is used only with rollout.strategy.name=treerl",
        ),
    ],
)
def test_a_tree_that_cannot_be_says_what_can(overrides: list[str], fix: str):
    (line,) = problems(*(f"rollout.strategy.{item}" for item in overrides))
    assert fix in line


@pytest.mark.parametrize("estimator", ["tree_grpo", "treerl", "arpo"])
def test_estimators_of_trees_are_refused_with_chains(estimator: str):
    (line,) = problems(f"algorithm.adv_estimator={estimator}")
    assert f"set rollout.strategy.name={estimator}" in line


def test_a_greedy_baseline_is_refused_with_trees():
    (line,) = problems("rollout.strategy.name=arpo", "algorithm.adv_estimator=remax")
    assert "greedy chain" in line


@pytest.mark.parametrize("estimator", ["grpo", "treerl", "reinforce_plus_plus"])
def test_trees_go_with_other_estimators(estimator: str):
    config = build(MINIMAL, ["rollout.strategy.name=arpo", f"algorithm.adv_estimator={estimator}"])
    assert config.rollout.strategy.arpo.initial_rollouts == 4
