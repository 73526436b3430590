"""Attention over packed token trees, block by block, with its own backward pass.

Shapes: B rows, T tokens, H query heads, K key/value heads, G = H / K, h head size, v size of a
value (mostly h). Scores exist for one block of queries at a time and are recomputed in the backward
pass (Dao et al. 2022, FlashAttention, arXiv 2205.14135), so memory grows with T, not T², and a
block's scores stay in cache. Blocks see no key to their right, which halves the work.

TPU programs use ``models.tree_kernel`` instead of the unrolled blocks here, and GPU programs
``models.tree_kernel_cuda``: they compile in seconds whatever the row's length, and skip fully
masked blocks.

Where the mesh axis ``context`` splits the tokens of a row, each shard gathers the keys and values
of the whole row and attends with its own queries (as Llama 3 was trained: Grattafiori et al. 2024,
arXiv 2407.21783, section 3.3.2). The tree mask only needs their offset. This takes ``2 B K T h``
numbers per layer and shard: little compared with activations, since K is far below H. Ring
attention would hold less, but wait at each hop.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from jax_agent_rl.models import tree_kernel, tree_kernel_cuda
from jax_agent_rl.models.sharding import ROWS, by_platform
from jax_agent_rl.models.tree_kernel import MASK_VALUE, TreeMask

BLOCK = 128
ATTENTION_INPUTS = "attention inputs"
ATTENTION_OUTPUT = "attention output"
"""Checkpoint names of what the backward pass reuses, for rematerialization policies."""


def sharded_tree_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tree_mask: TreeMask,
    mesh: Mesh | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Run :func:`tree_attention` on a mesh.

    The mesh splits rows, heads and, over the axis ``context``, tokens.
    """
    if mesh is None:
        return tree_attention(q, k, v, tree_mask, sinks)

    def shard(
        q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, sinks: jax.Array | None
    ) -> jax.Array:
        if mesh.shape["context"] == 1:
            return tree_attention(q, k, v, tree_mask, sinks)
        row_keys = jax.lax.all_gather(k, "context", axis=2, tiled=True)
        row_values = jax.lax.all_gather(v, "context", axis=2, tiled=True)
        offset = jax.lax.axis_index("context") * q.shape[2]
        return tree_attention(q, row_keys, row_values, tree_mask._replace(offset=offset), sinks)

    repeats = kv_head_repeats(q.shape[1], k.shape[1], mesh.shape["tensor"])
    if repeats is None:
        head_axis = None
        repeats = 1
    else:
        head_axis = "tensor"
    k = jnp.repeat(k, repeats, axis=1)
    v = jnp.repeat(v, repeats, axis=1)

    head_spec = PartitionSpec(ROWS, head_axis, "context")
    # Every shard of a row's tokens needs the mask of the whole row.
    row_spec = PartitionSpec(ROWS)
    mask_specs = jax.tree.map(lambda x: row_spec if x.ndim else PartitionSpec(), tree_mask)
    run = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(head_spec, head_spec, head_spec, mask_specs, PartitionSpec(head_axis)),
        out_specs=head_spec,
        check_vma=False,
    )
    return run(q, k, v, tree_mask, sinks)


def kv_head_repeats(heads: int, kv_heads: int, shards: int) -> int | None:
    """Return how often to repeat key/value heads so that the shards divide all heads.

    None means that no repetition does: the heads are replicated.
    """
    repeats = shards // math.gcd(kv_heads, shards)
    if heads % (kv_heads * repeats):
        return None
    return repeats


@jax.custom_vjp
def tree_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, sinks: jax.Array | None = None
) -> jax.Array:
    """Compute dot-product attention over token trees.

    Args:
        q: [B, H, Q, h], already scaled; heads of one key/value head are adjacent. Q is T without
            ``tree_mask.offset``.
        k: [B, K, T, h].
        v: [B, K, T, v].
        sinks: [H], a further score of each head's softmax; None for none.

    Returns:
        [B, H, Q, v].
    """
    return _forward(q, k, v, tree_mask, sinks)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the output, and the log of each softmax's normalizer, float32 [B, H, Q]."""
    output, normalizer = by_platform(
        q,
        k,
        v,
        tree_mask,
        tpu=tree_kernel.forward,
        cuda=tree_kernel_cuda.forward if tree_kernel_cuda.supports(q, v) else None,
        default=forward_by_blocks,
    )
    if sinks is None:
        return output, normalizer
    return add_sinks(output, normalizer, sinks)


def add_sinks(
    output: jax.Array, normalizer: jax.Array, sinks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Add sinks to finished softmaxes.

    Args:
        output: [B, H, Q, v].
        normalizer: float32 [B, H, Q], log of each softmax's normalizer.
        sinks: [H].

    Returns:
        Output and normalizer as if the sinks had been among the scores.
    """
    total = jnp.logaddexp(normalizer, sinks[:, None].astype(jnp.float32))
    shrink = jnp.exp(normalizer - total)[..., None]
    return (output * shrink).astype(output.dtype), total


def forward_by_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask
) -> tuple[jax.Array, jax.Array]:
    """Do in XLA's operations what the kernels' ``forward`` does."""
    heads = q.shape[1]
    kv_heads = k.shape[1]
    outputs = []
    normalizers = []
    for begin, end, key_count in _blocks(q, k, tree_mask):
        queries = _fold(q[:, :, begin:end], kv_heads)
        scores = _scores(queries, k[:, :, :key_count], tree_mask, (begin, end))

        peak = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = jnp.einsum("bkms,bksh->bkmh", weights.astype(v.dtype), v[:, :, :key_count])
        mixed = mixed / total.astype(v.dtype)

        outputs.append(_unfold(mixed, heads))
        normalizers.append(_unfold(peak + jnp.log(total), heads))
    return jnp.concatenate(outputs, axis=2), jnp.concatenate(normalizers, axis=2)[..., 0]


def _save(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, sinks: jax.Array | None
) -> tuple[jax.Array, tuple]:
    output, normalizer = _forward(q, k, v, tree_mask, sinks)
    output = checkpoint_name(output, ATTENTION_OUTPUT)
    normalizer = checkpoint_name(normalizer, ATTENTION_OUTPUT)
    q = checkpoint_name(q, ATTENTION_INPUTS)
    k = checkpoint_name(k, ATTENTION_INPUTS)
    v = checkpoint_name(v, ATTENTION_INPUTS)
    return output, (q, k, v, tree_mask, output, normalizer, sinks)


def _backward(
    saved: tuple, d_output: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, jax.Array | None]:
    q, k, v, tree_mask, output, normalizer, sinks = saved
    # Output and normalizer include the sinks, so the gradients of the other scores need no change.
    dq, dk, dv = by_platform(
        q,
        k,
        v,
        tree_mask,
        output,
        normalizer,
        d_output,
        tpu=tree_kernel.backward,
        cuda=tree_kernel_cuda.backward if tree_kernel_cuda.supports(q, v) else None,
        default=backward_by_blocks,
    )
    if sinks is None:
        return dq, dk, dv, None, None

    mean = jnp.sum(d_output * output, axis=-1, dtype=jnp.float32)
    sink_weights = jnp.exp(sinks[:, None].astype(jnp.float32) - normalizer)
    d_sinks = -jnp.sum(sink_weights * mean, axis=(0, 2))
    return dq, dk, dv, None, d_sinks.astype(sinks.dtype)


def backward_by_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tree_mask: TreeMask,
    output: jax.Array,
    normalizer: jax.Array,
    d_output: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Do in XLA's operations what the kernels' ``backward`` does."""
    heads = q.shape[1]
    kv_heads = k.shape[1]
    dq_blocks = []
    dk = jnp.zeros_like(k)
    dv = jnp.zeros_like(v)
    for begin, end, key_count in _blocks(q, k, tree_mask):
        log_totals = normalizer[..., None]
        queries = _fold(q[:, :, begin:end], kv_heads)
        d_out = _fold(d_output[:, :, begin:end], kv_heads)
        out = _fold(output[:, :, begin:end], kv_heads)
        log_total = _fold(log_totals[:, :, begin:end], kv_heads)

        scores = _scores(queries, k[:, :, :key_count], tree_mask, (begin, end))
        weights = jnp.exp(scores - log_total)
        d_weights = jnp.einsum(
            "bkmh,bksh->bkms", d_out, v[:, :, :key_count], preferred_element_type=jnp.float32
        )
        mean = jnp.sum(d_out * out, axis=-1, keepdims=True, dtype=jnp.float32)
        d_scores = weights * (d_weights - mean)
        d_scores = d_scores.astype(q.dtype)
        weights = weights.astype(q.dtype)

        dq = jnp.einsum("bkms,bksh->bkmh", d_scores, k[:, :, :key_count])
        dq_blocks.append(_unfold(dq, heads))
        # Written with the long axis last on both sides: CPUs run this product half again as fast.
        dk = dk.at[:, :, :key_count].add(jnp.einsum("bkhm,bkms->bkhs", queries.mT, d_scores).mT)
        dv = dv.at[:, :, :key_count].add(jnp.einsum("bkhm,bkms->bkhs", d_out.mT, weights).mT)
    return jnp.concatenate(dq_blocks, axis=2), dk, dv


tree_attention.defvjp(_save, _backward)


def _blocks(q: jax.Array, k: jax.Array, tree_mask: TreeMask) -> list[tuple[int, int, int]]:
    """Return begin and end of each block of queries, and the number of keys it may attend to."""
    length = q.shape[2]
    blocks = []
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        # With an offset, known only when the program runs, a query may stand anywhere in the row.
        key_count = end if tree_mask.offset is None else k.shape[2]
        blocks.append((begin, end, key_count))
    return blocks


def _scores(
    queries: jax.Array, keys: jax.Array, tree_mask: TreeMask, span: tuple[int, int]
) -> jax.Array:
    """Return masked scores float32 [B, K, G·block, S] of the folded queries of a span."""
    batch, kv_heads, folded, _ = queries.shape
    length = keys.shape[2]
    block = span[1] - span[0]
    bias = jnp.where(_visible(tree_mask, span, length), 0.0, MASK_VALUE)[:, None, None]
    scores = jnp.einsum("bkmh,bksh->bkms", queries, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, folded // block, block, length) + bias
    return scores.reshape(batch, kv_heads, folded, length)


def _visible(tree_mask: TreeMask, span: tuple[int, int], keys: int) -> jax.Array:
    """Return bool [B, block, keys]: which of the first keys the queries of a block attend to."""
    offset = 0 if tree_mask.offset is None else tree_mask.offset
    index = jnp.arange(*span) + offset
    is_before = jnp.arange(keys) <= index[:, None]
    is_in_subtree = index[:, None] < tree_mask.subtree_end[:, None, :keys]
    visible = is_before & is_in_subtree
    if tree_mask.window is None or tree_mask.positions is None:
        return visible
    distance = tree_mask.positions[:, index][:, :, None] - tree_mask.positions[:, None, :keys]
    return visible & (distance < tree_mask.window)


def _fold(x: jax.Array, kv_heads: int) -> jax.Array:
    """Fold [B, H, n, h] -> [B, K, G·n, h].

    There is one product per key/value head then, instead of one per query head.
    """
    batch, _, _, size = x.shape
    return x.reshape(batch, kv_heads, -1, size)


def _unfold(x: jax.Array, heads: int) -> jax.Array:
    """Unfold [B, K, G·n, h] -> [B, H, n, h]."""
    batch, _, _, size = x.shape
    return x.reshape(batch, heads, -1, size)
