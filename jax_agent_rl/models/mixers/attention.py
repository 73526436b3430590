"""Attention with key/value heads: full, or within a window.

Shapes as in ``models.decoder``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_agent_rl.models.attention import sharded_tree_attention
from jax_agent_rl.models.config import AttentionHeads, DecoderConfig
from jax_agent_rl.models.layer_kinds import MixerName
from jax_agent_rl.models.layer_weights import LayerWeights
from jax_agent_rl.models.layers import (
    apart,
    gradient_apart,
    mrope_tables,
    rms_norm,
    rope_tables,
    rotate,
)
from jax_agent_rl.models.mixers.mixer import Mixer, TokenTrees
from jax_agent_rl.models.tree_kernel import TreeMask

KeysAndValues = tuple[jax.Array, jax.Array]
"""Rotated keys and values, [B, K, T, h] each."""
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


def _prepare(
    mixer: MixerName, config: DecoderConfig, windowed: bool, tokens: TokenTrees
) -> AttentionContext:
    head_dim = config.heads(mixer).head_dim
    if tokens.images is not None:  # no vision model has windowed layers
        cos, sin = mrope_tables(config.rope, head_dim, tokens.images.rope_positions)
        return AttentionContext(cos, sin, TreeMask(tokens.subtree_end))

    rope = config.rope
    if windowed and config.local_rope is not None:
        rope = config.local_rope

    if config.window_choices(mixer) == (False,):
        mask = TreeMask(tokens.subtree_end)
    else:
        # The masks of both kinds are stacked, so a layer without a window gets one of the row's
        # length: no two positions are that far apart.
        window = config.sliding_window if windowed else tokens.positions.shape[1]
        mask = TreeMask(tokens.subtree_end, tokens.positions, jnp.int32(window))

    cos, sin = rope_tables(rope, head_dim, tokens.positions)
    return AttentionContext(cos, sin, mask)


def _mix(layer: LayerWeights, x: jax.Array, context: AttentionContext) -> jax.Array:
    return _mix_with(layer, x, context, _keys_and_values(layer, x, context))


def _keys_and_values(layer: LayerWeights, x: jax.Array, context: AttentionContext) -> KeysAndValues:
    return keys_and_values(layer, x, context.cos, context.sin)


def _mix_with(
    layer: LayerWeights, x: jax.Array, context: AttentionContext, kv: KeysAndValues
) -> jax.Array:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        return sharded_tree_attention(q, k, v, context.mask, layer.mesh, sinks)

    return mix_heads(layer, x, context.cos, context.sin, kv, attend)


def keys_and_values(
    layer: LayerWeights, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> KeysAndValues:
    """Return rotated keys and values [B, K, T, h] of normalized tokens [B, T, D].

    Args:
        cos: see :class:`AttentionContext`; ``sin`` as well.
    """
    config = layer.config
    heads = config.heads(layer.kind.mixer)
    k = _project_heads(layer, heads, "k", x, "k_norm" if config.qk_norm else None)
    if heads.keys_as_values:
        v = _project_heads(layer, heads, "k", x)
    else:
        v = _project_heads(layer, heads, "v", x)
    if config.v_norm:
        v = rms_norm(config, v, jnp.ones(heads.head_dim, v.dtype))
    return rotate(config.rope, k, cos[:, None], sin[:, None]), v


def mix_heads(
    layer: LayerWeights,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv: KeysAndValues,
    attend: Attend,
) -> jax.Array:
    """Project tokens to queries, mix values, and project back: [B, T, D] -> [B, T, D].

    Args:
        cos: see :class:`AttentionContext`; ``sin`` as well.
        kv: keys and values, of this layer or of another.
        attend: mixes values; queries are scaled.
    """
    config = layer.config
    heads = config.heads(layer.kind.mixer)
    rows, count, _ = x.shape
    q = layer.linear(f"{heads.prefix}q", x)
    gate = None
    if config.attention_gate:
        # Each head's query, then its gate.
        by_head = q.reshape(rows, count, config.num_heads, -1)
        queries, gate = jnp.split(by_head, 2, axis=-1)
        q = queries.reshape(rows, count, -1)
        gate = gate.transpose(0, 2, 1, 3)
    q = _split_heads(layer, heads, q, "q_norm" if config.qk_norm else None)
    q = rotate(config.rope, q, cos[:, None], sin[:, None]) * config.score_scale

    mixed = attend(q, *kv, layer.params.get("sinks"))
    if gate is not None:
        mixed = mixed * jax.nn.sigmoid(gate)
    mixed = gradient_apart(mixed).transpose(0, 2, 1, 3)
    return layer.linear(f"{heads.prefix}o", mixed, by_head=True)


def _project_heads(
    layer: LayerWeights, heads: AttentionHeads, name: str, x: jax.Array, norm: str | None = None
) -> jax.Array:
    """Project [B, T, D] -> [B, heads, T, h], and apply a norm."""
    return _split_heads(layer, heads, layer.linear(heads.prefix + name, x), norm)


def _split_heads(
    layer: LayerWeights, heads: AttentionHeads, projected: jax.Array, norm: str | None
) -> jax.Array:
    """Turn [B, T, heads h] into [B, heads, T, h], and apply a norm."""
    rows, count, _ = projected.shape
    over = layer.config.qk_norm_over
    if norm is not None and over == "heads":
        projected = layer.norm(heads.prefix + norm, projected)
    by_head = projected.reshape(rows, count, -1, heads.head_dim)
    by_head = apart(by_head.transpose(0, 2, 1, 3))
    if norm is not None and over == "head":
        by_head = layer.norm(heads.prefix + norm, by_head)
    return by_head


def _mixer(name: MixerName) -> Mixer:
    return Mixer(
        prepare=functools.partial(_prepare, name),
        mix=_mix,
        keys_and_values=_keys_and_values,
        mix_with=_mix_with,
    )


ATTENTION = _mixer("attention")
GLOBAL_ATTENTION = _mixer("global_attention")
