"""Loops over runs of layers: each layer gets its own parameters and values, and gives gradients."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layer_kinds import LayerKind
from jax_agent_rl.models.layer_scan import scan_layers

SHAPES = {"D": {"norm": (3,), "delta": (3, 3)}, "A": {"norm": (3,), "query": (3, 3)}}


class Layers:
    """A decoder of which only the kinds of layers are known, each named by a letter."""

    def __init__(self, kinds: str) -> None:
        self.layer_kinds = tuple(kinds)

    def kind_shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        return SHAPES[kind]

    def layers_with(self, name: str) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_kinds) if name in SHAPES[kind])


def compute(
    x: jax.Array, kind: Any, params: dict[str, Any], value: Any, source_keys: Any
) -> tuple[Any, Any, dict]:
    assert params.keys() == SHAPES[kind].keys()
    matrix = params["delta"] if kind == "D" else params["query"].T
    x = jnp.tanh(matrix @ x * params["norm"] + value)
    return x, x[0], {}


def one_by_one(layers: Layers, stacks: dict[str, Any], x: jax.Array, values: Any) -> Any:
    outputs = []
    for layer, kind in enumerate(layers.layer_kinds):
        params = {}
        for name in SHAPES[kind]:
            params[name] = stacks[name][layers.layers_with(name).index(layer)]
        x, output, _ = compute(x, kind, params, values[layer], {})
        outputs.append(output)
    return x, jnp.stack(outputs)


@pytest.mark.parametrize("kinds", ["AAAA", "DDDADDDADD", "ADDDD", "DADADA", "A"])
def test_every_layer_has_its_own_parameters_and_gives_them_their_gradient(kinds: str):
    layers = Layers(kinds)
    rng = np.random.default_rng(0)
    stacks = {}
    for name, shape in (SHAPES["D"] | SHAPES["A"]).items():
        count = len(layers.layers_with(name))
        if count:
            stacks[name] = jnp.asarray(rng.standard_normal((count, *shape)))
    x = jnp.asarray(rng.standard_normal(3))
    values = jnp.asarray(rng.standard_normal(len(kinds)))

    def in_runs(stacks: dict[str, Any]) -> Any:
        return scan_layers(cast(DecoderConfig, layers), compute, x, stacks, values)

    def sequentially(stacks: dict[str, Any]) -> Any:
        return one_by_one(layers, stacks, x, values)

    results = []
    for run in (in_runs, sequentially):
        outputs, gradient_of = jax.vjp(run, stacks)
        cotangent = jax.tree.map(jnp.ones_like, outputs)
        results.append((outputs, gradient_of(cotangent)))
    found, expected = (jax.tree.leaves(result) for result in results)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_pattern_is_computed_once_and_repeated():
    computed = []

    def count(
        x: jax.Array, kind: LayerKind, params: dict[str, Any], value: Any, source_keys: Any
    ) -> Any:
        computed.append(kind)
        return compute(x, kind, params, value, source_keys)

    layers = Layers("DDDA" * 6)
    stacks = {}
    for name, shape in (SHAPES["D"] | SHAPES["A"]).items():
        stacks[name] = jnp.ones((len(layers.layers_with(name)), *shape))
    jax.eval_shape(
        lambda: scan_layers(cast(DecoderConfig, layers), count, jnp.ones(3), stacks, jnp.ones(24))
    )
    assert len(computed) == 4
