"""Gated delta nets as a mixer: projections, a convolution, the delta rule, a gated norm.

Shapes as in ``models.delta_net``. On a mesh, devices of the axis ``tensor`` have their own heads.
The rule needs every token of a row, so where the axis ``context`` splits these, its devices
exchange them for heads (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_agent_rl.models import delta_kernel
from jax_agent_rl.models.attention import kv_head_repeats
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.delta_net import CHUNK, delta_tokens, gated_rms_norm
from jax_agent_rl.models.delta_tree import tree_conv, tree_delta_rule
from jax_agent_rl.models.layer_weights import LayerWeights
from jax_agent_rl.models.mixers.mixer import Mixer, TokenTrees
from jax_agent_rl.models.sharding import ROWS, compiles_for
from jax_agent_rl.models.token_forest import TokenForest, plan_forest


class HeadInputs(NamedTuple):
    """What is projected of tokens, by head.

    Attributes:
        q: [B, T, G, k].
        k: [B, T, G, k].
        v: [B, T, H, v].
        decay: [B, T, H].
        beta: [B, T, H].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array


class HeadWeights(NamedTuple):
    """Parameters by head.

    Attributes:
        q: [G, k, n], of the convolution.
        k: [G, k, n].
        v: [H, v, n].
        decay_log: [H].
        decay_bias: [H].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay_log: jax.Array
    decay_bias: jax.Array


def _prepare(config: DecoderConfig, windowed: bool, tokens: TokenTrees) -> TokenForest:
    chunk = delta_kernel.CHUNK if compiles_for("tpu") else CHUNK
    return plan_forest(tokens.subtree_end, chunk=chunk)


def _mix(layer: LayerWeights, x: jax.Array, forest: TokenForest) -> jax.Array:
    inputs, gate = _project(layer, x)
    outputs = _sharded_heads(inputs, _head_weights(layer), forest, layer.mesh)
    eps = layer.config.rms_norm_eps
    outputs = gated_rms_norm(outputs, gate, layer.params["delta_norm"], eps=eps)
    return layer.linear("delta_out", outputs.reshape(*x.shape[:2], -1))


def _project(layer: LayerWeights, x: jax.Array) -> tuple[HeadInputs, jax.Array]:
    """Return what tokens [B, T, D] give the heads, and the gate [B, T, H, v] of their outputs."""
    sizes = layer.config.delta_net
    assert sizes is not None
    batch = x.shape[:2]
    keys = sizes.keys_size
    if not sizes.fused:
        q, k, v = jnp.split(layer.linear("delta_qkv", x), [keys, 2 * keys], axis=-1)
        z = layer.linear("delta_z", x)
        beta = layer.linear("delta_b", x)
        decay = layer.linear("delta_a", x)
    else:
        # Of each key head its query, its key, and values and gates of the value heads it serves.
        qkvz = layer.linear("delta_qkvz", x).reshape(*batch, sizes.key_heads, -1)
        k_end = 2 * sizes.key_dim
        v_end = k_end + sizes.values_size // sizes.key_heads
        q, k, v, z = jnp.split(qkvz, [sizes.key_dim, k_end, v_end], axis=-1)
        ba = layer.linear("delta_ba", x).reshape(*batch, sizes.key_heads, -1)
        beta, decay = jnp.split(ba, 2, axis=-1)

    inputs = HeadInputs(
        q=q.reshape(*batch, sizes.key_heads, sizes.key_dim),
        k=k.reshape(*batch, sizes.key_heads, sizes.key_dim),
        v=v.reshape(*batch, sizes.value_heads, sizes.value_dim),
        decay=decay.reshape(*batch, sizes.value_heads),
        beta=beta.reshape(*batch, sizes.value_heads),
    )
    return inputs, z.reshape(*batch, sizes.value_heads, sizes.value_dim)


def _head_weights(layer: LayerWeights) -> HeadWeights:
    sizes = layer.config.delta_net
    assert sizes is not None
    keys = sizes.keys_size
    q, k, v = jnp.split(layer.params["delta_conv"][:, 0], [keys, 2 * keys])
    return HeadWeights(
        q=q.reshape(sizes.key_heads, sizes.key_dim, -1),
        k=k.reshape(sizes.key_heads, sizes.key_dim, -1),
        v=v.reshape(sizes.value_heads, sizes.value_dim, -1),
        decay_log=layer.params["delta_decay_log"],
        decay_bias=layer.params["delta_decay_bias"],
    )


def _mix_heads(inputs: HeadInputs, weights: HeadWeights, forest: TokenForest) -> jax.Array:
    """Return the heads' outputs float32 [B, T, H, v], of any number of heads."""

    def convolve(x: jax.Array, weight: jax.Array) -> jax.Array:
        channels = x.reshape(*x.shape[:2], -1)
        y = tree_conv(channels, weight.reshape(-1, weight.shape[-1]), forest.parent)
        return y.reshape(x.shape)

    tokens = delta_tokens(
        convolve(inputs.q, weights.q),
        convolve(inputs.k, weights.k),
        convolve(inputs.v, weights.v),
        inputs.decay,
        inputs.beta,
        decay_log=weights.decay_log,
        decay_bias=weights.decay_bias,
    )
    return tree_delta_rule(tokens, forest)


def _sharded_heads(
    inputs: HeadInputs, weights: HeadWeights, forest: TokenForest, mesh: Mesh | None
) -> jax.Array:
    """Run :func:`_mix_heads` on a mesh, which splits rows, tokens and heads."""
    if mesh is None:
        return _mix_heads(inputs, weights, forest)

    key_heads = inputs.q.shape[2]
    value_heads = inputs.v.shape[2]
    # Heads are split by as many axes as divide them.
    token_heads: str | None = None  # of arrays whose tokens are split
    row_heads: tuple[str, ...] = ()  # of those with whole rows
    repeats = 1
    for axes in (("tensor", "context"), ("tensor",)):
        shards = math.prod(mesh.shape[axis] for axis in axes)
        needed = kv_head_repeats(value_heads, key_heads, shards)
        if needed is not None:
            token_heads = "tensor"
            row_heads = axes
            repeats = needed
            break

    # Repeated key heads serve fewer value heads each.
    inputs = inputs._replace(
        q=jnp.repeat(inputs.q, repeats, axis=2), k=jnp.repeat(inputs.k, repeats, axis=2)
    )
    weights = weights._replace(
        q=jnp.repeat(weights.q, repeats, axis=0), k=jnp.repeat(weights.k, repeats, axis=0)
    )
    is_split = mesh.shape["context"] > 1

    def shard(inputs: HeadInputs, weights: HeadWeights, forest: TokenForest) -> jax.Array:
        if not is_split:
            return _mix_heads(inputs, weights, forest)
        if "context" in row_heads:
            whole_rows = jax.tree.map(_heads_for_tokens, inputs)
            return _tokens_for_heads(_mix_heads(whole_rows, weights, forest))

        # Too few heads: every device computes all tokens of its heads.
        whole_rows = jax.tree.map(
            lambda x: jax.lax.all_gather(x, "context", axis=1, tiled=True), inputs
        )
        outputs = _mix_heads(whole_rows, weights, forest)
        count = inputs.beta.shape[1]
        first = jax.lax.axis_index("context") * count
        return jax.lax.dynamic_slice_in_dim(outputs, first, count, axis=1)

    token_spec = PartitionSpec(ROWS, "context", token_heads)
    run = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(token_spec, PartitionSpec(row_heads or None), PartitionSpec(ROWS)),
        out_specs=token_spec,
        check_vma=False,
    )
    return run(inputs, weights, forest)


def _heads_for_tokens(x: jax.Array) -> jax.Array:
    """Exchange [B, own tokens, heads, ..] for [B, T, own heads, ..]."""
    return jax.lax.all_to_all(x, "context", split_axis=2, concat_axis=1, tiled=True)


def _tokens_for_heads(x: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(x, "context", split_axis=1, concat_axis=2, tiled=True)


DELTA_NET = Mixer(prepare=_prepare, mix=_mix)
