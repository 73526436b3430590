"""A group shown as a tree, from what its run wrote."""

import io
import json
from dataclasses import replace

from rich.console import Console

from jax_agent_rl.observe.run_dir import trajectory_record
from jax_agent_rl.observe.trees import groups_of, render_group, trajectory_of
from jax_agent_rl.types import Fork
from tests.trajectories import trajectory

STEM = trajectory([3], [10, 11, 7, 12], mask=[1, 1, 0, 1], reward=1.0, index=0)
FORK = Fork(tree_id="g-0", parent_id="g-0", turns=1)
BRANCH = replace(trajectory([3], [10, 11, 7, 13, 14], mask=[1, 1, 0, 1, 1], index=1), fork=FORK)


def records_of(*trajectories, step: int = 1):
    made = [trajectory_record(t, step=step, split="train") for t in trajectories]
    return [json.loads(json.dumps(record)) for record in made]


def test_a_record_is_read_back_with_its_fork():
    (record,) = records_of(BRANCH)
    again = trajectory_of(record)
    assert again.fork == FORK
    for name in ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "policy_versions", "reward"):
        assert getattr(again, name) == getattr(BRANCH, name)


def test_common_turns_stand_once_with_the_mean_reward_of_what_followed():
    console = Console(file=io.StringIO(), width=160)
    console.print(render_group(records_of(STEM, BRANCH), lambda ids: " ".join(map(str, ids))))
    head, first, *leaves = console.file.getvalue().splitlines()
    assert head.split("  ")[:2] == ["g", "2 trajectories, 1 trees, mean reward 0.50, 2 of 7 sampled tokens shared"]
    assert "turn 1  2 tokens  mean reward 0.50 of 2  10 11" in first
    assert "turn 2  1 tokens  mean reward 1.00 of 1  g-0 (tree 1) answer  12" in leaves[0]
    assert "turn 2  2 tokens  mean reward 0.00 of 1  g-1 (tree 1) answer  13 14" in leaves[1]


def test_trajectories_that_are_equal_are_both_named():
    console = Console(file=io.StringIO(), width=160)
    twin = replace(STEM, trajectory_id="g-5")
    console.print(render_group(records_of(STEM, twin), str))
    assert "g-0 (tree 1) answer  g-5 (tree 2) answer" in console.file.getvalue()


def test_groups_of_different_steps_are_told_apart():
    records = [*records_of(STEM, BRANCH), *records_of(STEM, step=2)]
    assert [len(group) for group in groups_of(records)] == [2, 1]
