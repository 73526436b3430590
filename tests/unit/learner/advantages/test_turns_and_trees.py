"""Advantages per turn. The expected numbers are worked by hand from the papers' formulas."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.config.algorithm import AlgorithmConfig
from jax_agent_rl.learner.advantages.estimators import (
    anchor_groups,
    arpo,
    gigpo,
    grpo,
    igpo,
    tree_grpo,
    treerl,
)
from jax_agent_rl.learner.advantages.registry import compute_advantages
from jax_agent_rl.learner.advantages.scored_batch import scored_batch
from jax_agent_rl.outcomes import total_reward
from jax_agent_rl.trajectory_graph import TrajectoryGraph
from jax_agent_rl.types import Fork, Trajectory
from tests.trajectories import call, group_of, trajectory


def test_gigpo_compares_steps_from_the_same_observation():
    # Two episodes: both start from s, then a sees x and b sees y, then both see z. Their rewards at
    # the end are 1 and 0.
    s = (1,)
    x = (2,)
    y = (3,)
    z = (4,)
    rewards = [np.array([0.0, 0.0, 1.0]), np.array([0.0, 0.0, 0.0])]
    got = gigpo(
        np.array([1.0, 0.0]),
        rewards,
        [[s, x, z], [s, y, z]],
        gamma=0.5,
        step_advantage_w=2.0,
        divide_by_std=False,
        similarity=1.0,
    )
    # Returns: a has .25 .5 1, b has 0 0 0. Anchors: s {.25, 0}, x and y alone (0), z {1, 0}.
    # Episode: +-.5.
    np.testing.assert_allclose(
        got, [[0.5 + 2 * 0.125, 0.5, 0.5 + 2 * 0.5], [-0.5 - 2 * 0.125, -0.5, -0.5 - 2 * 0.5]]
    )


def test_gigpo_with_deviation_matches_a_peer():
    """verl-agent's ``mean_std_norm``.

    The deviation over the steps of an anchor is unbiased; epsilon is 1e-6.
    """
    got = gigpo(
        np.array([1.0, 0.0]),
        [np.array([1.0]), np.array([0.0])],
        [[(1,)], [(1,)]],
        gamma=0.95,
        step_advantage_w=1.0,
        divide_by_std=True,
        similarity=1.0,
    )
    unit = 0.5 / (np.sqrt(0.5) + 1e-6)
    np.testing.assert_allclose(got, [[2 * unit], [-2 * unit]])


def test_observations_that_are_nearly_equal_share_an_anchor_if_asked_to():
    a = tuple(range(40))
    b = (*range(39), 99)
    c = tuple(range(50, 90))
    assert anchor_groups([a, b, c, a], 1.0).tolist() == [0, 1, 2, 0]
    assert anchor_groups([a, b, c, a], 0.95).tolist() == [0, 0, 1, 0]


def test_gigpo_reads_observations_and_rewards_from_the_turns():
    """The tool says 7 to one and 8 to the other; a third saw 7 too and fails after it."""
    members = [
        trajectory([3], [4, 7, 5], mask=[1, 0, 1], reward=1.0, index=0),
        trajectory([3], [4, 8, 6], mask=[1, 0, 1], reward=1.0, index=1),
        trajectory([3], [4, 7, 6], mask=[1, 0, 1], reward=0.0, index=2),
    ]
    config = AlgorithmConfig(adv_estimator="gigpo", gigpo={"gamma": 0.5})
    samples = scored_batch([group_of(members)], turn_reward="none")
    got = compute_advantages(samples, config).advantages
    first = np.array([0.5, 0.5, 0.0]) - 1 / 3  # all from the prompt
    second = np.array([0.5, 0.0, -0.5])  # after 7: 1 and 0; after 8: alone
    episode = np.array([1.0, 1.0, 0.0]) - 2 / 3
    expected = [[e + a, 0, e + b] for e, a, b in zip(episode, first, second, strict=True)]
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_mt_grpo_credits_the_tool_call_only_before_its_result():
    members = [
        trajectory([3], [4, 5, 7, 6], mask=[1, 1, 0, 1], calls=[[call()]], reward=1.0, index=0),
        trajectory(
            [3],
            [4, 5, 7, 6],
            mask=[1, 1, 0, 1],
            calls=[[call(error="raised")]],
            reward=0.0,
            index=1,
        ),
        trajectory([3], [4, 5], reward=0.0, index=2),
    ]
    config = AlgorithmConfig(
        adv_estimator="mt_grpo", turn_reward="tool_success", turn_advantage_coef=0.5
    )
    samples = scored_batch([group_of(members)], turn_reward="tool_success")
    got = compute_advantages(samples, config).advantages
    outcome = grpo(np.array([1.0, 0, 0]))
    turn = grpo(np.array([1.0, 0, 0]))
    np.testing.assert_allclose(got[0], [outcome[0] + turn[0] / 2] * 2 + [0, outcome[0]])
    np.testing.assert_allclose(got[1], [outcome[1] + turn[1] / 2] * 2 + [0, outcome[1]])
    np.testing.assert_allclose(
        got[2], [outcome[2]] * 2
    )  # no tool result: nothing stands before one


def test_tool_rewards_stand_at_the_turns_that_earned_them():
    t = trajectory(
        [3],
        [4, 5, 7, 6],
        mask=[1, 1, 0, 1],
        calls=[[call(reward=0.25), call(reward=0.5, error="x")]],
        reward=1.0,
    )
    assert scored_batch([group_of([t])], turn_reward="tool_reward").rewards[0].tolist() == [
        0,
        0.75,
        0,
        1,
    ]
    assert scored_batch([group_of([t])], turn_reward="tool_success").rewards[0].tolist() == [
        0,
        0.5,
        0,
        1,
    ]
    assert scored_batch([group_of([t])], turn_reward="none").rewards[0].tolist() == [0, 0, 0, 1]


# --- progress -------------------------------------------------------------------------------------


def with_scores(original: Trajectory, *scores: float | None) -> Trajectory:
    """The same; an environment scored its turns."""
    turns = [replace(turn, score=s) for turn, s in zip(original.turns, scores, strict=True)]
    return replace(original, turns=tuple(turns))


def with_progress(original: Trajectory, *scores: float) -> Trajectory:
    """The same; a reward function returned these partial scores."""
    parts = {f"progress/{number}": score for number, score in enumerate(scores, start=1)}
    return replace(original, reward_parts=parts)


THREE_TURNS = trajectory([3], [4, 5, 7, 6, 8, 9], mask=[1, 1, 0, 1, 0, 1], reward=1.0)


def test_progress_pays_every_turn_for_the_difference_that_it_made():
    """1/4 after the first turn, back to 1/8 after the second, and the reward of 1 at the end."""
    reported = with_progress(THREE_TURNS, 0.25, 0.125, 0.75)
    rewards = scored_batch([group_of([reported])], turn_reward="progress").rewards[0]
    assert rewards.tolist() == [0, 0.25, 0, -0.125, 0, 0.875]


def test_scores_of_an_environment_are_progress_where_they_were_given():
    scored = with_scores(THREE_TURNS, 0.25, None, 0.5)
    rewards = scored_batch([group_of([scored])], turn_reward="progress").rewards[0]
    assert rewards.tolist() == [0, 0.25, 0, 0, 0, 0.75]
    reported = with_progress(scored, 0.5, 0.5, 0.5)  # what the reward function says counts
    rewards = scored_batch([group_of([reported])], turn_reward="progress").rewards[0]
    assert rewards.tolist() == [0, 0.5, 0, 0, 0, 0.5]


@given(
    st.lists(st.floats(-4, 4), min_size=3, max_size=3),
    st.floats(-4, 4),
    st.sampled_from([with_progress, with_scores]),
)
def test_progress_divides_the_reward_and_adds_nothing(scores, reward, add_scores):
    scored = replace(add_scores(THREE_TURNS, *scores), reward=reward)
    samples = scored_batch([group_of([scored])], turn_reward="progress")
    np.testing.assert_allclose(samples.totals, [reward], atol=1e-12)
    assert total_reward(scored, "progress") == reward


def test_igpo_scales_the_rewards_of_all_turns_together_and_adds_up_later_ones():
    got = igpo([np.array([0.25, 0.75]), np.array([0.5]), np.array([0.0, 0.0, -0.25])], 0.5)
    pooled = np.array([0.25, 0.75, 0.5, 0.0, 0.0, -0.25])
    r = (pooled - pooled.mean()) / (pooled.std(ddof=1) + 1e-6)
    expected = [
        [r[0] + 0.5 * r[1], r[1]],
        [r[2]],
        [r[3] + 0.5 * r[4] + 0.25 * r[5], r[4] + 0.5 * r[5], r[5]],
    ]
    for advantages, by_hand in zip(got, expected, strict=True):
        np.testing.assert_allclose(advantages, by_hand, atol=1e-12)


def test_igpo_credits_the_turn_that_made_the_progress():
    """Both end alike; the first made its progress at once, the second with its last turn."""
    early = with_progress(THREE_TURNS, 1.0, 1.0, 1.0)
    late = with_progress(replace(THREE_TURNS, trajectory_id="g-1"), 0.0, 0.0, 1.0)
    config = AlgorithmConfig(adv_estimator="igpo", turn_reward="progress", igpo={"gamma": 0.5})
    samples = scored_batch([group_of([early, late])], turn_reward="progress")
    got = compute_advantages(samples, config).advantages

    # rewards of turns 1 0 0 and 0 0 1: mean 1/3, unbiased deviation sqrt(4/15)
    unit = 1 / (np.sqrt(4 / 15) + 1e-6)
    paid = 2 / 3 * unit
    unpaid = -1 / 3 * unit
    first = [paid + unpaid / 2 + unpaid / 4, unpaid + unpaid / 2, unpaid]
    last = [unpaid + unpaid / 2 + paid / 4, unpaid + paid / 2, paid]
    for advantages, (a, b, c) in zip(got, (first, last), strict=True):
        np.testing.assert_allclose(advantages, [a, a, 0, b, 0, c], atol=1e-12)


# --- along trees ----------------------------------------------------------------------------------

# a ─ b ─ c      rewards 1 0 1; e is a tree of its own
# a ─ b ─ d
# e
TREE = [
    trajectory([3], [10, 7, 11, 7, 12], mask=[1, 0, 1, 0, 1], index=0),
    trajectory([3], [10, 7, 11, 7, 13], mask=[1, 0, 1, 0, 1], index=1),
    trajectory([3], [14], index=2),
]
REWARDS = np.array([1.0, 0.0, 1.0])


PATHS = TrajectoryGraph.of(TREE).paths


def test_tree_grpo_adds_the_comparison_within_each_tree():
    everyone = grpo(REWARDS)
    pair = grpo(np.array([1.0, 0.0]))
    expected = [everyone[0] + pair[0], everyone[1] + pair[1], everyone[2]]
    np.testing.assert_allclose(tree_grpo(REWARDS, ["a", "a", "e"]), expected)


def test_a_branch_at_the_prompt_is_compared_within_its_tree():
    """It shares no turn with it, so ids alone would not tell."""
    stem = trajectory([3], [10], reward=0.0, index=0)
    sibling = trajectory([3], [11], reward=1.0, index=1)
    branch = replace(
        trajectory([3], [20], reward=1.0, index=2),
        fork=Fork(tree_id="g-0", parent_id="g-0", turns=0),
    )
    samples = scored_batch([group_of([stem, sibling, branch])], turn_reward="none")
    got = compute_advantages(samples, AlgorithmConfig(adv_estimator="tree_grpo")).advantages
    everyone = grpo(np.array([0.0, 1.0, 1.0]))
    tree = grpo(np.array([0.0, 1.0]))
    np.testing.assert_allclose([a[0] for a in got], everyone + [tree[0], 0, tree[1]])


def test_treerl_credits_a_turn_with_its_value_and_its_gain_over_the_parent():
    # Leaves over the mean of the others: 1 - .5, 0 - 1, 1 - .5. Values: prompt 0, a = b = -.25, c
    # .5, d -1, e .5. Two trajectories share a and b: each gets 1 / sqrt(2) of their credit (the
    # authors' weighted_value_style=sqrt).
    got = treerl(REWARDS, PATHS)
    np.testing.assert_allclose(
        got[0], [-0.5 / np.sqrt(2), -0.25 / np.sqrt(2), 0.5 + 0.75], atol=1e-12
    )
    np.testing.assert_allclose(
        got[1], [-0.5 / np.sqrt(2), -0.25 / np.sqrt(2), -1 - 0.75], atol=1e-12
    )
    np.testing.assert_allclose(got[2], [1.0], atol=1e-12)


@pytest.mark.parametrize("hard", [True, False])
def test_arpo_shares_the_mean_advantage_along_common_turns(hard: bool):
    advantages = grpo(REWARDS)
    got = arpo(REWARDS, PATHS, hard=hard)
    shared = (advantages[0] + advantages[1]) / 2 if hard else advantages[0]
    np.testing.assert_allclose(got[0], [shared, shared, advantages[0]])
    assert got[2].tolist() == [advantages[2]]


def test_of_plain_chains_all_tree_estimators_compare_whole_trajectories():
    chains = [trajectory([3], [10 + i], index=i) for i in range(3)]
    paths = TrajectoryGraph.of(chains).paths
    np.testing.assert_allclose(tree_grpo(REWARDS, [t.tree_id for t in chains]), grpo(REWARDS))
    np.testing.assert_allclose(np.concatenate(arpo(REWARDS, paths, hard=True)), grpo(REWARDS))
    np.testing.assert_allclose(np.concatenate(treerl(REWARDS, paths)), [1.0, -2.0, 1.0])


def test_credit_changes_where_a_branch_left_its_parent_within_a_turn():
    """a = [10 11 12], b keeps 10 and 11 of it. Leaves over the mean of the others: 1 - 0 and 0 - 1,
    so the common part is worth 0, and what follows it +1 + 1 and -1 - 1.
    """
    a = trajectory([3], [10, 11, 12], reward=1.0, index=0)
    b = replace(
        trajectory([3], [10, 11, 20, 21], index=1),
        fork=Fork(tree_id="g-0", parent_id="g-0", turns=0, tokens=2),
    )
    samples = scored_batch([group_of([a, b])], turn_reward="none")
    got = compute_advantages(samples, AlgorithmConfig(adv_estimator="treerl")).advantages
    np.testing.assert_allclose(got[0], [0, 0, 2], atol=1e-12)
    np.testing.assert_allclose(got[1], [0, 0, -2, -2], atol=1e-12)


def test_trained_observations_share_the_credit_of_their_turn():
    def with_learned_observation(t):
        turns = tuple(replace(turn, learn_appended=bool(turn.appended_ids)) for turn in t.turns)
        return replace(t, turns=turns)

    a, b = (
        with_learned_observation(
            trajectory([3], [10, 7, 11 + i], mask=[1, 0, 1], reward=float(i), index=i)
        )
        for i in range(2)
    )
    samples = scored_batch([group_of([a, b])], turn_reward="none")
    got = compute_advantages(samples, AlgorithmConfig(adv_estimator="treerl")).advantages
    np.testing.assert_allclose(got[1], [0, 0, 2], atol=1e-12)
