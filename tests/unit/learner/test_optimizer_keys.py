"""Every key of the optimizer changes its updates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.config.learner import OptimizerSection
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.optimizer import (
    check_patterns,
    learning_rate,
    make_optimizer,
    optimizer_bytes,
)
from tests.messages import raises

BASE = {"learning_rate": 0.1, "weight_decay": 0.1, "lr_scheduler_type": "linear"}
GRADIENTS = ([3.0, -4.0], [0.3, 0.4], [-0.5, 0.2])  # the first is clipped


def applied(params: Any, updates: Any) -> Any:
    return optax.apply_updates(params, updates)


def trained(**keys: object) -> np.ndarray:
    section = OptimizerSection.model_validate(BASE | keys)
    rate = learning_rate(section, total_steps=len(GRADIENTS))
    params = {"embed": jnp.asarray([1.0, 2.0])}
    state = make_optimizer(section, 0.0).init(params)
    for step, gradient in enumerate(GRADIENTS):
        optimizer = make_optimizer(section, jnp.asarray(rate(step)))
        updates, state = optimizer.update({"embed": jnp.asarray(gradient)}, state, params)
        params = applied(params, updates)
    return np.asarray(params["embed"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer", "adafactor"),
        ("learning_rate", 0.2),
        ("no_weight_decay", ("embed",)),
        ("lr_warmup_steps", 2),
        ("lr_scheduler_type", "cosine"),
        ("min_lr_ratio", 0.5),
        ("weight_decay", 0.5),
        ("adam_b1", 0.5),
        ("adam_b2", 0.5),
        ("adam_eps", 1.0),
        ("max_grad_norm", 0.1),
    ],
)
def test_a_key_changes_what_is_learnt(key: str, value: object):
    assert not np.allclose(trained(**{key: value}), trained(), rtol=1e-4)


def test_wsd_holds_the_peak_and_decays_at_the_end():
    section = OptimizerSection(
        learning_rate=2.0,
        lr_scheduler_type="wsd",
        lr_warmup_steps=2,
        lr_decay_ratio=0.3,
        min_lr_ratio=0.1,
    )
    rate = learning_rate(section, total_steps=10)
    rates = [float(np.asarray(rate(step))) for step in range(11)]
    np.testing.assert_allclose(rates, [1, 2, 2, 2, 2, 2, 2, 2, 1.4, 0.8, 0.2], rtol=1e-6)


PARAMS = {
    "embed": (6, 4),
    "layers": {"q": (2, 4, 3), "down": (2, 3, 8), "input_norm": (2, 4)},
    "final_norm": (4,),
}


def drawn(seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        PARAMS,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def updated(steps: int = 4, **keys: object):
    section = OptimizerSection.model_validate({"learning_rate": 0.01, "max_grad_norm": 1e9} | keys)
    params = drawn(0)
    state = make_optimizer(section, 0.01).init(drawn(0))
    for step in range(steps):
        updates, state = make_optimizer(section, 0.01).update(drawn(step + 1), state, params)
        params = applied(params, updates)
    return params


def orthogonalized(matrix: np.ndarray) -> np.ndarray:
    """Five Newton-Schulz iterations of the quintic that Muon's author published (Jordan et al.
    2024), in float64.
    """
    x = matrix / np.linalg.norm(matrix)
    x = x.T if len(x) > len(x[0]) else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if len(matrix) > len(matrix[0]) else x


@pytest.mark.parametrize("name", ["q", "down"])
def test_muon_moves_the_matrices_of_layers_by_orthogonalized_momentum(name):
    """The reference is float64, with Nesterov momentum as optax corrects its bias.

    It is scaled to a root mean square of 0.2.
    """
    actual = updated(optimizer="muon", weight_decay=0.1)["layers"][name]
    beta = 0.95
    for layer in range(2):
        weight = np.float64(drawn(0)["layers"][name][layer])
        momentum = np.zeros(1)
        for step in range(1, 5):
            gradient = np.float64(drawn(step)["layers"][name][layer])
            momentum = beta * momentum + (1 - beta) * gradient
            looked_ahead = beta * momentum / (1 - beta ** (step + 1)) + (1 - beta) * gradient / (
                1 - beta**step
            )
            update = 0.2 * np.sqrt(max(weight.shape)) * orthogonalized(looked_ahead)
            weight = weight - 0.01 * (update + 0.1 * weight)
        np.testing.assert_allclose(actual[layer], weight, atol=1e-5)


def test_muon_leaves_embeddings_and_norms_to_adamw():
    muon = updated(optimizer="muon", weight_decay=0.1)
    adamw = updated(weight_decay=0.1)
    for path in (("embed",), ("final_norm",), ("layers", "input_norm")):
        by_muon = muon
        by_adamw = adamw
        for key in path:
            by_muon = by_muon[key]
            by_adamw = by_adamw[key]
        np.testing.assert_array_equal(by_muon, by_adamw)


def test_adafactor_keeps_second_moments_of_rows_and_columns():
    """Algorithms 4 and 5 of arXiv 1804.04235 with a plain learning rate and decoupled decay, in
    float64.
    """
    section = OptimizerSection(
        optimizer="adafactor", learning_rate=0.01, weight_decay=0.1, max_grad_norm=1e9
    )
    rng = np.random.default_rng(0)
    weights = {"lm_head": rng.normal(size=(128, 130)), "final_norm": rng.normal(size=5)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights)
    state = make_optimizer(section, 0.01).init(params)
    assert sum(x.size for x in jax.tree.leaves(state)) < 300, "no moment of every element"
    rows = np.zeros(128)
    columns = np.zeros(130)
    norm_moment = np.zeros(5)
    for step in range(1, 4):
        gradients = {name: rng.normal(size=x.shape) for name, x in weights.items()}
        beta = 1 - step**-0.8
        square = gradients["lm_head"] ** 2 + 1e-30
        rows = beta * rows + (1 - beta) * square.mean(1)
        columns = beta * columns + (1 - beta) * square.mean(0)
        norm_moment = beta * norm_moment + (1 - beta) * (gradients["final_norm"] ** 2 + 1e-30)
        second = {"lm_head": np.outer(rows, columns) / rows.mean(), "final_norm": norm_moment}
        for name, decay in (("lm_head", 0.1), ("final_norm", 0.0)):
            update = gradients[name] / np.sqrt(second[name])
            update /= max(1.0, np.sqrt((update**2).mean()))
            weights[name] = weights[name] - 0.01 * (update + decay * weights[name])
        updates, state = make_optimizer(section, 0.01).update(
            jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradients), state, params
        )
        params = applied(params, updates)
    for name, weight in weights.items():
        np.testing.assert_allclose(params[name], weight, atol=1e-5)


def test_patterns_choose_what_is_decayed_and_must_match():
    plain = updated(weight_decay=0.5)
    updated_params = updated(weight_decay=0.5, no_weight_decay=["norm", "embed"])
    undecayed = updated()
    np.testing.assert_array_equal(updated_params["embed"], undecayed["embed"])
    np.testing.assert_array_equal(updated_params["layers"]["q"], plain["layers"]["q"])
    assert not np.allclose(plain["embed"], undecayed["embed"])
    check_patterns(
        OptimizerSection(weight_decay=0.5, no_weight_decay=("layers\\.(q|down)$",)), drawn(0)
    )
    with raises(ConfigError, key="no_weight_decay", value="'bias'"):
        check_patterns(OptimizerSection(weight_decay=0.5, no_weight_decay=("bias",)), drawn(0))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"lr_decay_ratio": 0.5}, "x.lr_decay_ratio is read only with x.lr_scheduler_type=wsd"),
        ({"no_weight_decay": ["embed"]}, "x.no_weight_decay is read only with x.weight_decay > 0"),
        (
            {"optimizer": "adafactor", "adam_b1": 0.5},
            "x.adam_b1 is not read by x.optimizer=adafactor",
        ),
    ],
)
def test_keys_that_an_optimizer_does_not_read_are_refused(keys, problem):
    (reported,) = OptimizerSection.model_validate(keys).problems("x")
    assert problem in reported


def test_the_bytes_of_a_state_are_those_of_its_arrays():
    """Two moments of AdamW and one of Muon's matrices in float32, and counters; the average is one
    copy more.
    """
    total = 6 * 4 + 2 * 4 * 3 + 2 * 3 * 8 + 2 * 4 + 4
    matrices = 2 * 4 * 3 + 2 * 3 * 8
    sizes = {
        name: optimizer_bytes(OptimizerSection(optimizer=name), PARAMS)
        for name in ("adamw", "muon")
    }
    assert 0 <= sizes["adamw"] - 8 * total < 20
    assert 0 <= sizes["muon"] - 8 * total + 4 * matrices < 40
    assert optimizer_bytes(LearnerConfig(ema_decay=0.9), PARAMS) == sizes["adamw"] + 4 * total
    wide = {"lm_head": (256, 512)}
    assert optimizer_bytes(OptimizerSection(optimizer="adafactor"), wide) < 4 * 2 * (256 + 512)
