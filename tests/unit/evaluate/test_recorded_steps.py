"""What a run folder holds of its training steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_agent_rl.config import Config, build
from jax_agent_rl.errors import DataError
from jax_agent_rl.evaluate.recorded_steps import later_changes, read_steps
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.runtime.resume import CHANGES
from jax_agent_rl.types import Group, RoutedExperts, Trajectory
from tests.messages import raises
from tests.trajectories import group_of, trajectory


def test_settings_that_were_changed_after_a_step_are_named(tmp_path: Path):
    change = {"step": 4, "key": "learner.learning_rate", "old": 0.001, "new": 0.002}
    (tmp_path / CHANGES).write_text(json.dumps(change) + "\n")
    (note,) = later_changes(tmp_path, 4)
    assert "learner.learning_rate was 0.001 in step 4" in note
    assert later_changes(tmp_path, 5) == []


def test_a_run_that_was_never_resumed_changed_nothing(tmp_path: Path):
    assert later_changes(tmp_path, 1) == []


def settings(estimator: str = "grpo") -> Config:
    return build(
        {
            "run_dir": "none",
            "model": {"path": "none"},
            "data": {"train": "none"},
            "algorithm": {"adv_estimator": estimator},
        }
    )


def with_experts(original: Trajectory) -> Trajectory:
    """The trajectory with experts of its first two positions."""
    (turn,) = original.turns
    routed = RoutedExperts.of(0, np.array([[[1, 3]], [[0, 2]]], np.uint8))
    output = replace(turn.output, routed_experts=routed)
    return replace(original, turns=(replace(turn, output=output),))


def members(group: str = "g") -> list[Trajectory]:
    return [trajectory([3, 5], [4, 2], group=group, index=i, reward=float(i)) for i in range(2)]


def record(folder: Path, groups: Sequence[Group]) -> RunDir:
    """A run folder of one step."""
    run = RunDir(folder)
    trajectories = [t for group in groups for t in group.trajectories]
    run.add_trajectories(1, "train", trajectories, groups=groups)
    run.add_metrics({"kind": "step", "step": 1, "trajectories": len(trajectories)})
    return run


def edit(run: RunDir, **fields: Any) -> None:
    """Changes fields of the first record; None removes one."""
    first, *others = run.trajectories.read_text().splitlines()
    changed = json.loads(first)
    for name, value in fields.items():
        del changed[name]
        if value is not None:
            changed[name] = value
    run.trajectories.write_text("\n".join([json.dumps(changed), *others]) + "\n")


def test_greedy_baselines_are_restored_to_the_bit(tmp_path: Path):
    groups = [
        group_of(members(), greedy_reward=0.1 + 0.2),
        group_of(members("lost"), greedy_reward=None),
    ]
    run = record(tmp_path, groups)
    (step,) = read_steps(run.path, settings("remax"), 1, 1)
    assert [group.greedy_reward for group in step.groups] == [0.1 + 0.2, None]


def test_greedy_baselines_that_are_missing_or_differ_are_named(tmp_path: Path):
    run = record(tmp_path, [group_of(members(), greedy_reward=0.5)])
    edit(run, greedy_reward=0.75)
    with raises(DataError, key="greedy_reward", value=("g", "0.75", "0.5")):
        read_steps(run.path, settings("remax"), 1, 1)
    edit(run, greedy_reward=None)
    with raises(DataError, key="algorithm.adv_estimator", value="earlier version"):
        read_steps(run.path, settings("remax"), 1, 1)
    read_steps(run.path, settings(), 1, 1)  # others compare with none


def test_experts_are_restored_and_named_where_they_are_missing(tmp_path: Path):
    learned = [with_experts(member) for member in members()]
    run = record(tmp_path, [group_of(learned)])
    (step,) = read_steps(run.path, settings(), 1, 1)
    (group,) = step.groups
    for restored, original in zip(group.trajectories, learned, strict=True):
        assert restored.turns[0].output.routed_experts == original.turns[0].output.routed_experts

    edit(run, learner_inputs=None)
    with raises(DataError, key="g-0", value=("2 positions", "earlier versions")):
        read_steps(run.path, settings(), 1, 1)


def test_experts_of_roles_that_are_not_trained_are_not_needed(tmp_path: Path):
    run = RunDir(tmp_path)
    first, second = members()
    learned = replace(first, role="a")
    frozen = with_experts(replace(second, role="b"))
    group = group_of([learned], frozen=(frozen,))
    run.add_trajectories(1, "train", [learned, frozen], groups=[group])
    run.add_metrics({"kind": "step", "step": 1, "trajectories": 2})
    config = settings()
    agent = config.agent.model_copy(update={"role_models": {"b": "judge"}})
    (step,) = read_steps(run.path, config.model_copy(update={"agent": agent}), 1, 1)
    assert [len(step.groups[0].trajectories), len(step.groups[0].frozen)] == [1, 1]


@pytest.mark.parametrize("name", ["0" * 32, "f" * 32])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str):
    run = record(tmp_path, [group_of(with_experts(member) for member in members())])
    edit(run, learner_inputs=name)
    with raises(DataError, key="g-0", value=f"{name}.safetensors"):
        read_steps(run.path, settings(), 1, 1)
