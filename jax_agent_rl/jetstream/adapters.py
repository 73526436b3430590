"""LoRA adapters served beside the base model: every slot names one of them, or none.

All adapters are stacked on the device. Every slot multiplies with all of them and a mask keeps its own: for a few
adapters of low rank that is one product of two small matrices and needs no gather.

Shapes: N adapters, r their largest rank, D inputs, B slots or tokens; K key/value heads, G query heads of each, h head
size, F feed-forward units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.peft import PeftAdapter

FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""The engine's matrices and the parameters fused into each."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """The adapters of one of the engine's matrices.

    Attributes:
        a: [N, p r, D], for each of the p matrices fused into it.
        b: [N, …, out, p r], laid out as the matrix, scaled; zero where a row's matrix is not the column's.
    """

    a: Any
    b: Any


LayerAdapters = dict[str, LowRank]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdapterStacks:
    """All adapters of an engine, layer by layer, without the matrices that none adapts."""

    layers: tuple[LayerAdapters, ...]


def stack_adapters(config: DecoderConfig, adapters: Sequence[PeftAdapter], *, dtype: jnp.dtype) -> AdapterStacks:
    """Lay adapters out as the engine's matrices are.

    Args:
        config: the model, with the engine's ``num_kv_heads``.
        adapters: of this model; ranks may differ.
        dtype: of the stacks.

    Returns:
        Arrays on the host.
    """
    rank = max(adapter.rank for adapter in adapters)
    used = {name for adapter in adapters for name in adapter.weights}
    kinds = [fused for fused, parts in FUSED.items() if used.intersection(parts)]

    def layer(i: int) -> LayerAdapters:
        return {
            fused: LowRank(
                a=np.stack([_fused_a(config, adapter, fused, i, rank) for adapter in adapters]).astype(dtype),
                b=np.stack([_fused_b(config, adapter, fused, i, rank) for adapter in adapters]).astype(dtype),
            )
            for fused in kinds
        }

    return AdapterStacks(tuple(layer(i) for i in range(config.num_layers)))


def one_hot(adapter: jax.Array, stacks: AdapterStacks, dtype: jnp.dtype) -> jax.Array:
    """Return [N, B] of int32 [B], where 0 is the plain model and n the n-th adapter."""
    count = len(next(iter(stacks.layers[0].values())).a)
    return jax.nn.one_hot(adapter - 1, count, axis=0, dtype=dtype)


def add_low_rank(out: jax.Array, adapters: LowRank, x: jax.Array, chosen: jax.Array) -> jax.Array:
    """Add ``b a x`` of each slot's adapter to a product [..., out, B].

    Args:
        out: the product.
        adapters: of the matrix.
        x: [D, B], the matrix's input.
        chosen: [N, B], see :func:`one_hot`.
    """
    low = jnp.einsum("nrd,db->nrb", adapters.a, x) * chosen[:, None]
    return out + jnp.einsum("n...or,nrb->...ob", adapters.b, low)


def _fused_a(config: DecoderConfig, adapter: PeftAdapter, fused: str, layer: int, rank: int) -> np.ndarray:
    """Return ``a`` of one adapter and one of the engine's matrices, [p r, D]."""
    parts = FUSED[fused]
    inputs = {"o": config.num_heads * config.head_dim, "down": config.intermediate_size}.get(fused, config.hidden_size)
    a = np.zeros((len(parts), rank, inputs), np.float32)
    for i, part in enumerate(parts):
        if part in adapter.weights:
            a[i, : adapter.rank] = adapter.weights[part][0][layer]
    return a.reshape(-1, inputs)


def _fused_b(config: DecoderConfig, adapter: PeftAdapter, fused: str, layer: int, rank: int) -> np.ndarray:
    """Return ``b`` of one adapter and one of the engine's matrices, […, out, p r], rows in the engine's order."""
    kv_heads, size = config.num_kv_heads, config.head_dim
    group = config.num_heads // kv_heads
    up = {part: b[layer] for part, (_, b) in adapter.weights.items() if part in FUSED[fused]}
    own = slice(adapter.rank)
    if fused == "qkv":
        b = np.zeros((kv_heads, group + 2, size, 3, rank), np.float32)
        if "q" in up:
            b[:, :group, :, 0, own] = up["q"].reshape(kv_heads, group, size, -1)
        for i, part in enumerate(("k", "v"), 1):
            if part in up:
                heads = up[part].reshape(-1, size, adapter.rank)
                b[:, group + i - 1, :, i, own] = np.repeat(heads, kv_heads // len(heads), axis=0)
        return b.reshape(kv_heads, (group + 2) * size, -1)
    if fused == "gate_up":
        b = np.zeros((2, config.intermediate_size, 2, rank), np.float32)
        for i, part in enumerate(FUSED[fused]):
            if part in up:
                b[i, :, i, own] = up[part]
        return b.reshape(2, config.intermediate_size, -1)
    b = np.zeros((config.hidden_size, rank), np.float32)
    if fused in up:
        b[:, own] = up[fused]
    return b
