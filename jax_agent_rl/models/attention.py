"""Attention over packed token trees, block by block, with its own backward pass.

Shapes: B rows, T tokens, H query heads, K key/value heads, G = H / K, h head size. Scores exist for
one block of queries at a time and are recomputed in the backward pass (Dao et al. 2022,
FlashAttention, arXiv 2205.14135), so memory grows with T, not T², and a block's scores stay in
cache. Blocks see no key to their right, which halves the work.

TPU programs use ``models.tree_kernel`` instead of the unrolled blocks here: it compiles in seconds
whatever the row's length, and skips fully masked blocks.

Where the mesh axis ``context`` splits the tokens of a row, each shard gathers the keys and values
of the whole row and attends with its own queries (as Llama 3 was trained: Grattafiori et al. 2024,
arXiv 2407.21783, section 3.3.2). The tree mask only needs their offset. This takes ``2 B K T h``
numbers per layer and shard, little beside activations, as K is far below H. Ring attention would
hold less, but wait at each hop.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from jax_agent_rl.models import tree_kernel
from jax_agent_rl.models.sharding import ROWS, by_platform
from jax_agent_rl.models.tree_kernel import MASK_VALUE, TreeMask

BLOCK = 128
ATTENTION_INPUTS, ATTENTION_OUTPUT = "attention inputs", "attention output"
"""Checkpoint names of what the backward pass reuses, for rematerialization policies."""


def sharded_tree_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tree_mask: TreeMask,
    mesh: Mesh | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Run :func:`tree_attention` on a mesh that splits rows, heads and, over ``context``, tokens."""
    if mesh is None:
        return tree_attention(q, k, v, tree_mask, sinks)

    def shard(
        q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, sinks: jax.Array | None
    ) -> jax.Array:
        if mesh.shape["context"] == 1:
            return tree_attention(q, k, v, tree_mask, sinks)
        keys, values = (jax.lax.all_gather(x, "context", axis=2, tiled=True) for x in (k, v))
        offset = jax.lax.axis_index("context") * q.shape[2]
        return tree_attention(q, keys, values, tree_mask._replace(offset=offset), sinks)

    copies = _head_copies(q.shape[1], k.shape[1], mesh.shape["tensor"])
    k, v = (jnp.repeat(x, copies or 1, axis=1) for x in (k, v))
    heads = "tensor" if copies else None
    split, whole = PartitionSpec(ROWS, heads, "context"), PartitionSpec(ROWS)
    mask_specs = jax.tree.map(lambda x: whole if x.ndim else PartitionSpec(), tree_mask)
    specs = (split, split, split, mask_specs, PartitionSpec(heads))
    run = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
    return run(q, k, v, tree_mask, sinks)


def _head_copies(heads: int, kv_heads: int, shards: int) -> int:
    """Return how often to repeat key/value heads so that all heads divide; 0 if they never do: replicate them."""
    copies = shards // math.gcd(kv_heads, shards)
    return copies if heads % (kv_heads * copies) == 0 else 0


@jax.custom_vjp
def tree_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, sinks: jax.Array | None = None
) -> jax.Array:
    """Compute dot-product attention over token trees.

    Args:
        q: [B, H, Q, h], already scaled; heads of one key/value head are adjacent. Q is T without
            ``tree_mask.offset``.
        k: [B, K, T, h].
        v: [B, K, T, h].
        tree_mask: of the B rows.
        sinks: [H], a further score of each head's softmax; None for none.

    Returns:
        [B, H, Q, h].
    """
    return _forward(q, k, v, tree_mask, sinks)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the output, and the log of each softmax's normalizer, float32 [B, H, Q]."""
    output, normalizer = by_platform(
        q, k, v, tree_mask, tpu=tree_kernel.forward, default=_forward_by_blocks
    )
    return (output, normalizer) if sinks is None else add_sinks(output, normalizer, sinks)


def add_sinks(
    output: jax.Array, normalizer: jax.Array, sinks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Add sinks to finished softmaxes.

    Args:
        output: [B, H, Q, h].
        normalizer: the log of each softmax's, float32 [B, H, Q].
        sinks: [H].

    Returns:
        Both as if the sinks had been among the scores.
    """
    total = jnp.logaddexp(normalizer, sinks[:, None].astype(jnp.float32))
    return (output * jnp.exp(normalizer - total)[..., None]).astype(output.dtype), total


def _forward_by_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask
) -> tuple[jax.Array, jax.Array]:
    outputs, normalizers = [], []
    for begin, end, seen in _blocks(q, k, tree_mask):
        queries = _fold(q[:, :, begin:end], k.shape[1])
        scores = _scores(queries, k[:, :, :seen], tree_mask, (begin, end))
        peak = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = jnp.einsum(
            "bkms,bksh->bkmh", weights.astype(v.dtype), v[:, :, :seen]
        ) / total.astype(v.dtype)
        outputs.append(_unfold(mixed, q.shape[1]))
        normalizers.append(_unfold(peak + jnp.log(total), q.shape[1]))
    return jnp.concatenate(outputs, axis=2), jnp.concatenate(normalizers, axis=2)[..., 0]


def _save(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, sinks: jax.Array | None
) -> tuple[jax.Array, tuple]:
    output, normalizer = (
        checkpoint_name(x, ATTENTION_OUTPUT) for x in _forward(q, k, v, tree_mask, sinks)
    )
    q, k, v = (checkpoint_name(x, ATTENTION_INPUTS) for x in (q, k, v))
    return output, ((q, k, v, tree_mask, output, normalizer), sinks)


def _backward(
    saved: tuple, d_output: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, jax.Array | None]:
    saved, sinks = saved
    # With the sinks in output and normalizer, weights and gradients of the other scores are right
    # as they are.
    gradients = by_platform(*saved, d_output, tpu=tree_kernel.backward, default=_backward_by_blocks)
    d_q, d_k, d_v = gradients
    if sinks is None:
        return d_q, d_k, d_v, None, None
    output, normalizer = saved[-2:]
    mean = jnp.sum(d_output * output, axis=-1, dtype=jnp.float32)
    weights = jnp.exp(sinks[:, None].astype(jnp.float32) - normalizer)
    return d_q, d_k, d_v, None, -jnp.sum(weights * mean, axis=(0, 2)).astype(sinks.dtype)


def _backward_by_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tree_mask: TreeMask,
    output: jax.Array,
    normalizer: jax.Array,
    d_output: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    kv_heads = k.shape[1]
    dq = []
    dk, dv = jnp.zeros_like(k), jnp.zeros_like(v)
    for begin, end, seen in _blocks(q, k, tree_mask):
        queries, d_out, out, log_total = (
            _fold(x[:, :, begin:end], kv_heads)
            for x in (q, d_output, output, normalizer[..., None])
        )
        weights = jnp.exp(_scores(queries, k[:, :, :seen], tree_mask, (begin, end)) - log_total)
        d_weights = jnp.einsum(
            "bkmh,bksh->bkms", d_out, v[:, :, :seen], preferred_element_type=jnp.float32
        )
        d_scores = weights * (
            d_weights - jnp.sum(d_out * out, axis=-1, keepdims=True, dtype=jnp.float32)
        )
        d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
        dq.append(_unfold(jnp.einsum("bkms,bksh->bkmh", d_scores, k[:, :, :seen]), q.shape[1]))
        # Written with the long axis last on both sides: CPUs run this product half again as fast.
        dk = dk.at[:, :, :seen].add(jnp.einsum("bkhm,bkms->bkhs", queries.mT, d_scores).mT)
        dv = dv.at[:, :, :seen].add(jnp.einsum("bkhm,bkms->bkhs", d_out.mT, weights).mT)
    return jnp.concatenate(dq, axis=2), dk, dv


tree_attention.defvjp(_save, _backward)


def _blocks(q: jax.Array, k: jax.Array, tree_mask: TreeMask) -> list[tuple[int, int, int]]:
    """Return begin and end of each block of queries, and its number of keys: all, if the offset is dynamic."""
    length = q.shape[2]
    ends = [(begin, min(begin + BLOCK, length)) for begin in range(0, length, BLOCK)]
    return [(begin, end, end if tree_mask.offset is None else k.shape[2]) for begin, end in ends]


def _scores(
    queries: jax.Array, keys: jax.Array, tree_mask: TreeMask, span: tuple[int, int]
) -> jax.Array:
    """Return masked scores float32 [B, K, G·block, S] of the folded queries from ``span[0]`` to ``span[1]``."""
    batch, kv_heads, folded, _ = queries.shape
    length, block = keys.shape[2], span[1] - span[0]
    bias = jnp.where(_visible(tree_mask, span, length), 0.0, MASK_VALUE)[:, None, None]
    scores = jnp.einsum("bkmh,bksh->bkms", queries, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, folded // block, block, length) + bias
    return scores.reshape(batch, kv_heads, folded, length)


def _visible(tree_mask: TreeMask, span: tuple[int, int], keys: int) -> jax.Array:
    """Return bool [B, block, keys]: which of the first keys the queries of a block attend to."""
    index = jnp.arange(*span) + (0 if tree_mask.offset is None else tree_mask.offset)
    visible = (jnp.arange(keys) <= index[:, None]) & (
        index[:, None] < tree_mask.subtree_end[:, None, :keys]
    )
    if tree_mask.window is None or tree_mask.positions is None:
        return visible
    distance = tree_mask.positions[:, index][:, :, None] - tree_mask.positions[:, None, :keys]
    return visible & (distance < tree_mask.window)


def _fold(x: jax.Array, kv_heads: int) -> jax.Array:
    """Fold [B, H, n, h] -> [B, K, G·n, h]: one product per key/value head instead of one per query head."""
    batch, _, _, size = x.shape
    return x.reshape(batch, kv_heads, -1, size)


def _unfold(x: jax.Array, heads: int) -> jax.Array:
    """Unfold [B, K, G·n, h] -> [B, H, n, h]."""
    batch, _, _, size = x.shape
    return x.reshape(batch, heads, -1, size)
