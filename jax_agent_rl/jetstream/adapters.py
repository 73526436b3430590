"""LoRA adapters served beside the base model: every slot names one of them, or none.

All adapters are stacked on the device. In decoding every slot multiplies with all of them and a
mask keeps its own: for a few adapters of low rank that is one product of two small matrices. On
CPUs a kernel reads only the adapters in use. In prefill, where many tokens share an adapter, each
context gathers its own.

Shapes: N adapters, r their largest rank, D inputs, B slots or tokens; K key/value heads, G query
heads of each, h head size, F feed-forward units.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.lora import PeftAdapter

FUSED = {
    "qkv": ("q", "k", "v"),
    "global_qkv": ("global_q", "global_k", "global_v"),
    "q_a": ("q_a",),
    "q_b": ("q_b",),
    "kv_a": ("kv_a",),
    "kv_b": ("kv_b",),
    "o": ("o",),
    "global_o": ("global_o",),
    "gate_up": ("gate", "up"),
    "wide_gate_up": ("wide_gate", "wide_up"),
    "down": ("down",),
    "wide_down": ("wide_down",),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "shared_down": ("shared_down",),
    "per_layer_gate": ("per_layer_gate",),
    "per_layer_projection": ("per_layer_projection",),
    "delta_qkvz": ("delta_qkvz", "delta_qkv", "delta_z"),
    "delta_ba": ("delta_ba", "delta_b", "delta_a"),
    "delta_out": ("delta_out",),
}
"""The engine's matrices and the parameters fused into each, as far as a layer has them."""
_BY_HEAD = frozenset({*FUSED["qkv"], *FUSED["global_qkv"]})
"""Parameters whose outputs the engine groups by key/value head."""
_BY_KEY_HEAD = frozenset({*FUSED["delta_qkvz"], *FUSED["delta_ba"]})
"""Parameters whose outputs the engine groups by key head of a delta net."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """The adapters of one of the engine's matrices, into which p of the model's are fused.

    Attributes:
        a: [N, p r, D].
        b: p arrays [N, …, out, r], laid out as their parts of the matrix, scaled. Of ``kv_b`` two,
            [N, H, out, r], as the engine's ``k_b`` and ``v_b`` are its parts.
    """

    a: Any
    b: tuple[Any, ...]


LayerAdapters = dict[str, LowRank]
AdapterStacks = tuple[LayerAdapters, ...]
"""All adapters of an engine, layer by layer, without the matrices that none adapts."""


def stack_adapters(
    config: DecoderConfig, adapters: Sequence[PeftAdapter], *, dtype: jnp.dtype
) -> AdapterStacks:
    """Lay adapters out as the engine's matrices are.

    Args:
        config: the model, with the engine's ``num_kv_heads``.
        adapters: adapters of this model; ranks may differ.
        dtype: type of the stacks.

    Returns:
        Arrays on the host.
    """
    rank = max(adapter.rank for adapter in adapters)
    adapted: set[str] = set()
    for adapter in adapters:
        adapted.update(adapter.weights)
    kinds = [fused for fused, parts in FUSED.items() if adapted.intersection(parts)]
    matrices = [_lay_out(config, adapter, kinds, rank) for adapter in adapters]
    return jax.tree.map(lambda *arrays: np.stack(arrays).astype(dtype), *matrices)


class ServedAdapters:
    """The LoRA adapters of an engine, stacked on its devices.

    Args:
        config: the model, with the engine's ``num_kv_heads``.
        adapters: by name; none are stacked if it is empty.
        dtype: type of the stacks.
        sharding: devices of the stacks.

    Attributes:
        names: the adapter of number n is the n-th of them, counted from 1; 0 is the base model.
        stacks: what the numbers of slots index; None without adapters.
    """

    def __init__(
        self,
        config: DecoderConfig,
        adapters: Mapping[str, PeftAdapter],
        *,
        dtype: jnp.dtype,
        sharding: jax.sharding.Sharding,
    ) -> None:
        self._config = config
        self.names = tuple(adapters)
        self.stacks: AdapterStacks | None = None
        if adapters:
            stacks = stack_adapters(config, list(adapters.values()), dtype=dtype)
            self.stacks = jax.device_put(stacks, sharding)

    def replace(self, adapters: Mapping[str, PeftAdapter]) -> None:
        """Replace some adapters by new ones of the same names, in the memory of the old ones.

        Raises:
            ValueError: an unknown name, a higher rank, or a matrix that no adapter in the stacks
                adapts. Nothing is replaced then.
        """
        stacks = self.stacks
        unknown = sorted(adapters.keys() - set(self.names))
        if stacks is None or unknown:
            raise ValueError(f"no LoRA adapters {unknown}; there are {list(self.names)}")

        kinds = list(dict.fromkeys(kind for layer in stacks for kind in layer))
        rank = next(matrix for layer in stacks for matrix in layer.values()).b[0].shape[-1]
        parts: set[str] = set()
        for kind in kinds:
            parts.update(FUSED[kind])
        for adapter in adapters.values():
            if adapter.rank > rank or not parts.issuperset(adapter.weights):
                raise ValueError(
                    f"an adapter of rank {adapter.rank} for {sorted(adapter.weights)} does not fit"
                    f" adapters of rank {rank} for {sorted(parts)}; start the engine with one that"
                    " does"
                )

        for name, adapter in adapters.items():
            new = _lay_out(self._config, adapter, kinds, rank)
            index = np.int32(self.names.index(name))
            stacks = cast(AdapterStacks, _put(stacks, new, index))
        self.stacks = stacks


@functools.partial(jax.jit, donate_argnums=0)
def _put(stacks: AdapterStacks, new: AdapterStacks, index: jax.Array) -> AdapterStacks:
    """Overwrite the adapter at an index."""
    return jax.tree.map(
        lambda stack, adapter: stack.at[index].set(adapter.astype(stack.dtype)), stacks, new
    )


def add_low_rank(
    out: jax.Array, adapters: LowRank, x: jax.Array, adapter: jax.Array, *, native: bool
) -> jax.Array:
    """Add ``b a x`` of each context's adapter to a product [..., out, B T].

    Args:
        out: the product of the base model's matrix.
        adapters: the matrix's adapters.
        x: [D, B T], the matrix's input: T tokens of each context.
        adapter: int32 [B], 0 is the plain model and n the n-th adapter.
        native: use ``jetstream.cpu``.
    """
    a = adapters.a
    parts = len(adapters.b)
    if native:
        low = cpu_kernels.grouped_product(a, x, adapter).reshape(parts, -1, x.shape[1])
        products = []
        for b, low_part in zip(adapters.b, low, strict=True):
            products.append(cpu_kernels.grouped_product(b, low_part, adapter))

    elif len(adapter) == x.shape[1]:
        # One token of each context: multiply with all adapters and mask the others.
        is_chosen = jax.nn.one_hot(adapter - 1, len(a), axis=0, dtype=x.dtype)
        low = jnp.einsum("nrd,db->nrb", a, x) * is_chosen[:, None]
        low = low.reshape(len(a), parts, -1, x.shape[1])
        products = []
        for part, b in enumerate(adapters.b):
            products.append(jnp.einsum("n...or,nrb->...ob", b, low[:, part]))

    else:
        # Many tokens of each context: gather its adapter.
        index = jnp.maximum(adapter - 1, 0)
        is_adapted = (adapter > 0).astype(x.dtype)
        rows = x.reshape(len(x), len(adapter), -1)
        low = jnp.einsum("crd,dct->crt", a[index], rows) * is_adapted[:, None, None]
        low = low.reshape(len(adapter), parts, -1, rows.shape[2])
        by_context = []
        for part, b in enumerate(adapters.b):
            by_context.append(jnp.einsum("c...or,crt->...oct", b[index], low[:, part]))
        products = [product.reshape(*product.shape[:-2], -1) for product in by_context]
    return out + jnp.concatenate(products, axis=-2).reshape(out.shape)


def low_rank_by_head(adapters: LowRank, part: str, x: jax.Array, adapter: jax.Array) -> jax.Array:
    """Return what adapters of ``kv_b`` add to a product with each head's part of it.

    Args:
        adapters: of ``kv_b``.
        part: ``v_b``, or ``k_b``, which is that part of ``kv_b`` transposed.
        x: [H, in, B T], T tokens of each context.
        adapter: int32 [B], see :func:`add_low_rank`.

    Returns:
        [H, out, B T].
    """
    a = adapters.a
    keys, values = adapters.b
    heads, size, count = x.shape
    if len(adapter) == count:
        # One token of each context: multiply with all adapters and mask the others.
        is_chosen = jax.nn.one_hot(adapter - 1, len(a), axis=0, dtype=x.dtype)[:, None, None]
        if part == "k_b":
            low = jnp.einsum("nhir,hib->nhrb", keys, x) * is_chosen
            return jnp.einsum("nro,nhrb->hob", a, low)
        low = jnp.einsum("nri,hib->nhrb", a, x) * is_chosen
        return jnp.einsum("nhor,nhrb->hob", values, low)

    # Many tokens of each context: gather its adapter.
    index = jnp.maximum(adapter - 1, 0)
    is_adapted = (adapter > 0).astype(x.dtype)[:, None, None, None]
    rows = x.reshape(heads, size, len(adapter), -1)
    if part == "k_b":
        low = jnp.einsum("chir,hict->chrt", keys[index], rows) * is_adapted
        products = jnp.einsum("cro,chrt->hoct", a[index], low)
    else:
        low = jnp.einsum("cri,hict->chrt", a[index], rows) * is_adapted
        products = jnp.einsum("chor,chrt->hoct", values[index], low)
    return products.reshape(heads, -1, count)


def _lay_out(
    config: DecoderConfig, adapter: PeftAdapter, kinds: Sequence[str], rank: int
) -> AdapterStacks:
    """Return one adapter's matrices without the axis of adapters, float32 on the host."""

    def matrices_of(name: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a [rank, in] and b [..., out, rank] of one of the model's matrices."""
        outputs, inputs = config.layer_shapes(layer)[name]
        out_shape: tuple[int, ...] = (outputs,)
        if name in _BY_HEAD:
            kv_heads = config.heads(config.layer_kind(layer).mixer).num_kv_heads
            out_shape = (kv_heads, outputs // kv_heads)
        sizes = config.delta_net
        if name in _BY_KEY_HEAD:
            assert sizes is not None
            out_shape = (sizes.key_heads, outputs // sizes.key_heads)
        a = np.zeros((rank, inputs), np.float32)
        b = np.zeros((*out_shape, rank), np.float32)
        if name not in adapter.weights:
            return a, b
        place = config.layers_with(name).index(layer)
        adapter_a, adapter_b = (x[place] for x in adapter.weights[name])
        a[: adapter.rank] = adapter_a
        if len(adapter_b) < outputs:  # the engine holds a key/value head several times
            head_dim = config.heads(config.layer_kind(layer).mixer).head_dim
            heads = adapter_b.reshape(-1, head_dim, adapter.rank)
            adapter_b = np.repeat(heads, outputs // len(adapter_b), axis=0)
        if name == "delta_qkv":  # queries, keys and values follow each other
            assert sizes is not None
            by_head = []
            for part in np.split(adapter_b, [sizes.keys_size, 2 * sizes.keys_size]):
                by_head.append(part.reshape(sizes.key_heads, -1, adapter.rank))
            adapter_b = np.concatenate(by_head, axis=1)
        b[..., : adapter.rank] = adapter_b.reshape(*b.shape[:-1], -1)
        return a, b

    def low_rank(names: Sequence[str], layer: int) -> LowRank:
        a, b = zip(*(matrices_of(name, layer) for name in names), strict=True)
        if "kv_b" in names:
            assert config.latent is not None
            by_head = b[0].reshape(config.num_heads, -1, rank)
            b = tuple(np.split(by_head, [config.latent.nope_dim], axis=1))
        return LowRank(np.concatenate(a), b)

    layers = []
    for layer in range(config.num_layers):
        shapes = config.layer_shapes(layer)
        matrices = {}
        for kind in kinds:
            names = [name for name in FUSED[kind] if name in shapes]
            if names:
                matrices[kind] = low_rank(names, layer)
        layers.append(matrices)
    return tuple(layers)
