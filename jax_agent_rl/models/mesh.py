"""The device mesh as the models see it: which axes split rows, tokens, heads and experts.

Most of a model needs no word about it: parameters and batch arrays lie on the mesh (``learner.sharding``), and XLA
splits the rest. Only where tokens meet, attention over a row and the experts' exchange, is it said shard by shard.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

# From the slowest to the fastest link: neighbouring devices, which exchange most, differ in the last axis.
MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
ROWS = ("data", "fsdp", "expert")
"""Axes that split the rows of a batch."""


Device = Any
"""A ``jax.Device``; jaxlib ships no types."""

Bounds = tuple[tuple[int, int], ...]
"""Begin and end of a part of an array, in every dimension."""


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Of a shard, as shardings name them."""
    return tuple(at.indices(size)[:2] for at, size in zip(index, shape, strict=True))


def local_bounds(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Bounds]:
    """What each device of this process holds of an array."""
    shards = sharding.devices_indices_map(shape)
    return {
        device: bounds_of(index, shape) for device, index in shards.items() if device in sharding.addressable_devices
    }


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """``x`` with its dimensions split over mesh axes; as it is without a mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))
