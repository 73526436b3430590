"""bfloat16 products over float32 master weights: near the float32 gradient, and no update is too
small to count.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.config.learner import OptimizerSection
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.objective import objective_config, scored_terms
from jax_agent_rl.learner.optimized_params import OptimizedParams, UpdatePrograms
from jax_agent_rl.learner.packing import pack
from jax_agent_rl.learner.parameterization import compute_params
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.sharding import make_mesh, replicated
from tests.gradients import policy_gradient
from tests.tiny import TINY, logprobs_of, tiny_params
from tests.trajectories import random_groups, trajectories_of


def make_learner(dtype: str, **algorithm) -> Learner:
    config = LearnerConfig(learning_rate=1e-3, pack_length=64, remat="none", compute_dtype=dtype)
    return Learner(
        TINY, tiny_params(), algorithm=AlgorithmConfig(**algorithm), config=config, temperature=1.0
    )


def gradient(learner: Learner) -> Params:
    return policy_gradient(learner, random_groups(0))[0]


def test_bfloat16_gradients_are_close_and_summed_in_float32():
    exact = gradient(make_learner("float32"))
    rough = gradient(make_learner("bfloat16"))
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(rough), strict=True
    ):
        assert b.dtype == jnp.float32
        a = np.asarray(a).ravel()
        b = np.asarray(b).ravel()
        name = jax.tree_util.keystr(path)
        assert not np.array_equal(a, b), f"{name}: nothing was computed in bfloat16"
        assert np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.98, name
        assert 0.85 < np.linalg.norm(b) / np.linalg.norm(a) < 1.15, name


def test_float32_computes_with_the_very_parameters():
    params = tiny_params()
    for a, b in zip(
        jax.tree.leaves(params), jax.tree.leaves(compute_params(params, "float32")), strict=True
    ):
        assert a is b


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_optimizer_and_logprobs_are_float32_in_either(dtype: str):
    learner = make_learner(dtype, adv_estimator="gae")
    learner.update(random_groups(0))
    for path, x in jax.tree_util.tree_leaves_with_path(learner.state):
        assert x.dtype in (jnp.float32, jnp.int32), jax.tree_util.keystr(path)
    objective = objective_config(AlgorithmConfig(), LearnerConfig(), 1.0)
    (arrays,) = pack(random_groups(0)[0].trajectories, pack_length=64).micro_batches(1)
    model = Decoder.from_params(TINY, compute_params(learner.params, dtype))
    logprob, entropy, *_ = scored_terms(objective, model, arrays, arrays["term_sequence"] >= 0)
    assert logprob.dtype == entropy.dtype == jnp.float32


def steps_of(params: Params, view, count: int) -> np.ndarray:
    """Many updates, each far smaller than a bfloat16 step, that all point the same way."""
    everywhere = replicated(make_mesh(LearnerConfig().mesh))

    def loss(params: Params, batch: dict) -> tuple[jax.Array, dict]:
        return jnp.sum(params["w"].astype(jnp.float32)), {"sum": {}, "max": {}}

    programs = UpdatePrograms(
        params,
        view=view,
        shardings={"w": everywhere},
        everywhere=everywhere,
        optimizer=OptimizerSection(),
        rate=lambda step: 1e-5,
        loss=loss,
    )
    optimized = OptimizedParams(params, frozen={}, programs=programs)
    for step in range(count):
        optimized.apply(optimized.gradients([{"token_ids": np.zeros((1, 1), np.int32)}])[0], step)
    return np.asarray(optimized.state.params["w"], np.float64)


def test_updates_too_small_for_bfloat16_add_up_in_the_master_weights():
    mixed = steps_of({"w": jnp.ones(4)}, lambda params, _: compute_params(params, "bfloat16"), 300)
    np.testing.assert_allclose(
        mixed, 1 - 300 * 1e-5, atol=1e-4
    )  # Adam's steps are of the learning rate's size
    pure = steps_of({"w": jnp.ones(4, jnp.bfloat16)}, lambda params, _: params, 300)
    np.testing.assert_array_equal(pure, 1.0, "pure bfloat16 loses every one of them")


def test_training_in_bfloat16_raises_the_probability_of_what_was_rewarded():
    groups = random_groups(3)
    good = [t for t in trajectories_of(groups) if t.reward]
    bad = [t for t in trajectories_of(groups) if not t.reward]
    learner = make_learner("bfloat16")

    def gap() -> float:
        scores = []
        for t in (*good, *bad):
            log_probs = logprobs_of(learner.params, t.prompt_ids, t.response_ids)
            scores.append(log_probs[np.array(t.response_mask) == 1].mean())
        return float(np.mean(scores[: len(good)]) - np.mean(scores[len(good) :]))

    initial_gap = gap()
    for _ in range(10):
        learner.update(groups)
    assert gap() > initial_gap + 0.05
