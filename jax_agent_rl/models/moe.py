"""Mixture of experts without dropped tokens: tokens sorted by expert, one grouped product per matrix.

On a mesh each shard of the axis ``expert`` holds its own experts::

    own tokens ─► all-gather over expert ─► own experts only (others sorted to the end) ─► sum-scatter back

No token is dropped and there is no capacity factor; a shard holds the tokens of its ``expert`` neighbours for one
layer, [N k X, D] for X shards, and computes only its own.

Shapes: N tokens, D hidden, E experts, F an expert's hidden size, k experts per token, X shards of the axis ``expert``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_agent_rl.models.config import Experts, Params
from jax_agent_rl.models.mesh import ROWS
from jax_agent_rl.models.quantized import grouped_product, split_weight

Activation = Callable[[jax.Array], jax.Array]

WEIGHTS = {  # as in ``models.sharding``, without the axis of layers
    "router": PartitionSpec(None, "fsdp"),
    "expert_gate": PartitionSpec("expert", "tensor", "fsdp"),
    "expert_up": PartitionSpec("expert", "tensor", "fsdp"),
    "expert_down": PartitionSpec("expert", "fsdp", "tensor"),
}


def route(experts: Experts, router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Choose the experts of each token: weights float32 [N, k] and indices int32 [N, k]."""
    scores = jnp.einsum("nd,ed->ne", x, router)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), experts.per_token)
    if experts.normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def router_load(experts: Experts, router: jax.Array, x: jax.Array, copies: jax.Array) -> jax.Array:
    """Compute the load of each expert, for :func:`load_balancing_loss`.

    Args:
        experts: the mixture.
        router: [E, D].
        x: inputs of the router, [B, T, D].
        copies: int32 [B, T], how often each token counts.

    Returns:
        float32 [2, E]: tokens that chose an expert (without gradient), and the sum of its probabilities.
    """
    scores = jnp.einsum("btd,ed->bte", x, router)
    probabilities = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
    _, chosen = jax.lax.top_k(probabilities, experts.per_token)
    picked = jnp.sum(jax.nn.one_hot(chosen, experts.count), axis=2)
    weights = copies.astype(jnp.float32)
    return jnp.einsum("bt,sbte->se", weights, jnp.stack([jax.lax.stop_gradient(picked), probabilities]))


def load_balancing_loss(probabilities: jax.Array, share: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return ``E sum_e f_e P_e`` (Fedus et al. 2021, Switch Transformers, arXiv 2101.03961, eq. 4).

    Args:
        probabilities: float32 [E], each expert's probability summed over some of the tokens and all layers.
        share: float32 [E], f: the fraction of *all* tokens (of all layers) that chose an expert.
        tokens: float32 [], all tokens times layers.

    Returns:
        These tokens' part of the loss, float32 []; the parts of a batch add up however it is split.
    """
    return len(share) * jnp.sum(share * probabilities) / tokens


def mixture_of_experts(experts: Experts, layer: Params, x: jax.Array, activation: Activation) -> jax.Array:
    """Apply each token's experts, weighted, [N, D] -> [N, D].

    Args:
        experts: the mixture.
        x: tokens.
        activation: of the gate.
        layer: ``router`` [E, D], ``expert_gate`` and ``expert_up`` [E, F, D], ``expert_down`` [E, D, F].
    """
    return _weighted(layer, x, *route(experts, layer["router"], x), activation)


def sharded_mixture_of_experts(
    experts: Experts, layer: Params, x: jax.Array, activation: Activation, mesh: Mesh
) -> jax.Array:
    """Apply :func:`mixture_of_experts` to [B, T, D], with rows and tokens split over the mesh."""
    here = experts.count // mesh.shape["expert"]

    def shard(layer: Params, x: jax.Array) -> jax.Array:
        layer = {
            name: jax.lax.all_gather(weight, "fsdp", axis=WEIGHTS[name].index("fsdp"), tiled=True)
            for name, weight in layer.items()
        }
        flat = x.reshape(-1, x.shape[-1])
        own = (flat, *route(experts, layer["router"], flat))
        tokens, weights, chosen = (jax.lax.all_gather(part, "expert", tiled=True) for part in own)
        mixed = _weighted(layer, tokens, weights, _own(chosen, here), activation)
        mixed = jax.lax.psum_scatter(mixed, "expert", tiled=True)
        return jax.lax.psum(mixed, "tensor").reshape(x.shape)

    tokens = PartitionSpec(ROWS, "context", None)
    run = jax.shard_map(shard, mesh=mesh, in_specs=(WEIGHTS, tokens), out_specs=tokens, check_vma=False)
    return run({name: layer[name] for name in WEIGHTS}, x)


def replicated_mixture_of_experts(
    experts: Experts, layer: Params, x: jax.Array, activation: Activation, mesh: Mesh
) -> jax.Array:
    """Apply :func:`mixture_of_experts` to [N, D] that is replicated.

    Experts are split over ``expert`` and their hidden units over ``tensor``; devices all-reduce their parts.
    """
    here = experts.count // mesh.shape["expert"]

    def shard(layer: Params, x: jax.Array) -> jax.Array:
        weights, chosen = route(experts, layer["router"], x)
        chosen = _own(chosen, here)
        return jax.lax.psum(_weighted(layer, x, weights, chosen, activation), ("expert", "tensor"))

    weights = {name: layer[name] for name in WEIGHTS}
    specs = {name: split_weight(layer[name], spec) for name, spec in WEIGHTS.items()}
    run = jax.shard_map(shard, mesh=mesh, in_specs=(specs, PartitionSpec()), out_specs=PartitionSpec(), check_vma=False)
    return run(weights, x)


def _own(chosen: jax.Array, here: int) -> jax.Array:
    """Return indices among the ``here`` experts of this shard; ``here`` for other shards' experts."""
    chosen = chosen - jax.lax.axis_index("expert") * here
    return jnp.where((chosen >= 0) & (chosen < here), chosen, here)


def _weighted(layer: Params, x: jax.Array, weights: jax.Array, chosen: jax.Array, activation: Activation) -> jax.Array:
    """Return the weighted outputs [N, D] of the chosen experts [N, k]; an index past the last adds nothing."""
    order = jnp.argsort(chosen.reshape(-1), stable=True)  # [N k] places, by expert
    token = order // chosen.shape[1]
    count = layer["expert_gate"].shape[0]
    sizes = jnp.bincount(chosen.reshape(-1), length=count)
    expert = chosen.reshape(-1)[order]
    # Rows past the last group of a grouped product are undefined, forward and backward: mask twice.
    present = (expert < count)[:, None]
    grouped = jnp.where(present, x[token], 0)

    def product(values: jax.Array, weight: Any) -> jax.Array:
        return grouped_product(values, weight, sizes, expert)

    hidden = activation(product(grouped, layer["expert_gate"])) * product(grouped, layer["expert_up"])
    outputs = product(hidden, layer["expert_down"]) * weights.reshape(-1)[order, None].astype(x.dtype)
    return jnp.zeros_like(x).at[token].add(jnp.where(present, outputs, 0))
