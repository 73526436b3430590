"""Mixture of experts without dropped tokens.

Tokens are sorted by expert, for one grouped product per matrix. On a mesh each shard of the axis
``expert`` holds its own experts::

    shard's tokens ─► all-gather over ``expert`` ─► shard's experts ─► sum-scatter back
                                                    (tokens of other experts sorted to the end)

The choices may be given (router replay, ``types.routed_experts``): weights and gradients are
then those of the layer's own scores over the given experts.

No token is dropped and there is no capacity factor; a shard holds the tokens of its ``expert``
neighbours for one layer, [N k X, D] for X shards, and computes only its own.

The grouped product is ``jax.lax.ragged_dot``, for which libtpu has a kernel, but whose gradient
with respect to the weights becomes a masked product of all rows for every group. On TPUs that
gradient is Megablox' kernel (``tgmm``), which reads each row once. XLA's CUDA compiler makes masked
products of all three: GPUs have the kernels of ``models.grouped_kernel_cuda``.

Shapes: N tokens, D hidden, E experts, F an expert's hidden size, k experts per token, X shards of
the axis ``expert``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jax.sharding import Mesh, PartitionSpec

from jax_agent_rl.models import grouped_kernel_cuda
from jax_agent_rl.models.config import DecoderConfig, Experts, Params
from jax_agent_rl.models.layers import rms_norm, split_weight
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


PROBABILITIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
}
"""From the scores [.., E] of ``Experts.scoring`` to probabilities."""
_LEAST_SUM = 1e-20
"""Added to a sum of probabilities before it divides them, as in DeepSeek-V3's code."""


def _scores(layer: Params, x: jax.Array) -> jax.Array:
    """Return the router's scores float32 [.., E] of x [.., D]."""
    scores = _float32_product(x, layer["router"])
    if "router_bias" not in layer:
        return scores
    return scores + layer["router_bias"].astype(jnp.float32)


def _float32_product(x: jax.Array, router: jax.Array) -> jax.Array:
    """Multiply x [.., D] with a router [E, D] -> float32 [.., E], whatever dtype they have.

    Rounded scores would exchange experts whose scores lie close together.
    """
    return jnp.einsum(
        "...d,ed->...e",
        x,
        router,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def route(
    experts: Experts, layer: Params, x: jax.Array, routed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Choose the experts of each token: weights float32 [N, k] and indices int32 [N, k].

    Args:
        layer: ``router`` [E, D], and perhaps ``router_bias``, ``router_correction`` and
            ``router_factors`` [E].
        x: inputs of the router, [N, D].
        routed: [N, k], experts to take instead; a token of -1 chooses its own.
    """
    probabilities = PROBABILITIES[experts.scoring](_scores(layer, x))
    chosen = _choose(experts, layer, probabilities, routed)
    weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if experts.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _LEAST_SUM)
    if experts.weight_factors:
        weights = weights * layer["router_factors"].astype(jnp.float32)[chosen]
    return weights * experts.scale, chosen


def _choose(
    experts: Experts, layer: Params, probabilities: jax.Array, routed: jax.Array | None
) -> jax.Array:
    """Return the experts int32 [.., k] of tokens with these probabilities [.., E].

    Args:
        routed: [.., k], see :func:`route`.
    """
    ranking = probabilities
    if experts.correction:
        ranking = ranking + layer["router_correction"]
    if experts.groups > experts.groups_per_token:
        ranking = jnp.where(_is_in_chosen_group(experts, ranking), ranking, -jnp.inf)
    _, chosen = jax.lax.top_k(ranking, experts.per_token)
    if routed is None:
        return chosen
    return jnp.where(routed < 0, chosen, routed.astype(chosen.dtype))


def _is_in_chosen_group(experts: Experts, ranking: jax.Array) -> jax.Array:
    """Return which experts [.., E] are in one of the token's groups."""
    grouped = ranking.reshape(*ranking.shape[:-1], experts.groups, -1)
    best_two, _ = jax.lax.top_k(grouped, 2)
    _, chosen_groups = jax.lax.top_k(jnp.sum(best_two, axis=-1), experts.groups_per_token)
    is_chosen = jnp.any(jax.nn.one_hot(chosen_groups, experts.groups, dtype=bool), axis=-2)
    return jnp.repeat(is_chosen, experts.count // experts.groups, axis=-1)


def router_inputs(config: DecoderConfig, norm: jax.Array, x: jax.Array) -> jax.Array:
    """Return what a router with a norm of its own reads of the residual stream x [.., D], float32.

    Args:
        norm: ``router_norm`` [D].
    """
    return rms_norm(config, x.astype(jnp.float32), norm) * config.hidden_size**-0.5


def shared_expert_weight(router: jax.Array, x: jax.Array) -> jax.Array:
    """Return the weight [.., 1] of a gated shared expert for x [.., D].

    Args:
        router: ``shared_router`` [1, D].
    """
    return jax.nn.sigmoid(_float32_product(x, router)).astype(x.dtype)


def router_load(
    experts: Experts,
    layer: Params,
    x: jax.Array,
    copies: jax.Array,
    routed: jax.Array | None = None,
) -> jax.Array:
    """Compute the load of each expert, for :func:`load_balancing_loss`.

    Args:
        layer: see :func:`route`.
        x: inputs of the router, [B, T, D].
        copies: int32 [B, T], how often each token counts.
        routed: [B, T, k], see :func:`route`.

    Returns:
        float32 [2, E]: tokens that chose an expert (without gradient), and the sum of its shares of
            the softmax of the scores. Probabilities of ``scoring="sigmoid"`` add up to no constant:
            to push them all down would lower the loss and balance nothing.
    """
    scores = _scores(layer, x)
    chosen = _choose(experts, layer, PROBABILITIES[experts.scoring](scores), routed)

    choices = jnp.sum(jax.nn.one_hot(chosen, experts.count), axis=2)
    weights = copies.astype(jnp.float32)
    summands = jnp.stack([jax.lax.stop_gradient(choices), jax.nn.softmax(scores)])
    return jnp.einsum("bt,sbte->se", weights, summands)


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
    routed: jax.Array | None = None,
    *,
    router_x: jax.Array | None = None,
    transposed: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Apply each token's experts, weighted: [N, D] -> [N, D] and the choices int32 [N, k].

    Args:
        layer: the router's parameters (:func:`route`), ``expert_gate`` and ``expert_up`` [E, F, D],
            ``expert_down`` [E, D, F]; and a bias ``…_bias`` [E, out] of each, or none.
        routed: [N, k], see :func:`route`.
        router_x: inputs of the router, [N, D]; None for ``x``.
        transposed: the experts' matrices are [E, in, out].
    """
    if router_x is None:
        router_x = x
    weights, chosen = route(experts, layer, router_x, routed)
    return weighted_outputs(layer, x, weights, chosen, activation, transposed=transposed), chosen


def sharded_mixture_of_experts(
    experts: Experts,
    layer: Params,
    x: jax.Array,
    activation: Activation,
    mesh: Mesh,
    routed: jax.Array | None = None,
    *,
    router_x: jax.Array | None = None,
) -> jax.Array:
    """Apply :func:`mixture_of_experts` to [B, T, D], rows and tokens split over the mesh.

    Args:
        routed: [B, T, k], see :func:`route`.
        router_x: inputs of the router, [B, T, D]; None for ``x``.
    """
    if router_x is None:
        router_x = x
    experts_per_shard = experts.count // mesh.shape["expert"]

    def gather(name: str, weight: jax.Array) -> jax.Array:
        """Return a parameter whose axis over ``fsdp`` is whole, if it has one."""
        spec = WEIGHTS[name]
        if "fsdp" not in spec:
            return weight
        return jax.lax.all_gather(weight, "fsdp", axis=spec.index("fsdp"), tiled=True)

    def shard(
        layer: Params, x: jax.Array, router_x: jax.Array, routed: jax.Array | None
    ) -> jax.Array:
        layer = {name: gather(name, weight) for name, weight in layer.items()}
        layer = _bias_on_one_shard(layer)
        tokens = x.reshape(-1, x.shape[-1])
        if routed is not None:
            routed = routed.reshape(-1, experts.per_token)
        weights, chosen = route(experts, layer, router_x.reshape(tokens.shape), routed)

        tokens = jax.lax.all_gather(tokens, "expert", tiled=True)
        weights = jax.lax.all_gather(weights, "expert", tiled=True)
        chosen = jax.lax.all_gather(chosen, "expert", tiled=True)
        chosen = _shard_indices(chosen, experts_per_shard)
        mixed = weighted_outputs(layer, tokens, weights, chosen, activation)
        mixed = jax.lax.psum_scatter(mixed, "expert", tiled=True)
        return jax.lax.psum(mixed, "tensor").reshape(x.shape)

    token_spec = PartitionSpec(ROWS, "context", None)
    weight_specs = {name: WEIGHTS[name] for name in layer}
    run = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(weight_specs, token_spec, token_spec, token_spec),
        out_specs=token_spec,
        check_vma=False,
    )
    return run(layer, x, router_x, routed)


def replicated_mixture_of_experts(
    experts: Experts,
    layer: Params,
    x: jax.Array,
    activation: Activation,
    mesh: Mesh,
    *,
    router_x: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Apply :func:`mixture_of_experts` with matrices [E, in, out] to [N, D] that is replicated.

    Experts are split over ``expert`` and their hidden units over ``tensor``; devices all-reduce
    their parts.

    Args:
        router_x: inputs of the router, [N, D]; None for ``x``.
    """
    if router_x is None:
        router_x = x
    experts_per_shard = experts.count // mesh.shape["expert"]

    def shard(layer: Params, x: jax.Array, router_x: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights, chosen = route(experts, layer, router_x)
        layer = _bias_on_one_shard(layer)
        shard_chosen = _shard_indices(chosen, experts_per_shard)
        mixed = weighted_outputs(layer, x, weights, shard_chosen, activation, transposed=True)
        return jax.lax.psum(mixed, ("expert", "tensor")), chosen

    weights = {name: layer[name] for name in WEIGHTS if name in layer}
    specs = {}
    for name, weight in weights.items():
        specs[name] = split_weight(weight, _transposed_spec(WEIGHTS[name]))
    run = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return run(weights, x, router_x)


def _bias_on_one_shard(layer: Params) -> Params:
    """Keep ``expert_down_bias`` on one shard of ``tensor`` only, as outputs are summed over it."""
    if "expert_down_bias" not in layer:
        return layer
    bias = layer["expert_down_bias"]
    return layer | {"expert_down_bias": jnp.where(jax.lax.axis_index("tensor") == 0, bias, 0)}


def _shard_indices(chosen: jax.Array, count: int) -> jax.Array:
    """Return indices among the ``count`` experts of this shard, ``count`` for all other experts."""
    chosen = chosen - jax.lax.axis_index("expert") * count
    return jnp.where((chosen >= 0) & (chosen < count), chosen, count)


def _transposed_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return the spec of matrices [E, in, out], given the spec of [E, out, in]; others stay."""
    if len(spec) != 3:
        return spec
    return PartitionSpec(spec[0], spec[2], spec[1])


def transpose_matrices(weight: Any) -> Any:
    """Swap the last two axes of matrices, quantized or not."""
    return jax.tree.map(lambda x: x.swapaxes(-1, -2), weight)


def weighted_outputs(
    layer: Params,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    activation: Activation,
    *,
    transposed: bool = False,
) -> jax.Array:
    """Return the weighted outputs [N, D] of the chosen experts [N, k].

    An index past the last expert adds nothing.
    """
    order = jnp.argsort(chosen.reshape(-1), stable=True)  # [N k] choices, by expert
    count = layer["expert_gate"].shape[0]
    sizes = jnp.bincount(chosen.reshape(-1), length=count)
    expert = chosen.reshape(-1)[order]

    # Rows past the last group of a grouped product are undefined, forward and backward: they have
    # no token, weight and bias, and so no gradient.
    has_expert = expert < count
    token = jnp.where(has_expert, order // chosen.shape[1], len(x))
    weights = jnp.where(has_expert, weights.reshape(-1)[order], 0)[:, None].astype(x.dtype)

    def product(rows: jax.Array, name: str, bias_weights: jax.Array | int = 1) -> jax.Array:
        out = grouped_product(rows, layer[name], sizes, expert, transposed=transposed)
        bias = layer.get(f"{name}_bias")
        if bias is None:
            return out
        return out + bias.at[expert].get(mode="fill", fill_value=0) * bias_weights

    grouped = x.at[token].get(mode="fill", fill_value=0)
    gate = product(grouped, "expert_gate")
    up = product(grouped, "expert_up")
    hidden = activation(gate, up)
    zeros = jnp.zeros_like(x)
    # Weighted before the last product, where rows are shortest.
    outputs = product(hidden * weights, "expert_down", weights)
    return zeros.at[token].add(outputs, mode="drop")


TILE_ROWS = 512
"""Rows of the operands in a tile of the kernel."""
TILE_COLUMNS = 1024
"""Most of each dimension of the result in a tile of the kernel."""


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
        return ragged_product(x, weight, sizes)

    if not transposed:
        weight = transpose_matrices(weight)
    if isinstance(weight, jax.Array):
        return _product(x, weight, sizes, transposed=True)
    out = _product(x, weight.numbers.astype(x.dtype), sizes, transposed=True)
    return out * weight.scale[:, 0].at[group].get(mode="clip").astype(x.dtype)


@jax.custom_vjp
def ragged_product(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply as :func:`grouped_product` does, with matrices that are trained."""
    return _product(x, weight, sizes, transposed=False)


def _forward(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return ragged_product(x, weight, sizes), (x, weight, sizes)


def _backward(saved: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weight, sizes = saved
    d_weight = by_platform(
        d_out,
        x,
        sizes,
        tpu=_outer_kernel,
        cuda=grouped_kernel_cuda.outer if grouped_kernel_cuda.supports_outer(d_out, x) else None,
        default=ragged_outer,
    )
    d_x = _product(d_out, weight, sizes, transposed=True)
    return d_x, d_weight.astype(weight.dtype), None


ragged_product.defvjp(_forward, _backward)


def _product(x: jax.Array, weight: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """Multiply as :func:`grouped_product` does."""
    kernel = None
    if grouped_kernel_cuda.supports(x, weight):
        kernel = functools.partial(grouped_kernel_cuda.product, transposed=transposed)
    return by_platform(
        x,
        weight,
        sizes,
        cuda=kernel,
        default=functools.partial(ragged_dot, transposed=transposed),
    )


def ragged_dot(x: jax.Array, weight: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """Compute a grouped product with XLA's operation."""
    if not transposed:
        weight = weight.swapaxes(1, 2)
    return jax.lax.ragged_dot(x, weight, sizes)


def ragged_outer(d_out: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sum the outer products of rows [N, out] and [N, in] by group -> [E, out, in]."""
    contract_rows = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(),
    )
    return jax.lax.ragged_dot_general(d_out, x, sizes, contract_rows)


def _outer_kernel(d_out: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Compute :func:`ragged_outer` with Megablox' kernel."""
    d_out = _pad_to_tiles(d_out)
    x = _pad_to_tiles(x)
    tiling = (TILE_ROWS, min(TILE_COLUMNS, d_out.shape[1]), min(TILE_COLUMNS, x.shape[1]))
    return tgmm(d_out.T, x, sizes, preferred_element_type=x.dtype, tiling=tiling)


def _pad_to_tiles(rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, ((0, -len(rows) % TILE_ROWS), (0, 0)))
