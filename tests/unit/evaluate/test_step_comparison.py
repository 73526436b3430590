"""Recorded and repeated numbers: what counts as equal, as rounding, and as the first difference."""

import json
import math
from contextlib import closing
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.evaluate.step_comparison import (
    StepComparison,
    compare_weights,
    depends_on_time,
    first_difference,
)
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.observe.run_dir import restore_trajectory, trajectory_record
from tests.trajectories import trajectory

LOGPROBS = st.floats(-100, 0, width=32).filter(np.isfinite)


@given(st.lists(LOGPROBS, min_size=1, max_size=8))
def test_a_record_has_every_bit_of_a_float32_logprob(logprobs: list[float]):
    made = trajectory([1], [5] * len(logprobs), logprobs=logprobs)
    record = json.loads(json.dumps(trajectory_record(made, step=1, split="train")))
    assert restore_trajectory(record).rollout_logprobs == made.rollout_logprobs


def test_the_first_difference_is_the_first_in_the_order_of_a_step():
    rewards = StepComparison(what="rewards")
    rewards.add("a", 1.0, 1.0)
    metrics = StepComparison(what="metrics")
    metrics.add("loss", 0.5, 0.5)
    metrics.add("grad_norm", 2.0, 2.0005)
    metrics.add("kl", 0.25, 0.5)

    assert (rewards.equal, rewards.compared, rewards.first) == (1, 1, None)
    assert (metrics.equal, metrics.compared) == (1, 3)
    assert metrics.largest == 0.5
    found = first_difference([rewards, metrics])
    assert found is not None and "grad_norm" in found and "2.0005" in found


@pytest.mark.parametrize(
    ("recorded", "repeated", "is_rounding"),
    [
        (1.0, 1.0009, True),
        (1.0, 1.002, False),
        (1e-9, 2e-9, True),
        (None, 0.0, False),
        (math.nan, 0.0, False),
        (math.inf, 0.0, False),
    ],
)
def test_rounding_is_a_thousandth(recorded: float | None, repeated: float, is_rounding: bool):
    comparison = StepComparison(what="metrics")
    comparison.add("loss", recorded, repeated)
    assert comparison.first is not None
    assert comparison.is_rounding is is_rounding


def test_nan_that_is_nan_again_is_equal():
    comparison = StepComparison(what="metrics")
    comparison.add("loss", math.nan, math.nan)
    assert (comparison.equal, comparison.first) == (1, None)


def test_an_infinite_difference_is_null_in_json():
    comparison = StepComparison(what="metrics")
    comparison.add("loss", 1.0, None)
    assert json.loads(json.dumps(comparison.summary(), allow_nan=False))["largest"] is None


def test_weights_that_are_not_finite_are_more_than_rounding(tmp_path: Path):
    saved = {"kernel": jnp.ones(3), "bias": jnp.zeros(2)}
    with closing(Checkpointer(tmp_path, keep=1)) as checkpointer:
        checkpointer.save(1, saved, {})
        checkpointer.wait()
        assert compare_weights(checkpointer, tmp_path, 1, saved).first is None
        repeated = {**saved, "kernel": jnp.asarray([1.0, jnp.nan, 1.0])}
        comparison = compare_weights(checkpointer, tmp_path, 1, repeated)
    assert (comparison.equal, comparison.compared) == (1, 2)
    assert comparison.first is not None and not comparison.is_rounding


def test_what_depends_on_time_is_not_compared():
    assert depends_on_time("learner_seconds")
    assert depends_on_time("adapter/one/learner_tokens_per_second")
    assert not depends_on_time("loss")
