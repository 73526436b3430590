"""Attention with key/value heads: full, or within a window.

Shapes as in ``models.decoder``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_agent_rl.models.attention import sharded_tree_attention
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layer_weights import LayerWeights
from jax_agent_rl.models.layers import mrope_tables, rope_tables, rotate
from jax_agent_rl.models.mixers.mixer import Mixer, TokenTrees
from jax_agent_rl.models.tree_kernel import TreeMask

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""From queries [B, H, T, h], keys and values [B, K, T, h] and sinks [H] to their mixture [B, H, T,
h]."""


class AttentionContext(NamedTuple):
    """What the layers of one kind of attention share.

    Attributes:
        cos: [B, T, r/2] of the rotary angles, if r of a head's numbers rotate; ``sin`` as well.
        mask: which tokens see each other.
    """

    cos: jax.Array
    sin: jax.Array
    mask: TreeMask


def _prepare(config: DecoderConfig, windowed: bool, tokens: TokenTrees) -> AttentionContext:
    if tokens.images is not None:  # no vision model has windowed layers
        cos, sin = mrope_tables(config.rope, config.head_dim, tokens.images.rope_positions)
        return AttentionContext(cos, sin, TreeMask(tokens.subtree_end))

    rope = config.rope
    if windowed and config.local_rope is not None:
        rope = config.local_rope

    if config.window_choices("attention") == (False,):
        mask = TreeMask(tokens.subtree_end)
    else:
        # The masks of both kinds are stacked, so a layer without a window gets one of the row's
        # length: no two positions are that far apart.
        window = config.sliding_window if windowed else tokens.positions.shape[1]
        mask = TreeMask(tokens.subtree_end, tokens.positions, jnp.int32(window))

    cos, sin = rope_tables(rope, config.head_dim, tokens.positions)
    return AttentionContext(cos, sin, mask)


def _mix(layer: LayerWeights, x: jax.Array, context: AttentionContext) -> jax.Array:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        return sharded_tree_attention(q, k, v, context.mask, layer.mesh, sinks)

    return mix_heads(layer, x, context.cos, context.sin, attend)


def mix_heads(
    layer: LayerWeights, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend
) -> jax.Array:
    """Project tokens to heads, mix these, and project back: [B, T, D] -> [B, T, D].

    Args:
        cos: see :class:`AttentionContext`; ``sin`` as well.
        attend: mixes values; queries are scaled.
    """
    config = layer.config
    rows, count, _ = x.shape
    cos = cos[:, None]
    sin = sin[:, None]

    def project_heads(name: str, norm: str | None = None) -> jax.Array:
        """Project [B, T, D] -> [B, heads, T, h], and apply a norm."""
        projected = layer.linear(name, x)
        if norm is not None and config.qk_norm_over == "heads":
            projected = layer.norm(norm, projected)
        heads = projected.reshape(rows, count, -1, config.head_dim)
        if norm is not None and config.qk_norm_over == "head":
            heads = layer.norm(norm, heads)
        return heads.transpose(0, 2, 1, 3)

    q = project_heads("q", "q_norm" if config.qk_norm else None)
    k = project_heads("k", "k_norm" if config.qk_norm else None)
    q = rotate(config.rope, q, cos, sin) * config.score_scale
    k = rotate(config.rope, k, cos, sin)
    v = project_heads("v")

    mixed = attend(q, k, v, layer.params.get("sinks"))
    return layer.linear("o", mixed.transpose(0, 2, 1, 3).reshape(rows, count, -1))


ATTENTION = Mixer(prepare=_prepare, mix=_mix)
