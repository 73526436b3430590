"""Mixture of experts without dropped tokens: tokens sorted by expert, one grouped product per matrix.

On a mesh each shard of the axis ``expert`` holds its own experts::

    own tokens ─► all-gather over expert ─► own experts only (others sorted to the end) ─► sum-scatter back

Choices may come from elsewhere (router replay, ``jax_agent_rl.generation``): weights and gradients
are then those of the layer's own scores over the given experts.

No token is dropped and there is no capacity factor; a shard holds the tokens of its ``expert``
neighbours for one layer, [N k X, D] for X shards, and computes only its own.

The grouped product is ``jax.lax.ragged_dot``, for which libtpu has a kernel, but whose gradient
with respect to the weights becomes a masked product of all rows for every group. On TPUs that
gradient is Megablox' kernel (``tgmm``), which reads each row once.

Shapes: N tokens, D hidden, E experts, F an expert's hidden size, k experts per token, X shards of
the axis ``expert``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jax.sharding import Mesh, PartitionSpec

from jax_agent_rl.models.config import Experts, Params
from jax_agent_rl.models.layers import split_weight
from jax_agent_rl.models.parameters import PARAMETERS
from jax_agent_rl.models.sharding import ROWS, RULES, by_platform

Activation = Callable[[jax.Array, jax.Array], jax.Array]
"""From the products with ``expert_gate`` and ``expert_up`` to hidden units."""

WEIGHTS = {
    name: PartitionSpec(*(RULES[axis] for axis in parameter.axes if axis != "layers"))
    for name, parameter in PARAMETERS.items()
    if name.startswith(("router", "expert_"))
}
"""Shardings of a layer's parameters; biases are there if ``Experts.bias``."""


def _scores(layer: Params, x: jax.Array) -> jax.Array:
    """Return the router's scores float32 [.., E] of x [.., D]."""
    scores = jnp.einsum("...d,ed->...e", x, layer["router"])
    return (scores + layer["router_bias"] if "router_bias" in layer else scores).astype(jnp.float32)


def route(
    experts: Experts, layer: Params, x: jax.Array, given: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Choose the experts of each token: weights float32 [N, k] and indices int32 [N, k].

    Args:
        experts: the mixture.
        layer: ``router`` [E, D], and perhaps ``router_bias`` [E].
        x: inputs of the router, [N, D].
        given: [N, k], choices to take instead; a token of -1 chooses itself.
    """
    probabilities = jax.nn.softmax(_scores(layer, x), axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, experts.per_token)
    if given is not None:
        chosen = _or_given(chosen, given)
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if experts.normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def _or_given(chosen: jax.Array, given: jax.Array) -> jax.Array:
    return jnp.where(given < 0, chosen, given.astype(chosen.dtype))


def router_load(
    experts: Experts, layer: Params, x: jax.Array, copies: jax.Array, given: jax.Array | None = None
) -> jax.Array:
    """Compute the load of each expert, for :func:`load_balancing_loss`.

    Args:
        experts: the mixture.
        layer: ``router`` [E, D], and perhaps ``router_bias`` [E].
        x: inputs of the router, [B, T, D].
        copies: int32 [B, T], how often each token counts.
        given: [B, T, k], see :func:`route`.

    Returns:
        float32 [2, E]: tokens that chose an expert (without gradient), and the sum of its
            probabilities.
    """
    probabilities = jax.nn.softmax(_scores(layer, x), axis=-1)
    _, chosen = jax.lax.top_k(probabilities, experts.per_token)
    chosen = chosen if given is None else _or_given(chosen, given)
    picked = jnp.sum(jax.nn.one_hot(chosen, experts.count), axis=2)
    weights = copies.astype(jnp.float32)
    return jnp.einsum(
        "bt,sbte->se", weights, jnp.stack([jax.lax.stop_gradient(picked), probabilities])
    )


def load_balancing_loss(probabilities: jax.Array, share: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return ``E sum_e f_e P_e`` (Fedus et al. 2021, Switch Transformers, arXiv 2101.03961, eq. 4).

    Args:
        probabilities: float32 [E], each expert's probability summed over some of the tokens and all
            layers.
        share: float32 [E], f: the fraction of *all* tokens (of all layers) that chose an expert.
        tokens: float32 [], all tokens times layers.

    Returns:
        These tokens' part of the loss, float32 []; the parts of a batch add up however it is split.
    """
    return len(share) * jnp.sum(share * probabilities) / tokens


def mixture_of_experts(
    experts: Experts,
    layer: Params,
    x: jax.Array,
    activation: Activation,
    given: jax.Array | None = None,
    *,
    transposed: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Apply each token's experts, weighted: [N, D] -> [N, D] and the choices int32 [N, k].

    Args:
        experts: the mixture.
        x: tokens.
        activation: of the gate.
        layer: ``router`` [E, D], ``expert_gate`` and ``expert_up`` [E, F, D], ``expert_down`` [E,
            D, F]; and a bias ``…_bias`` [E, out] of each, or none.
        given: [N, k], see :func:`route`.
        transposed: the experts' matrices are [E, in, out].
    """
    weights, chosen = route(experts, layer, x, given)
    return _weighted(layer, x, weights, chosen, activation, transposed=transposed), chosen


def sharded_mixture_of_experts(
    experts: Experts,
    layer: Params,
    x: jax.Array,
    activation: Activation,
    mesh: Mesh,
    given: jax.Array | None = None,
) -> jax.Array:
    """Apply :func:`mixture_of_experts` to [B, T, D] and ``given`` [B, T, k], rows and tokens split over the mesh."""
    here = experts.count // mesh.shape["expert"]

    def shard(layer: Params, x: jax.Array, given: jax.Array | None) -> jax.Array:
        def gather(name: str, weight: jax.Array) -> jax.Array:
            spec = WEIGHTS[name]
            return (
                jax.lax.all_gather(weight, "fsdp", axis=spec.index("fsdp"), tiled=True)
                if "fsdp" in spec
                else weight
            )

        layer = _bias_once({name: gather(name, weight) for name, weight in layer.items()})
        flat = x.reshape(-1, x.shape[-1])
        given = None if given is None else given.reshape(-1, experts.per_token)
        own = (flat, *route(experts, layer, flat, given))
        tokens, weights, chosen = (jax.lax.all_gather(part, "expert", tiled=True) for part in own)
        mixed = _weighted(layer, tokens, weights, _own(chosen, here), activation)
        mixed = jax.lax.psum_scatter(mixed, "expert", tiled=True)
        return jax.lax.psum(mixed, "tensor").reshape(x.shape)

    tokens = PartitionSpec(ROWS, "context", None)
    specs = {name: WEIGHTS[name] for name in layer}
    run = jax.shard_map(
        shard, mesh=mesh, in_specs=(specs, tokens, tokens), out_specs=tokens, check_vma=False
    )
    return run(layer, x, given)


def replicated_mixture_of_experts(
    experts: Experts, layer: Params, x: jax.Array, activation: Activation, mesh: Mesh
) -> tuple[jax.Array, jax.Array]:
    """Apply :func:`mixture_of_experts` with matrices [E, in, out] to [N, D] that is replicated.

    Experts are split over ``expert`` and their hidden units over ``tensor``; devices all-reduce
    their parts.
    """
    here = experts.count // mesh.shape["expert"]

    def shard(layer: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights, chosen = route(experts, layer, x)
        mixed = _weighted(
            _bias_once(layer), x, weights, _own(chosen, here), activation, transposed=True
        )
        return jax.lax.psum(mixed, ("expert", "tensor")), chosen

    weights = {name: layer[name] for name in WEIGHTS if name in layer}
    specs = {
        name: split_weight(weight, _transposed_spec(WEIGHTS[name]))
        for name, weight in weights.items()
    }
    run = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return run(weights, x)


def _bias_once(layer: Params) -> Params:
    """Keep ``expert_down_bias`` on one shard of the axis ``tensor``, over which outputs are summed."""
    if "expert_down_bias" not in layer:
        return layer
    bias = layer["expert_down_bias"]
    return layer | {"expert_down_bias": jnp.where(jax.lax.axis_index("tensor") == 0, bias, 0)}


def _own(chosen: jax.Array, here: int) -> jax.Array:
    """Return indices among the ``here`` experts of this shard; ``here`` for other shards' experts."""
    chosen = chosen - jax.lax.axis_index("expert") * here
    return jnp.where((chosen >= 0) & (chosen < here), chosen, here)


def _transposed_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return the spec of an expert's matrices [E, in, out], given that of [E, out, in]; others stay."""
    return PartitionSpec(spec[0], spec[2], spec[1]) if len(spec) == 3 else spec


def transpose_matrices(weight: Any) -> Any:
    """Swap the last two axes of matrices, quantized or not."""
    return jax.tree.map(lambda x: x.swapaxes(-1, -2), weight)


def _weighted(
    layer: Params,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    activation: Activation,
    *,
    transposed: bool = False,
) -> jax.Array:
    """Return the weighted outputs [N, D] of the chosen experts [N, k]; an index past the last adds nothing."""
    order = jnp.argsort(chosen.reshape(-1), stable=True)  # [N k] places, by expert
    count = layer["expert_gate"].shape[0]
    sizes = jnp.bincount(chosen.reshape(-1), length=count)
    expert = chosen.reshape(-1)[order]
    # Rows past the last group of a grouped product are undefined, forward and backward: they have
    # no token, weight and bias, and so no gradient.
    present = expert < count
    token = jnp.where(present, order // chosen.shape[1], len(x))
    weights = jnp.where(present, weights.reshape(-1)[order], 0)[:, None].astype(x.dtype)

    def product(values: jax.Array, name: str, weights: jax.Array | int = 1) -> jax.Array:
        out = grouped_product(values, layer[name], sizes, expert, transposed=transposed)
        bias = layer.get(f"{name}_bias")
        return (
            out if bias is None else out + bias.at[expert].get(mode="fill", fill_value=0) * weights
        )

    grouped = x.at[token].get(mode="fill", fill_value=0)
    hidden = activation(product(grouped, "expert_gate"), product(grouped, "expert_up"))
    # Weighted before the last product, where rows are shortest.
    return (
        jnp.zeros_like(x)
        .at[token]
        .add(product(hidden * weights, "expert_down", weights), mode="drop")
    )


TILE_ROWS, TILE_COLUMNS = 512, 1024
"""Tile of the kernel: rows of the operands, and at most so much of each dimension of the result."""


def grouped_product(
    x: jax.Array, weight: Any, sizes: jax.Array, group: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Multiply each row of x [N, in] with the matrix of its group -> [N, out].

    Args:
        x: rows ordered by group.
        weight: matrices [E, out, in], quantized (``models.layers``) or not.
        sizes: int32 [E], rows of each group.
        group: int32 [N], group of each row; rows past the last group are undefined, forward and
            backward.
        transposed: matrices are [E, in, out], which libtpu's kernel reads as they are: an engine
            keeps them so.
    """
    if isinstance(weight, jax.Array) and not transposed:
        return _product(x, weight, sizes)
    weight = weight if transposed else transpose_matrices(weight)
    if isinstance(weight, jax.Array):
        return jax.lax.ragged_dot(x, weight, sizes)
    out = jax.lax.ragged_dot(x, weight.numbers.astype(x.dtype), sizes)
    return out * weight.scale[:, 0].at[group].get(mode="clip").astype(x.dtype)


@jax.custom_vjp
def _product(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, weight.swapaxes(1, 2), sizes)


def _forward(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return _product(x, weight, sizes), (x, weight, sizes)


def _backward(kept: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weight, sizes = kept
    d_weight = by_platform(d_out, x, sizes, tpu=_outer_kernel, default=_outer)
    return jax.lax.ragged_dot(d_out, weight, sizes), d_weight.astype(weight.dtype), None


_product.defvjp(_forward, _backward)


def _outer(d_out: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sum the outer products of rows [N, out] and [N, in] by group -> [E, out, in]."""
    rows = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(),
    )
    return jax.lax.ragged_dot_general(d_out, x, sizes, rows)


def _outer_kernel(d_out: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    d_out, x = (
        jnp.pad(rows, ((0, -len(rows) % TILE_ROWS), (0, 0))) for rows in (d_out, x)
    )  # whole tiles
    tiling = (TILE_ROWS, min(TILE_COLUMNS, d_out.shape[1]), min(TILE_COLUMNS, x.shape[1]))
    return tgmm(d_out.T, x, sizes, preferred_element_type=x.dtype, tiling=tiling)
