"""Mixture of experts without dropped tokens.

Tokens are sorted by expert, for one grouped product per matrix. On a mesh each shard of the axis
``expert`` holds its own experts::

    shard's tokens ─► all-gather over ``expert`` ─► shard's experts ─► sum-scatter back
                                                    (choices of other experts sorted to the end)

The choices may be given (router replay, ``types.routed_experts``): weights and gradients are
then those of the layer's own scores over the given experts.

No token is dropped. A shard has the tokens of its ``expert`` neighbours for one layer, [N X, D] for
X shards, and on average 1 in X of their N k X choices. It computes its choices in passes of a fixed
number of rows, :data:`PASS_SHARE` times the average: one pass, unless more fall on the shard.

An engine's grouped product is ``jax.lax.ragged_dot``, for which libtpu has a kernel. That kernel
reads matrices [E, in, out] alone, so that a learner's, which are read both ways, would be
transposed once per pass; and its gradient with respect to the weights becomes a masked product of
all rows for every group. On TPUs the learner has the kernel of ``models.grouped_kernel`` and
Megablox' ``tgmm``, which reads each row once; matrices that would need too large blocks, such as
gpt-oss' of 2,880 x 2,880, are left to ``ragged_dot``. XLA's CUDA compiler makes masked products of
all three: GPUs have the kernels of ``models.grouped_kernel_cuda``.

Shapes: N tokens, D hidden, E experts, F an expert's hidden size, k experts per token, X shards of
the axis ``expert``, C rows of a pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jax.sharding import Mesh, PartitionSpec

from jax_agent_rl.models import grouped_kernel, grouped_kernel_cuda
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
        mixed = outputs_in_passes(
            layer, tokens, weights, chosen, activation, shards=mesh.shape["expert"]
        )
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


class _ByExpert(NamedTuple):
    """Choices of experts, sorted by expert; the ones of other shards are last.

    Attributes:
        order: int32 [N k], indices of the choices.
        token: int32 [N k], their tokens; N for choices of other shards.
        expert: int32 [N k], their experts.
        ends: int32 [E], where each expert's choices end.
    """

    order: jax.Array
    token: jax.Array
    expert: jax.Array
    ends: jax.Array

    def rows(self, start: jax.Array, count: int) -> _Rows:
        """Return some choices in their order."""
        expert = jax.lax.dynamic_slice_in_dim(self.expert, start, count)
        token = jax.lax.dynamic_slice_in_dim(self.token, start, count)
        ends = jnp.clip(self.ends - start, 0, count)
        return _Rows(token=token, expert=expert, sizes=jnp.diff(ends, prepend=0))


class _Rows(NamedTuple):
    """Rows of grouped products.

    Rows past the last group of a grouped product are undefined, forward and backward: they have no
    token.

    Attributes:
        token: int32 [C].
        expert: int32 [C].
        sizes: int32 [E], rows of each expert.
    """

    token: jax.Array
    expert: jax.Array
    sizes: jax.Array

    def gather(self, x: jax.Array) -> jax.Array:
        """Return the rows [C, D] of tokens [N, D]; any where there is no token."""
        return _gather(len(x), x, self.token)

    def add(self, x: jax.Array, rows: jax.Array) -> jax.Array:
        """Add rows [C, D] to those of their tokens [N, D]."""
        return x.at[self.token].add(rows, mode="drop")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(num_tokens: int, x: jax.Array, token: jax.Array) -> jax.Array:
    """Return rows [C, D] of x [N, D]; any for a token of N.

    Zeros would be written in another pass over all rows. Their gradients are dropped, where JAX
    would add them to the last token's.

    Args:
        num_tokens: N, of which the gradient needs to know.
    """
    del num_tokens
    return x.at[token].get(mode="clip")


def _gather_forward(num_tokens: int, x: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gather(num_tokens, x, token), token


def _gather_backward(
    num_tokens: int, token: jax.Array, d_rows: jax.Array
) -> tuple[jax.Array, None]:
    zeros = jnp.zeros((num_tokens, *d_rows.shape[1:]), d_rows.dtype)
    return zeros.at[token].add(d_rows, mode="drop"), None


_gather.defvjp(_gather_forward, _gather_backward)


def _sort_by_expert(chosen: jax.Array, count: int, padding: int = 0) -> _ByExpert:
    """Sort choices [N, k] of ``count`` experts; an index past the last one is another shard's.

    Args:
        padding: choices without a token that are added at the end.
    """
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    expert = chosen.reshape(-1)[order]
    token = jnp.where(expert < count, order // chosen.shape[1], len(chosen))
    sizes = jnp.bincount(chosen.reshape(-1), length=count)
    return _ByExpert(
        order=order,
        token=jnp.pad(token, (0, padding), constant_values=len(chosen)),
        expert=jnp.pad(expert, (0, padding), constant_values=count),
        ends=jnp.cumsum(sizes, dtype=jnp.int32),
    )


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
    choices = _sort_by_expert(chosen, layer["expert_gate"].shape[0])
    rows = choices.rows(jnp.int32(0), chosen.size)
    weights = weights.reshape(-1)[choices.order]
    outputs = _row_outputs(layer, rows.gather(x), weights, rows, activation, transposed=transposed)
    return rows.add(jnp.zeros_like(x), outputs)


def _row_outputs(
    layer: Params,
    x: jax.Array,
    weights: jax.Array,
    rows: _Rows,
    activation: Activation,
    *,
    transposed: bool = False,
) -> jax.Array:
    """Return the weighted outputs [C, D] of each row's expert.

    Args:
        x: [C, D].
        weights: float32 [C].
    """
    has_expert = rows.expert < len(rows.sizes)  # no other weight or bias has a gradient
    weights = jnp.where(has_expert, weights, 0)[:, None].astype(x.dtype)

    def products(x: jax.Array, *names: str, bias_weights: jax.Array | int = 1) -> list[jax.Array]:
        matrices = [layer[name] for name in names]
        outputs = grouped_products(x, matrices, rows.sizes, rows.expert, transposed=transposed)
        for index, name in enumerate(names):
            bias = layer.get(f"{name}_bias")
            if bias is not None:
                row_bias = bias.at[rows.expert].get(mode="fill", fill_value=0)
                outputs[index] += row_bias * bias_weights
        return outputs

    gate, up = products(x, "expert_gate", "expert_up")
    hidden = activation(gate, up)
    # Weighted before the last product, where rows are shortest.
    (outputs,) = products(hidden * weights, "expert_down", bias_weights=weights)
    return outputs


PASS_SHARE = 1.25
"""Rows of a pass, in multiples of a shard's average."""


def outputs_in_passes(
    layer: Params,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    activation: Activation,
    *,
    shards: int,
) -> jax.Array:
    """Return the :func:`weighted_outputs` of the experts of one of so many shards."""
    if shards == 1:
        return weighted_outputs(layer, x, weights, chosen, activation)
    count = math.ceil(chosen.size / shards * PASS_SHARE)
    count = min(count + -count % TILE_ROWS, chosen.size)
    matrices = {name: weight for name, weight in layer.items() if name.startswith("expert_")}
    return _outputs_in_passes(activation, count, matrices, x, weights, chosen)


# Its length depends on the choices: a loop that JAX cannot differentiate.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _outputs_in_passes(
    activation: Activation,
    count: int,
    layer: Params,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
) -> jax.Array:
    """Return :func:`weighted_outputs`.

    Args:
        count: C.
    """
    choices, sorted_weights, passes = _plan_passes(layer, weights, chosen, count)

    def add_pass(number: jax.Array, outputs: jax.Array) -> jax.Array:
        start = number * count
        rows = choices.rows(start, count)
        row_weights = jax.lax.dynamic_slice_in_dim(sorted_weights, start, count)
        return rows.add(outputs, _row_outputs(layer, rows.gather(x), row_weights, rows, activation))

    return jax.lax.fori_loop(0, passes, add_pass, jnp.zeros_like(x))


def _plan_passes(
    layer: Params, weights: jax.Array, chosen: jax.Array, count: int
) -> tuple[_ByExpert, jax.Array, jax.Array]:
    """Return the sorted choices and their weights, padded to whole passes, and how many to take."""
    padding = -chosen.size % count
    choices = _sort_by_expert(chosen, layer["expert_gate"].shape[0], padding)
    sorted_weights = jnp.pad(weights.reshape(-1)[choices.order], (0, padding))
    passes = (choices.ends[-1] + count - 1) // count
    return choices, sorted_weights, passes


def _passes_forward(
    activation: Activation,
    count: int,
    layer: Params,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
) -> tuple[Any, Any]:
    outputs = _outputs_in_passes(activation, count, layer, x, weights, chosen)
    return outputs, (layer, x, weights, chosen)


def _passes_backward(
    activation: Activation, count: int, saved: Any, d_outputs: jax.Array
) -> tuple[Params, jax.Array, jax.Array, None]:
    layer, x, weights, chosen = saved
    choices, sorted_weights, passes = _plan_passes(layer, weights, chosen, count)

    def add_pass(number: jax.Array, gradients: Any) -> Any:
        start = number * count
        rows = choices.rows(start, count)
        row_weights = jax.lax.dynamic_slice_in_dim(sorted_weights, start, count)

        def outputs(layer: Params, x: jax.Array, weights: jax.Array) -> jax.Array:
            return _row_outputs(layer, x, weights, rows, activation)

        _, pull = jax.vjp(outputs, layer, rows.gather(x), row_weights)
        pass_d_layer, d_rows, d_row_weights = pull(rows.gather(d_outputs))

        d_layer, d_x, d_weights = gradients
        d_layer = jax.tree.map(jnp.add, d_layer, pass_d_layer)
        d_x = rows.add(d_x, d_rows)
        d_weights = jax.lax.dynamic_update_slice_in_dim(d_weights, d_row_weights, start, axis=0)
        return d_layer, d_x, d_weights

    zeros = jax.tree.map(jnp.zeros_like, (layer, x, sorted_weights))
    d_layer, d_x, d_sorted_weights = jax.lax.fori_loop(0, passes, add_pass, zeros)
    d_weights = jnp.zeros(weights.size, weights.dtype)
    d_weights = d_weights.at[choices.order].set(
        d_sorted_weights[: weights.size], unique_indices=True
    )
    return d_layer, d_x, d_weights.reshape(weights.shape), None


_outputs_in_passes.defvjp(_passes_forward, _passes_backward)


TILE_ROWS = 512
"""Rows of the operands in a tile of the kernel."""
TILE_COLUMNS = 1024
"""Most of each dimension of the result in a tile of the kernel."""


def grouped_product(
    x: jax.Array, weight: Any, sizes: jax.Array, group: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Multiply each row of x [N, in] with the matrix of its group -> [N, out].

    Arguments as for :func:`grouped_products`.
    """
    (out,) = grouped_products(x, [weight], sizes, group, transposed=transposed)
    return out


def grouped_products(
    x: jax.Array,
    weights: Sequence[Any],
    sizes: jax.Array,
    group: jax.Array,
    *,
    transposed: bool = False,
) -> list[jax.Array]:
    """Multiply each row of x [N, in] with several matrices of its group -> [N, out] of each.

    Args:
        x: rows ordered by group.
        weights: matrices [E, out, in], quantized (``models.layers``) or not.
        sizes: int32 [E], rows of each group.
        group: int32 [N], group of each row; rows past the last group are undefined, forward and
            backward.
        transposed: matrices are [E, in, out], which libtpu's kernel reads as they are: an engine
            keeps them so.
    """
    is_quantized = not isinstance(weights[0], jax.Array)
    if not transposed and not is_quantized:
        return list(ragged_products(x, tuple(weights), sizes))

    products = []
    for weight in weights:
        if not transposed:
            weight = transpose_matrices(weight)
        if is_quantized:
            out = _product(x, weight.numbers.astype(x.dtype), sizes)
            out *= weight.scale[:, 0].at[group].get(mode="clip").astype(x.dtype)
        else:
            out = _product(x, weight, sizes)
        products.append(out)
    return products


@jax.custom_vjp
def ragged_products(
    x: jax.Array, weights: tuple[jax.Array, ...], sizes: jax.Array
) -> tuple[jax.Array, ...]:
    """Multiply as :func:`grouped_products` does, with matrices that are trained."""
    products = []
    for weight in weights:
        products.append(_sum_of_products((x,), (weight,), sizes, transposed=False))
    return tuple(products)


def _forward(
    x: jax.Array, weights: tuple[jax.Array, ...], sizes: jax.Array
) -> tuple[tuple[jax.Array, ...], Any]:
    return ragged_products(x, weights, sizes), (x, weights, sizes)


def _backward(
    saved: Any, d_products: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...], None]:
    x, weights, sizes = saved
    d_weights = []
    for weight, d_product in zip(weights, d_products, strict=True):
        cuda_outer = None
        if grouped_kernel_cuda.supports_outer(d_product, x):
            cuda_outer = grouped_kernel_cuda.outer
        d_weight = by_platform(
            d_product, x, sizes, tpu=_outer_kernel, cuda=cuda_outer, default=ragged_outer
        )
        d_weights.append(d_weight.astype(weight.dtype))
    d_x = _sum_of_products(d_products, weights, sizes, transposed=True)
    return d_x, tuple(d_weights), None


ragged_products.defvjp(_forward, _backward)


def _sum_of_products(
    xs: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    sizes: jax.Array,
    *,
    transposed: bool,
) -> jax.Array:
    """Multiply rows [N, in] of each x with the matrices of their groups, and add -> [N, out].

    Args:
        weights: matrices [E, out, in] for each x, or, if ``transposed``, [E, in, out].
    """
    tpu_products = None
    if grouped_kernel.supports(xs, weights, transposed=transposed):
        tpu_products = functools.partial(_tpu_products, transposed=transposed)
    cuda_products = None
    if all(map(grouped_kernel_cuda.supports, xs, weights)):
        cuda_products = functools.partial(
            _add_products, grouped_kernel_cuda.product, transposed=transposed
        )
    return by_platform(
        xs,
        weights,
        sizes,
        tpu=tpu_products,
        cuda=cuda_products,
        default=functools.partial(_add_products, ragged_dot, transposed=transposed),
    )


def _add_products(
    product: Callable[..., jax.Array],
    xs: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    sizes: jax.Array,
    **options: bool,
) -> jax.Array:
    """Return the sum of the products of each x and its matrices.

    Args:
        product: computes one of them, with these options.
    """
    products = []
    for x, weight in zip(xs, weights, strict=True):
        products.append(product(x, weight, sizes, **options))
    return functools.reduce(jnp.add, products)


def _tpu_products(
    xs: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    sizes: jax.Array,
    *,
    transposed: bool,
) -> jax.Array:
    padded = tuple(_pad_to_tiles(x) for x in xs)
    products = grouped_kernel.sum_of_products(
        padded, weights, sizes, tile_rows=TILE_ROWS, transposed=transposed
    )
    return products[: len(xs[0])]


def _product(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply rows [N, in] with the matrices [E, in, out] of their groups: not trained ones."""
    kernel = None
    if grouped_kernel_cuda.supports(x, weight):
        kernel = functools.partial(grouped_kernel_cuda.product, transposed=True)
    return by_platform(
        x, weight, sizes, cuda=kernel, default=functools.partial(ragged_dot, transposed=True)
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
