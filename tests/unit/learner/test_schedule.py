"""Learning-rate schedules: their shape, and that training steps are what they count."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, CriticConfig, LearnerConfig, build
from jax_agent_rl.config.learner import OptimizerSection
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.optimized_params import OptimizedParams, UpdatePrograms
from jax_agent_rl.learner.optimizer import learning_rate
from jax_agent_rl.models.sharding import make_mesh, replicated
from tests.messages import raises
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups

PEAK = 3e-4


def rates(steps: int, **settings) -> np.ndarray:
    """Return the rates of the first ``steps`` training steps."""
    schedule = learning_rate(OptimizerSection(learning_rate=PEAK, **settings), total_steps=10)
    return np.array([float(schedule(step)) for step in range(steps)])


def decayed(kind: str, warm_up: int, floor: float, total: int = 10) -> np.ndarray:
    """Return the rates in float64.

    They rise in equal steps to the peak during the warm-up. Then they are those of transformers'
    ``get_linear_schedule_with_warmup`` and verl's ``get_cosine_schedule_with_warmup``."""
    steps = np.arange(total)
    progress = np.clip((steps - warm_up) / (total - warm_up), 0, 1)
    factor = {
        "constant": np.ones(total),
        "linear": 1 - progress,
        "cosine": (1 + np.cos(np.pi * progress)) / 2,
    }[kind]
    return PEAK * np.where(
        steps < warm_up, (steps + 1) / max(warm_up, 1), floor + (1 - floor) * factor
    )


@pytest.mark.parametrize(
    ("kind", "warm_up", "floor"),
    [("constant", 0, 0.0), ("constant", 4, 0.0), ("linear", 0, 0.0), ("linear", 3, 0.25),
     ("cosine", 1, 0.0), ("cosine", 4, 0.1)],
)  # fmt: skip
def test_a_schedule_has_the_rates_of_its_formula(kind: str, warm_up: int, floor: float):
    got = rates(10, lr_scheduler_type=kind, lr_warmup_steps=warm_up, min_lr_ratio=floor)
    np.testing.assert_allclose(got, decayed(kind, warm_up, floor), rtol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_past_the_horizon_the_rate_stays_at_its_floor(kind: str):
    np.testing.assert_allclose(
        rates(13, lr_scheduler_type=kind, lr_warmup_steps=2, min_lr_ratio=0.2)[10:],
        0.2 * PEAK,
        rtol=1e-6,
    )


def test_a_decay_without_a_horizon_is_refused():
    with raises(ConfigError, key="lr_scheduler_type=linear", fix="total_steps"):
        learning_rate(OptimizerSection(lr_scheduler_type="linear"), total_steps=None)
    assert learning_rate(OptimizerSection(lr_warmup_steps=2), total_steps=None)(5) == pytest.approx(
        1e-6
    )


MINIMAL = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["learner.min_lr_ratio=0.1"],
         ("learner.lr_scheduler_type linear, cosine or wsd", "'constant'")),
        (["learner.lr_scheduler_type=cosine", "learner.lr_warmup_steps=5", "trainer.steps=5"],
         "raise trainer.steps"),
        (
            ["algorithm.adv_estimator=gae", "critic.critic_warmup=5",
             "learner.lr_scheduler_type=linear", "trainer.steps=5"],
            "less critic.critic_warmup",
        ),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_followed_is_refused_with_the_fix(overrides: list[str], fix):
    with raises(ConfigError, fix=fix):
        build(MINIMAL, overrides)


def test_the_rate_follows_training_steps_whatever_each_of_them_updates():
    """Two mini-batches, two epochs, and a policy that waits a step for its critic: its own schedule
    is one shorter.
    """
    learner = Learner(
        TINY,
        tiny_params(),
        algorithm=AlgorithmConfig(adv_estimator="gae", rollout_correction={"bypass_mode": True}),
        config=LearnerConfig(
            learning_rate=PEAK, pack_length=64, remat="none", num_minibatches=2, ppo_epochs=2,
            lr_scheduler_type="cosine", lr_warmup_steps=1, min_lr_ratio=0.1,
        ),
        critic=CriticConfig(learning_rate=PEAK, critic_warmup=1, lr_scheduler_type="linear"),
        temperature=1.0,
        total_steps=4,
    )  # fmt: skip
    recorded = [
        learner.update(random_groups(seed, groups=2, members=2)).metrics for seed in range(4)
    ]
    critic = [line["critic_learning_rate"] for line in recorded]
    np.testing.assert_allclose(critic, decayed("linear", 0, 0.0, total=4), rtol=1e-6)
    policy = [line["learning_rate"] for line in recorded if "learning_rate" in line]
    np.testing.assert_allclose(policy, decayed("cosine", 1, 0.1, total=3), rtol=1e-6)


def test_an_update_moves_the_parameters_by_the_rate_that_is_recorded():
    """Adam's first update is of the rate's size, whatever the gradient's. The toy's loss is its
    parameters' sum.
    """
    everywhere = replicated(make_mesh(LearnerConfig().mesh))
    optimizer = OptimizerSection(learning_rate=PEAK, lr_scheduler_type="linear")
    programs = UpdatePrograms(
        {"w": jnp.zeros(4)},
        view=lambda params, frozen: params,
        shardings={"w": everywhere},
        everywhere=everywhere,
        optimizer=optimizer,
        rate=learning_rate(optimizer, total_steps=10),
        loss=lambda params, batch: (jnp.sum(params["w"]), {"sum": {}, "max": {}}),
    )
    optimized = OptimizedParams({"w": jnp.zeros(4)}, frozen={}, programs=programs)
    rate = optimized.apply(
        optimized.gradients([{"token_ids": np.zeros((1, 1), np.int32)}])[0], 6
    ).rate
    assert rate == pytest.approx(0.4 * PEAK)
    np.testing.assert_allclose(optimized.state.params["w"], -rate, rtol=1e-4)
