"""A random Llama small enough for unit tests, and the plain way to run it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.jetstream.shapes import EngineShapes
from jax_agent_rl.models.config import (
    DecoderConfig,
    DeltaNet,
    Experts,
    GlobalAttention,
    LatentAttention,
    Params,
    PerLayerInputs,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.lora import ADAPTABLE, PeftAdapter

TINY = DecoderConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
)

TWO_SLOTS = EngineShapes(
    max_model_len=32,
    max_concurrent_decodes=2,
    kv_cache_tokens=64,
    decode_steps=4,
    prefill_buckets=(8,),
)
"""An engine with few programs."""
FOUR_SLOTS = EngineShapes(
    max_model_len=60,
    max_concurrent_decodes=4,
    kv_cache_tokens=384,
    decode_steps=4,
    prefill_buckets=(4, 16),
)
"""An engine that continues prompts in chunks."""

OLMO3 = replace(
    TINY,
    family="olmo3",
    qk_norm=True,
    qk_norm_over="heads",
    norms="after",
    float32_norms=True,
    rope=Rope(theta=5e5, scaling=YarnScaling(factor=4.0, original_max_position_embeddings=16)),
    local_rope=Rope(theta=5e5),
    sliding_window=12,
    windowed_layers=(True,) * (TINY.num_layers - 1) + (False,),
)
_GEMMA4 = replace(
    TINY,
    family="gemma4_text",
    qk_norm=True,
    v_norm=True,
    float32_norms=True,
    norms="around",
    layer_scale=True,
    activation="gelu_tanh",
    embed_scale=32**0.5,
    attention_scale=1.0,
    logit_softcap=20.0,
    rope=Rope(theta=1e4, scaling=ProportionalScaling(fraction=0.5)),
    local_rope=Rope(theta=100.0),
    sliding_window=12,
)
GEMMA4 = replace(
    _GEMMA4,
    windowed_layers=(True, True, False),
    global_attention=GlobalAttention(num_kv_heads=1, head_dim=12, keys_as_values=True),
)
"""As Gemma 4 31B: full layers with heads of their own, and keys as values."""
GEMMA4_EXPERTS = replace(
    GEMMA4,
    experts=Experts(
        count=8,
        per_token=2,
        intermediate_size=16,
        normalize=True,
        beside_dense=True,
        router_norm=True,
        weight_factors=True,
    ),
)
"""As Gemma 4 26B-A4B: the same with experts beside dense networks."""
GEMMA4_SMALL = replace(
    _GEMMA4,
    num_layers=5,
    num_kv_heads=1,
    windowed_layers=(True, False, True, True, False),
    global_attention=GlobalAttention(num_kv_heads=1, head_dim=12),
    shared_kv_layers=2,
    wide_shared_layers=True,
    per_layer_inputs=PerLayerInputs(vocab_size=97, size=4),
)
"""As Gemma 4 E2B: layers that share keys and values, per-layer inputs."""
LATENT = replace(
    TINY,
    num_kv_heads=4,
    head_dim=12,
    rope=Rope(interleaved=True),
    latent=LatentAttention(q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6),
)
"""Latent attention."""

EXPERTS = replace(
    TINY,
    num_layers=2,
    qk_norm=True,
    experts=Experts(count=8, per_token=2, intermediate_size=16, normalize=True),
)
"""A mixture of experts."""

DELTA_NETS = replace(
    TINY,
    num_layers=2,
    rope=Rope(partial_rotary=0.5),
    qk_norm=True,
    attention_gate=True,
    delta_net=DeltaNet(
        layers=(True, False), key_heads=2, value_heads=4, key_dim=8, value_dim=6, fused=True
    ),
)
"""A delta net, then gated attention."""
QWEN3_5_MOE = replace(
    DELTA_NETS,
    family="qwen3_5_moe_text",
    norm_offset=1.0,
    delta_net=DeltaNet(layers=(True, False), key_heads=2, value_heads=4, key_dim=8, value_dim=8),
    experts=Experts(
        count=8,
        per_token=2,
        intermediate_size=16,
        normalize=True,
        shared_size=16,
        shared_gated=True,
    ),
)
"""The same with separate matrices and with experts beside a shared one, as Qwen3.5."""


def tiny_params(seed: int = 0, config: DecoderConfig = TINY) -> Params:
    """Weights large enough that distributions are far from uniform."""
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(
            rng.standard_normal(shape, dtype=np.float32) * (0.4 if len(shape) > 1 else 1)
            + (len(shape) == 1)
        )

    params = jax.tree.map(draw, config.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))
    for name in {"input_norm", "post_attention_norm"} & params["layers"].keys():
        params["layers"][name] = jnp.ones_like(params["layers"][name])
    return params | {"final_norm": jnp.ones_like(params["final_norm"])}


def tiny_adapter(config: DecoderConfig = TINY, *, rank: int = 2, seed: int = 0) -> PeftAdapter:
    """A random LoRA adapter of every matrix that can be adapted."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    shapes = config.parameter_shapes()["layers"]
    names = sorted(ADAPTABLE.intersection(shapes))
    weights = {}
    for name in names:
        layers, out, inputs = shapes[name]
        weights[name] = (draw(layers, rank, inputs), draw(layers, out, rank))
    return PeftAdapter(rank=rank, weights=weights)


def with_adapter(params: Params, adapter: PeftAdapter) -> Params:
    """Parameters whose matrices have an adapter of scale 1 added."""
    layers = dict(params["layers"])
    for name, (a, b) in adapter.weights.items():
        layers[name] = layers[name] + jnp.asarray(b @ a)
    return params | {"layers": layers}


LONGEST = 64  # every reference pass is padded to this, so that it compiles once


@functools.partial(jax.jit, static_argnums=0)
def _padded_logits(config: DecoderConfig, params: Params, ids: jax.Array) -> jax.Array:
    model = Decoder.from_params(config, params)
    return model.logits(model(ids[None])[0])[0]


def full_logits(params: Params, ids: Sequence[int], config: DecoderConfig = TINY) -> np.ndarray:
    """Logits float32 [T, V] of one causal pass over the whole context: no cache, no batching."""
    padded = np.zeros(LONGEST, np.int32)
    padded[: len(ids)] = ids
    return np.asarray(_padded_logits(config, params, padded))[: len(ids)]


def logprobs_of(
    params: Params,
    prompt: Sequence[int],
    sampled: Sequence[int],
    temperature: float = 1.0,
    *,
    config: DecoderConfig = TINY,
) -> np.ndarray:
    """Log-probs of sampled ids by one full pass."""
    scores = full_logits(params, [*prompt, *sampled], config)[len(prompt) - 1 : -1] / temperature
    scores = scores.astype(np.float64)
    normalized = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return normalized[np.arange(len(sampled)), list(sampled)]


def greedy(
    params: Params, prompt: Sequence[int], count: int, eos: frozenset[int] = frozenset({2})
) -> list[int]:
    """Greedy continuation by repeated full passes."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(full_logits(params, ids)[-1].argmax()))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]
