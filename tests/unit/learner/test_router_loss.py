"""The load-balancing loss of experts: exact however the batch is laid out, and absent where it was
not asked for.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.config import Experts
from tests.gradients import policy_gradient
from tests.messages import raises
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups

MODEL = replace(
    TINY,
    num_layers=2,
    experts=Experts(count=4, per_token=2, intermediate_size=16, normalize=True),
    qk_norm=True,
)


def make_learner(coef: float, **changes) -> Learner:
    config = LearnerConfig(
        **{"pack_length": 64, "remat": "none", "router_aux_loss_coef": coef} | changes
    )
    return Learner(
        MODEL,
        tiny_params(config=MODEL),
        algorithm=AlgorithmConfig(),
        config=config,
        temperature=1.0,
    )


def gradient(learner: Learner) -> tuple[float, list[np.ndarray]]:
    """The balancing loss of one update, and its accumulated gradient before the optimizer."""
    gradients, statistics = policy_gradient(learner, random_groups(0))
    return float(statistics["sum"].get("router_aux", 0.0)), [
        np.asarray(g) for g in jax.tree.leaves(gradients)
    ]


@pytest.mark.parametrize(
    "layout",
    [
        {"pack_length": 300, "share_prefixes": False},
        {"pack_length": 64, "micro_batch_size": 2},
        {"pack_length": 40, "micro_batch_size": 3, "remat": "full"},
    ],
    ids=str,
)
def test_loss_and_gradient_do_not_depend_on_the_layout(layout: dict):
    loss, expected = gradient(make_learner(10.0, pack_length=32, share_prefixes=False))
    layout_loss, got = gradient(make_learner(10.0, **layout))
    assert (
        layout_loss == pytest.approx(loss, rel=1e-5) and loss > 1.0
    )  # 2 would be perfect balance of two choices
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max())


def test_the_router_learns_from_it_and_without_it_nothing_changes():
    loss, plain = gradient(make_learner(0.0))
    _, balanced = gradient(make_learner(1.0))
    names = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(
            MODEL.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple)
        )
    ]
    router = names.index("['layers']['router']")
    assert loss == 0.0
    assert np.abs(balanced[router] - plain[router]).max() > 1e-4
    assert "router_aux_loss" not in make_learner(0.0).update(random_groups(0)).metrics


def test_it_falls_when_trained_on():
    learner = make_learner(10.0, learning_rate=1e-2)
    losses = [learner.update(random_groups(0)).metrics["router_aux_loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


def test_a_dense_model_refuses_the_coefficient():
    with raises(ConfigError, key="router_aux_loss_coef", value=0.1, fix="leave it out"):
        config = LearnerConfig(router_aux_loss_coef=0.1)
        Learner(TINY, tiny_params(), algorithm=AlgorithmConfig(), config=config, temperature=1.0)
