"""Gemma 4 in the learner: token trees through layers that share keys and values, and adapters."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config.learner import LoraConfig, LoraTarget
from jax_agent_rl.learner.parameterization import new_adapters
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.lora import read_peft, save_peft, scaled_adapter
from tests.tiny import GEMMA4_EXPERTS, GEMMA4_SMALL, tiny_params

PREFIX = [5, 9, 3, 17, 20, 8, 44, 12, 6, 70, 31, 2, 14]
BRANCHES = ([33, 4, 60, 7], [21, 90, 16, 50])


def test_branches_of_a_tree_are_computed_as_rows_of_their_own_with_equal_gradients():
    params = tiny_params(config=GEMMA4_SMALL)
    prefix_len = len(PREFIX)
    first_end = prefix_len + len(BRANCHES[0])
    total = first_end + len(BRANCHES[1])
    tree_ids = jnp.array([[*PREFIX, *BRANCHES[0], *BRANCHES[1]]])
    positions = jnp.array([[*range(first_end), *range(prefix_len, first_end)]])
    ends = [total] * prefix_len + [first_end] * len(BRANCHES[0]) + [total] * len(BRANCHES[1])

    def by_tree(params) -> jax.Array:
        hidden, _ = Decoder.from_params(GEMMA4_SMALL, params)(
            tree_ids, positions, jnp.array([ends])
        )
        return hidden[0, prefix_len:].reshape(2, -1, hidden.shape[-1])

    def by_rows(params) -> jax.Array:
        rows = jnp.array([[*PREFIX, *branch] for branch in BRANCHES])
        hidden, _ = Decoder.from_params(GEMMA4_SMALL, params)(rows)
        return hidden[:, prefix_len:]

    np.testing.assert_allclose(by_tree(params), by_rows(params), atol=2e-5)
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 32)), jnp.float32)
    gradients = []
    for compute in (by_tree, by_rows):
        gradients.append(jax.grad(lambda p, f=compute: jnp.sum(weights * f(p)))(params))

    def check(one: jax.Array, other: jax.Array) -> None:
        # Tests are compiled quickly, which rounds more: otherwise 1e-6 holds.
        largest = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(one, other, atol=1e-4 * (1 + largest))

    jax.tree.map(check, *gradients)


OF_BOTH: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "down_proj")


@pytest.mark.parametrize(
    ("config", "targets", "names"),
    [
        (GEMMA4_SMALL, (*OF_BOTH, "per_layer_input_gate"), {"wide_down", "per_layer_gate"}),
        (GEMMA4_EXPERTS, OF_BOTH, set()),
    ],
    ids=["shared keys", "experts"],
)
def test_adapters_are_written_under_the_names_of_their_modules_and_read_again(
    config: DecoderConfig, targets: tuple[LoraTarget, ...], names: set[str], tmp_path: Path
):
    lora = LoraConfig(rank=2, targets=targets)
    trained = new_adapters(lora, config)
    names = names | {"q", "global_q", "k", "global_k", "down"}
    assert trained["adapters"].keys() == names
    rng = np.random.default_rng(0)
    trained = jax.tree.map(lambda x: np.asarray(rng.standard_normal(x.shape), np.float32), trained)

    save_peft(tmp_path / "adapter", lora, config, trained, base="x")
    read = read_peft(tmp_path / "adapter", config, key="adapter")
    expected = scaled_adapter(lora, trained)
    assert read.weights.keys() == names
    jax.tree.map(np.testing.assert_array_equal, dict(read.weights), dict(expected.weights))
    # Two windowed layers and a full one; layers that share keys have no matrix of keys.
    assert len(read.weights["k"][0]) == 2 and len(read.weights["global_k"][0]) == 1
