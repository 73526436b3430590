"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are products of one short vector per token, its latent, and heads share
the part of their keys that rotates::

    x ─► kv_a ─┬─► norm ─► latent ─► kv_b ─┬─► part of each head's key ──┐
               │                           └─► each head's value         ├─► key
               └─► rotate ─► rotary key, one for all heads ──────────────┘
    x ─► q_a ─► norm ─► q_b ─► queries: a part as the latent's, and one that rotates

Training expands them, and attends as usual. An engine caches the latent and the rotary key alone
(``jetstream.mixers.latent_attention``).

Shapes as in ``models.decoder``; a head's query and key have n + p numbers, the p last of which
rotate, its value has v, and a latent r.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_agent_rl.models.attention import sharded_tree_attention
from jax_agent_rl.models.config import DecoderConfig, LatentAttention
from jax_agent_rl.models.layer_weights import LayerWeights
from jax_agent_rl.models.layers import rms_norm, rope_tables, rotate
from jax_agent_rl.models.mixers.attention import AttentionContext
from jax_agent_rl.models.mixers.mixer import Mixer, TokenTrees
from jax_agent_rl.models.tree_kernel import TreeMask


def _prepare(config: DecoderConfig, windowed: bool, tokens: TokenTrees) -> AttentionContext:
    assert not windowed  # no family has windows here
    assert tokens.images is None  # nor images
    assert config.latent is not None
    cos, sin = rope_tables(config.rope, config.latent.rope_dim, tokens.positions)
    return AttentionContext(cos, sin, TreeMask(tokens.subtree_end))


def _mix(layer: LayerWeights, x: jax.Array, context: AttentionContext) -> jax.Array:
    config = layer.config
    latent_config = config.latent
    assert latent_config is not None
    rows, count, _ = x.shape
    cos = context.cos[:, None]
    sin = context.sin[:, None]

    def by_head(heads: jax.Array) -> jax.Array:
        """Split [B, T, H w] -> [B, H, T, w]."""
        return heads.reshape(rows, count, config.num_heads, -1).transpose(0, 2, 1, 3)

    if latent_config.q_rank is None:
        queries = layer.linear("q", x)
    else:
        q_latent = _norm(layer, "q_a_norm", layer.linear("q_a", x))
        queries = layer.linear("q_b", q_latent)
    q_content, q_rotary = jnp.split(by_head(queries), [latent_config.nope_dim], axis=-1)
    q_rotary = rotate(config.rope, q_rotary, cos, sin)
    q = jnp.concatenate([q_content, q_rotary], axis=-1) * config.score_scale

    latent, k_rotary = jnp.split(layer.linear("kv_a", x), [latent_config.kv_rank], axis=-1)
    latent = _norm(layer, "kv_a_norm", latent)
    k_rotary = rotate(config.rope, k_rotary[:, None], cos, sin)
    keys_and_values = by_head(layer.linear("kv_b", latent))
    k_content, v = jnp.split(keys_and_values, [latent_config.nope_dim], axis=-1)
    k_rotary = jnp.broadcast_to(k_rotary, (*k_content.shape[:-1], latent_config.rope_dim))
    k = jnp.concatenate([k_content, k_rotary], axis=-1)

    mixed = sharded_tree_attention(q, k, v, context.mask, layer.mesh)
    return layer.linear("o", mixed.transpose(0, 2, 1, 3).reshape(rows, count, -1))


def _norm(layer: LayerWeights, name: str, x: jax.Array) -> jax.Array:
    """Apply the RMS norm of a latent."""
    return rms_norm(layer.config, x, layer.params[name], eps=LatentAttention.norm_eps)


LATENT_ATTENTION = Mixer(prepare=_prepare, mix=_mix)
