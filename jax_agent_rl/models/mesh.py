"""The device mesh as the models see it: which axes split rows, tokens, heads and experts.

Most of a model needs no word about it: parameters and batch arrays lie on the mesh (``learner.sharding``), and XLA
splits the rest. Only where tokens meet, attention over a row and the experts' exchange, is it said shard by shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jax_agent_rl.errors import ConfigError

# From the slowest to the fastest link: neighbouring devices, which exchange most, differ in the last axis.
MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
ROWS = ("data", "fsdp", "expert")
"""Axes that split the rows of a batch."""


Device = Any
"""A ``jax.Device``; jaxlib ships no types."""


def place_mesh(shape: Sequence[int], devices: Sequence[Device], *, key: str) -> Mesh:
    """A mesh of all of ``MESH_AXES`` that goes along the links between its devices.

    Args:
        shape: sizes of the axes. Of devices on several slices of TPUs, each slice gets as much of the first.
        key: of the configuration, for messages.

    Raises:
        ConfigError: its devices are no block of a slice, or an axis does not go along its links.
    """
    types = (AxisType.Auto,) * len(shape)
    slices = len({getattr(device, "slice_index", None) for device in devices})
    asked = ", ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, shape, strict=True) if size > 1)
    try:
        if slices == 1:
            return jax.make_mesh(tuple(shape), MESH_AXES, axis_types=types, devices=devices)
        within, between = (shape[0] // slices, *shape[1:]), (slices, *(1 for _ in shape[1:]))
        return Mesh(create_hybrid_device_mesh(within, between, devices), MESH_AXES, axis_types=types)
    except NotImplementedError:  # jax gives an axis whole dimensions of a large slice
        raise ConfigError(
            f"{key} asks for {asked}, which jax cannot place on the links of these {len(devices)} chips; make each "
            "axis a product of the slice's dimensions"
        ) from None
    except AssertionError:  # jax's way to say that the chips' coordinates leave holes
        raise ConfigError(
            f"{key} asks for {asked} = {len(devices)} chips, but the next {len(devices)} of this slice are no block of "
            "it without holes; take 1, whole rows of the slice, or all"
        ) from None


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
