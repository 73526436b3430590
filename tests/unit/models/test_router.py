"""Which experts a router chooses and with what weights, against float64 numpy."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.models.config import Experts, Params
from jax_agent_rl.models.moe import (
    load_balancing_loss,
    route,
    router_load,
    shared_expert_weight,
)
from tests.examples import examples

TOKENS = 6
WIDTH = 8


@st.composite
def routers(draw: st.DrawFn) -> Experts:
    groups = draw(st.sampled_from([1, 2, 4]))
    group_size = draw(st.integers(2, 4))
    groups_per_token = draw(st.integers(1, groups))
    return Experts(
        count=groups * group_size,
        per_token=draw(st.integers(1, groups_per_token * group_size)),
        intermediate_size=4,
        normalize=draw(st.booleans()),
        bias=draw(st.booleans()),
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        correction=draw(st.booleans()),
        groups=groups,
        groups_per_token=groups_per_token,
        scale=draw(st.sampled_from([1.0, 2.5])),
        weight_factors=draw(st.booleans()),
    )


def parameters(experts: Experts, seed: int) -> Params:
    draw = np.random.default_rng(seed).standard_normal
    layer = {"router": draw((experts.count, WIDTH))}
    if experts.bias:
        layer["router_bias"] = draw(experts.count)
    if experts.correction:
        layer["router_correction"] = draw(experts.count) / 2
    if experts.weight_factors:
        layer["router_factors"] = 1 + draw(experts.count) / 4
    return {name: jnp.asarray(x, jnp.float32) for name, x in layer.items()}


def inputs(seed: int) -> jax.Array:
    rng = np.random.default_rng(1000 + seed)
    return jnp.asarray(rng.standard_normal((TOKENS, WIDTH)), jnp.float32)


def probabilities_of(experts: Experts, layer: Params, x: jax.Array) -> np.ndarray:
    """Return float64 [N, E]."""
    scores = np.asarray(x, np.float64) @ np.asarray(layer["router"], np.float64).T
    scores += np.asarray(layer.get("router_bias", 0.0), np.float64)
    if experts.scoring == "sigmoid":
        return 1 / (1 + np.exp(-scores))
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def choice_of(experts: Experts, layer: Params, probabilities: np.ndarray) -> list[int]:
    """Return the experts of one token, the best first."""
    ranking = probabilities + np.asarray(layer.get("router_correction", 0.0), np.float64)
    size = experts.count // experts.groups
    group_scores = []
    for group in range(experts.groups):
        members = sorted(ranking[group * size : (group + 1) * size])
        group_scores.append(sum(members[-2:]))
    groups = np.argsort(group_scores)[::-1][: experts.groups_per_token]

    candidates = [expert for expert in range(experts.count) if expert // size in groups]
    candidates.sort(key=lambda expert: -ranking[expert])
    return candidates[: experts.per_token]


def weights_of(
    experts: Experts, layer: Params, probabilities: np.ndarray, chosen: list[int]
) -> np.ndarray:
    weights = probabilities[chosen]
    if experts.normalize:
        weights = weights / weights.sum()
    if experts.weight_factors:
        weights = weights * np.asarray(layer["router_factors"], np.float64)[chosen]
    return weights * experts.scale


@settings(max_examples=examples(60))
@given(experts=routers(), seed=st.integers(0, 1000))
def test_choices_and_weights_are_those_of_the_formulas(experts: Experts, seed: int):
    layer = parameters(experts, seed)
    x = inputs(seed)
    weights, chosen = route(experts, layer, x)
    probabilities = probabilities_of(experts, layer, x)
    for token in range(TOKENS):
        expected = choice_of(experts, layer, probabilities[token])
        assert chosen[token].tolist() == expected
        np.testing.assert_allclose(
            weights[token], weights_of(experts, layer, probabilities[token], expected), rtol=1e-5
        )


@settings(max_examples=examples(40))
@given(experts=routers(), seed=st.integers(0, 1000))
def test_given_experts_get_the_weights_of_the_routers_own_probabilities(
    experts: Experts, seed: int
):
    layer = parameters(experts, seed)
    x = inputs(seed)
    rng = np.random.default_rng(seed)
    given_experts = np.array(
        [rng.permutation(experts.count)[: experts.per_token] for _ in range(TOKENS)]
    )
    given_experts[0] = -1  # chooses its own
    weights, chosen = route(experts, layer, x, jnp.asarray(given_experts, jnp.int16))
    probabilities = probabilities_of(experts, layer, x)
    given_experts[0] = choice_of(experts, layer, probabilities[0])
    np.testing.assert_array_equal(chosen, given_experts)
    for token in range(TOKENS):
        expected = weights_of(experts, layer, probabilities[token], given_experts[token].tolist())
        np.testing.assert_allclose(weights[token], expected, rtol=1e-5)


@settings(max_examples=examples(20))
@given(experts=routers(), seed=st.integers(0, 1000))
def test_the_load_counts_the_experts_that_compute_and_balances_shares_of_the_scores(
    experts: Experts, seed: int
):
    layer = parameters(experts, seed)
    x = inputs(seed)
    copies = jnp.asarray([[3, 1, 0], [1, 1, 2]], jnp.int32)
    load = router_load(experts, layer, x.reshape(2, 3, WIDTH), copies)
    _, chosen = route(experts, layer, x)
    counts = np.zeros(experts.count)
    for copy, token_experts in zip(copies.reshape(-1), chosen, strict=True):
        counts[np.asarray(token_experts)] += copy
    shares = probabilities_of(replace(experts, scoring="softmax"), layer, x)
    np.testing.assert_allclose(load[0], counts)
    np.testing.assert_allclose(load[1], copies.reshape(-1) @ shares, rtol=1e-5)


def test_no_gradient_reaches_the_correction_and_the_balance_reaches_the_router():
    experts = Experts(
        count=4,
        per_token=2,
        intermediate_size=4,
        normalize=True,
        scoring="sigmoid",
        correction=True,
    )
    layer = parameters(experts, 0)
    x = inputs(0)

    def loss(layer: Params) -> jax.Array:
        weights, _ = route(experts, layer, x)
        copies = jnp.ones((2, 3), jnp.int32)
        load = router_load(experts, layer, x.reshape(2, 3, WIDTH), copies)
        return jnp.sum(weights[:, 0]) + load_balancing_loss(load[1], load[0] / 6, jnp.float32(6))

    gradients = jax.grad(loss)(layer)
    assert not np.any(gradients["router_correction"])
    assert np.all(np.any(gradients["router"], axis=1))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_scores_are_float32_products_of_rounded_inputs(scoring: str):
    """256 products of about 1 whose sums differ by less than bfloat16's steps."""
    experts = Experts(
        count=8,
        per_token=3,
        intermediate_size=4,
        normalize=False,
        scoring=scoring,  # type: ignore[arg-type]
    )
    rng = np.random.default_rng(0)
    x = jnp.asarray(1 + 0.1 * rng.standard_normal((20, 256)), jnp.bfloat16)
    router = jnp.asarray((1 + 0.02 * rng.standard_normal((8, 256))) / 256, jnp.bfloat16)
    weights, chosen = route(experts, {"router": router}, x)
    probabilities = probabilities_of(experts, {"router": router}, x)
    expected = np.argsort(-probabilities, axis=-1)[:, :3]
    np.testing.assert_array_equal(chosen, expected)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(
        weights, np.take_along_axis(probabilities, expected, axis=-1), rtol=1e-5
    )


def test_a_shared_expert_is_weighted_by_its_own_sigmoid():
    layer = parameters(Experts(count=1, per_token=1, intermediate_size=4, normalize=False), 3)
    x = inputs(3)
    scores = np.asarray(x, np.float64) @ np.asarray(layer["router"], np.float64).T
    weight = shared_expert_weight(layer["router"], x)
    np.testing.assert_allclose(weight, 1 / (1 + np.exp(-scores)), rtol=1e-5)
