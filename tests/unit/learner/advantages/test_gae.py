"""GAE over responses with tool results in them.

GOLDEN numbers were printed once by verl's ``compute_gae_advantage_return`` (commit b178a3c,
float64).
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.config.algorithm import AlgorithmConfig
from jax_agent_rl.learner.advantages.estimators import gae, whiten
from jax_agent_rl.learner.advantages.registry import compute_advantages
from jax_agent_rl.learner.advantages.scored_batch import scored_batch
from jax_agent_rl.types import FinishReason
from tests.trajectories import group_of, trajectory

MASKS = [np.array(m, bool) for m in ([1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1])]
NATURAL_ENDS = (
    FinishReason.ANSWER, FinishReason.TOOL_DONE, FinishReason.USER_DONE,
    FinishReason.ENVIRONMENT_DONE,
)  # fmt: skip
REWARDS = [np.array(r) for r in ([0, 0.25, 0, 1.0], [0, 0, -0.5, 0], [0, 0, 0, 2.0])]
VALUES = [np.array(v) for v in ([0.1, 0.2, 9.0, 0.4], [0.3, -0.2, 0.5, 7.0], [0.0, 0.1, 0.2, 0.3])]


def test_advantages_and_returns_match_a_peer():
    estimates = [
        gae(r, v, m, gamma=0.9, lam=0.8) for r, v, m in zip(REWARDS, VALUES, MASKS, strict=True)
    ]
    np.testing.assert_allclose(
        [returns for _, returns in estimates],
        [[0.78624, 1.042, 0, 1], [-0.2304, -0.27, -0.5, 0], [0.8184096, 1.11168, 1.494, 2]],
        atol=1e-12,
    )
    np.testing.assert_allclose(
        whiten([advantages for advantages, _ in estimates], MASKS),
        [
            [0.18169997036328955, 0.36906933148275234, 0, 0.07795874217285223],
            [-1.281840473347441, -0.7280085918669535, -1.8467393689669822, 0],
            [0.34069158253210685, 0.5731835661691321, 0.9127965478797557, 1.4011886935814883],
        ],
        atol=1e-12,
    )


tokens = st.lists(
    st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), min_size=1, max_size=12
).filter(lambda rows: rows[0][2])


@given(tokens, st.floats(0, 1), st.floats(0, 1), st.floats(-2, 2))
def test_a_response_with_tool_results_is_worth_what_it_is_without_them(
    rows, gamma: float, lam: float, value_after: float
):
    """The reference: drop the inserted tokens, hand their rewards to the token before, run the
    textbook recursion.
    """
    rewards, values, mask = (np.array(x) for x in zip(*rows, strict=True))
    positions = np.flatnonzero(mask)
    merged = np.add.reduceat(rewards, positions)
    expected = []
    running = 0.0
    following = value_after
    for r, v in zip(merged[::-1], values[positions][::-1], strict=True):
        running = r + gamma * following - v + gamma * lam * running
        following = v
        expected.append(running)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, value_after=value_after)
    np.testing.assert_allclose(advantages[positions], expected[::-1], atol=1e-9)
    np.testing.assert_allclose(
        returns[positions], advantages[positions] + values[positions], atol=1e-12
    )
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


def test_values_at_inserted_tokens_do_not_matter():
    moved = [np.where(m, v, 1e6) for v, m in zip(VALUES, MASKS, strict=True)]
    for r, v, w, m in zip(REWARDS, VALUES, moved, MASKS, strict=True):
        np.testing.assert_array_equal(
            gae(r, v, m, gamma=0.9, lam=0.8), gae(r, w, m, gamma=0.9, lam=0.8)
        )


@pytest.mark.parametrize(
    ("bootstrap", "finish", "last_return"),
    [
        ("none", FinishReason.RESPONSE_LENGTH, 1.0),
        *(("truncated", finish, 1.0) for finish in NATURAL_ENDS),
        *(
            ("truncated", finish, 1.0 + 0.5 * 8.0)
            for finish in FinishReason
            if finish not in NATURAL_ENDS
        ),
    ],
)
def test_only_a_trajectory_that_was_cut_off_counts_on_what_would_follow(
    bootstrap, finish, last_return: float
):
    group = group_of([trajectory([3], [4, 5], reward=1.0, finish=finish)])
    samples = scored_batch([group], turn_reward="none")
    samples = type(samples)(**{**vars(samples), "values": [np.array([0.0, 0.0, 8.0])]})
    config = AlgorithmConfig(adv_estimator="gae", gamma=0.5, lam=1.0, bootstrap=bootstrap)
    returns = compute_advantages(samples, config).returns
    assert returns is not None
    assert returns[0].tolist() == [0.5 * last_return, last_return]
