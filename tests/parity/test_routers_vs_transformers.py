"""Routers of the families against transformers' modules: choices, weights and gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.models.config import DecoderConfig, Experts, Rope
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.models.moe import load_balancing_loss, route, router_load
from jax_agent_rl.testing.conformance.models import TransformersReference
from tests.tiny import tiny_params

torch = pytest.importorskip("torch")

COUNT = 16
WIDTH = 24
TOKENS = 40
GROUPED = Experts(
    count=COUNT,
    per_token=4,
    intermediate_size=8,
    normalize=True,
    scoring="sigmoid",
    correction=True,
    groups=4,
    groups_per_token=2,
    scale=2.5,
)
PLAIN = Experts(
    count=COUNT,
    per_token=4,
    intermediate_size=8,
    normalize=True,
    scoring="sigmoid",
    correction=True,
)


def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs [N, D], a router [E, D] and a correction [E]."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, WIDTH), np.float32)
    router = rng.standard_normal((COUNT, WIDTH), np.float32) / 3
    correction = rng.standard_normal(COUNT).astype(np.float32) / 4
    return x, router, correction


def deepseek(module: str, kind: str) -> Any:
    import importlib

    import transformers

    config = getattr(transformers, f"{kind}Config")(
        hidden_size=WIDTH,
        n_routed_experts=COUNT,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    return getattr(modeling, f"{kind}TopkRouter")(config)


def minimax() -> Any:
    from transformers import MiniMaxM2Config
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter

    return MiniMaxM2TopKRouter(
        MiniMaxM2Config(hidden_size=WIDTH, num_local_experts=COUNT, num_experts_per_tok=4)
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "minimax_m2"])
def test_choices_weights_and_gradients_are_equal(family: str):
    x, router, correction = drawn()
    if family == "minimax_m2":
        experts = PLAIN
        theirs = minimax()
    else:
        experts = GROUPED
        theirs = deepseek(family, {"deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe"}[family])
    theirs.weight.data = torch.tensor(router)
    inputs = torch.tensor(x, requires_grad=True)
    if family == "minimax_m2":
        _, weights, chosen = theirs(inputs, torch.tensor(correction))
    else:
        theirs.e_score_correction_bias.data = torch.tensor(correction)
        _, weights, chosen = theirs(inputs)
    (weights * torch.arange(1.0, 1 + COUNT)[chosen]).sum().backward()

    def total(router: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        layer = {"router": router, "router_correction": jnp.asarray(correction)}
        weights, chosen = route(experts, layer, x)
        return jnp.sum(weights * (1.0 + chosen)), (weights, chosen)

    gradients, ours = jax.grad(total, argnums=(0, 1), has_aux=True)(router, x)
    np.testing.assert_allclose(_by_expert(*ours), _by_expert(weights.detach(), chosen), atol=1e-6)
    np.testing.assert_allclose(gradients[0], theirs.weight.grad, atol=1e-5)
    np.testing.assert_allclose(gradients[1], inputs.grad, atol=1e-5)


def _by_expert(weights: Any, chosen: Any) -> np.ndarray:
    """Return the weights [N, E], 0 of experts that were not chosen."""
    dense = np.zeros((TOKENS, COUNT))
    np.put_along_axis(dense, np.asarray(chosen), np.asarray(weights), axis=-1)
    return dense


def test_the_conformance_suites_reference_ranks_experts_as_they_are_chosen(tmp_path: Path):
    config = DecoderConfig(
        family="glm4_moe",
        vocab_size=89,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope=Rope(partial_rotary=0.5),
        experts=replace(GROUPED, shared_size=8, first_dense_layers=1),
    )
    params = tiny_params(config=config)
    save_hf(tmp_path / "model", config, params)
    ids = np.random.default_rng(0).integers(0, 89, 30)
    reference = TransformersReference({"base": tmp_path / "model"})
    scores_TLE = reference.router_scores(ids.tolist(), weights="base")
    ranked = np.argsort(-scores_TLE, axis=-1)[..., :4]

    _, load = Decoder.from_params(config, params)(ids[None], copies=jnp.ones((1, 30), jnp.int32))
    assert load is not None
    assert ranked.shape == (30, 2, 4)
    np.testing.assert_array_equal(load[0], np.bincount(ranked.reshape(-1), minlength=COUNT))


def test_the_balance_of_a_sigmoid_router_is_minimax_m2s():
    """Its code ignores the correction, so there is none here."""
    from transformers.models.minimax_m2.modeling_minimax_m2 import load_balancing_loss_func

    x, router, _ = drawn()
    layer = {"router": jnp.asarray(router), "router_correction": jnp.zeros(COUNT)}
    load = router_load(PLAIN, layer, jnp.asarray(x)[None], jnp.ones((1, TOKENS), jnp.int32))
    loss = load_balancing_loss(load[1], load[0] / TOKENS, jnp.float32(TOKENS))
    scores = torch.tensor(x) @ torch.tensor(router).T
    expected = load_balancing_loss_func((scores,), COUNT, 4)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
