"""A token of advantage 0 changes neither a loss, nor its gradient, nor what it counts as clipped,
in any loss.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.config.algorithm import LOSS_MODES, PolicyLossConfig
from jax_agent_rl.learner.losses.policy import POLICY_LOSSES, LossConfig, Terms
from tests.examples import examples

K = 6
SEQUENCE_LOSSES = {"gspo", "geo_mean"}
"""Their ratio is a mean over all tokens of a sequence, those of advantage 0 included."""
WITHOUT_ADVANTAGE = {"dro", "kl_cov"}
"""Have a term that does not depend on the advantage: the square of every log-ratio, a penalty of
chosen tokens."""

log_probs = st.lists(st.floats(-6.0, -0.0625, width=32), min_size=K, max_size=K)
advantages = st.lists(st.sampled_from([-2.0, -0.5, 0.5, 2.0]), min_size=K, max_size=K)
marks = st.lists(st.booleans(), min_size=K, max_size=K)


def config(mode: str) -> LossConfig:
    # Ranges and bounds that random tokens leave often.
    policy_loss = PolicyLossConfig.model_construct(loss_mode=mode, behav_imp_weight_cap=1.1)
    return LossConfig(low=0.1, high=0.2, dual=1.5, policy_loss=policy_loss)


def row(values: list) -> np.ndarray:
    return np.asarray(values, np.float32)[None]


def sums(mode: str, **columns: np.ndarray) -> tuple[float, np.ndarray, float, np.ndarray]:
    """Loss, its gradient by each log-prob, clipped terms (summed as the learner does), and clipped
    terms.
    """
    active = columns.pop("active")
    inputs = {name: jnp.asarray(values, jnp.float32) for name, values in columns.items()}
    sequence = inputs.pop("sequence").astype(jnp.int32)

    def loss(logprob: jax.Array) -> tuple[jax.Array, jax.Array]:
        token_loss = POLICY_LOSSES[mode](
            Terms(logprob=logprob, active=jnp.asarray(active), sequence=sequence, **inputs),
            config(mode),
        )
        return jnp.sum(active * token_loss.loss), token_loss.clipped

    (total, clipped), gradient = jax.value_and_grad(loss, has_aux=True)(inputs.pop("logprob"))
    return float(total), np.asarray(gradient), float(np.sum(active * clipped)), np.asarray(clipped)


def check_that_they_change_nothing(
    mode: str, columns: dict[str, np.ndarray], is_without: np.ndarray
) -> None:
    """Compare the terms with the same ones, where those marked (of advantage 0) are not active."""
    active = columns["active"]
    loss, gradient, count, clipped = sums(mode, **columns)
    loss_alone, gradient_alone, count_alone, _ = sums(
        mode, **columns | {"active": np.where(is_without, 0, active)}
    )

    if mode not in WITHOUT_ADVANTAGE:
        assert loss == pytest.approx(loss_alone, abs=1e-4)
        np.testing.assert_array_equal(gradient[:, is_without], 0)
        np.testing.assert_allclose(gradient, gradient_alone, atol=1e-5)
    if mode == "kl_cov":
        np.testing.assert_array_equal(clipped, columns["chosen"])
    else:
        assert count == count_alone
        np.testing.assert_array_equal(clipped[:, is_without], 0)


@st.composite
def trajectories(draw: st.DrawFn, mode: str) -> dict[str, np.ndarray]:
    """A trajectory of K tokens, some of them masked, some chosen by the losses that choose."""
    chooses = mode in ("clip_cov", "kl_cov")
    return {
        "logprob": row(draw(log_probs)),
        "old_logprob": row(draw(log_probs)),
        "rollout_logprob": row(draw(log_probs)),
        "advantage": row(draw(advantages)),
        "active": row(draw(marks)),
        "chosen": row(draw(marks)) if chooses else np.zeros((1, K), np.float32),
        "sequence": np.zeros((1, K), np.float32),
    }


@settings(max_examples=examples(25))
@given(data=st.data())
@pytest.mark.parametrize("mode", LOSS_MODES)
def test_a_trajectory_without_advantage_changes_nothing(mode, data):
    without_advantage = data.draw(trajectories(mode)) | {
        "advantage": np.zeros((1, K)),
        "sequence": np.ones((1, K)),
    }
    first = data.draw(trajectories(mode))
    columns = {
        name: np.concatenate([values, without_advantage[name]], axis=1)
        for name, values in first.items()
    }
    check_that_they_change_nothing(mode, columns, np.arange(2 * K) >= K)


@settings(max_examples=examples(25))
@given(data=st.data(), without=marks)
@pytest.mark.parametrize("mode", [mode for mode in LOSS_MODES if mode not in SEQUENCE_LOSSES])
def test_a_token_without_advantage_changes_nothing_in_its_trajectory(mode, data, without):
    columns = data.draw(trajectories(mode))
    is_without = np.asarray(without)
    columns["advantage"] = np.where(is_without, 0, columns["advantage"])
    check_that_they_change_nothing(mode, columns, is_without)


@settings(max_examples=examples(25))
@given(data=st.data(), without=marks)
@pytest.mark.parametrize("mode", sorted(SEQUENCE_LOSSES))
def test_a_token_without_advantage_is_not_counted_in_a_loss_of_sequences(mode, data, without):
    columns = data.draw(trajectories(mode))
    is_without = np.asarray(without)
    columns["advantage"] = np.where(is_without, 0, columns["advantage"])
    *_, clipped = sums(mode, **columns)
    np.testing.assert_array_equal(clipped[:, is_without], 0)


@pytest.mark.parametrize("mode", sorted(set(LOSS_MODES) - {"gpg", "sapo", "dro"}))
def test_a_token_that_a_clip_changes_is_counted(mode):
    """Both tokens have left the range of their ratio upwards, and one's advantage wants it to go
    on.
    """
    ones = np.ones((1, 2), np.float32)
    columns = {
        "logprob": -0.1 * ones,
        "old_logprob": -1.5 * ones,
        "rollout_logprob": -3.0 * ones,
        "advantage": np.array([[1.0, 0.0]], np.float32),
        "active": ones,
        "chosen": ones,
        "sequence": np.array([[0.0, 1.0]], np.float32),
    }
    np.testing.assert_array_equal(
        sums(mode, **columns)[3], [[1.0, 1.0 if mode == "kl_cov" else 0.0]]
    )
