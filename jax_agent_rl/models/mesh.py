"""Devices as the models see them: the axes of the mesh, and kernels of a platform.

Parameters and batch arrays are sharded on the mesh (``models.sharding``) and XLA partitions most of a model. Only
attention over a row and the experts' exchange are written per shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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

_T = TypeVar("_T")
_described_tpus = False


def place_mesh(shape: Sequence[int], devices: Sequence[Device], *, key: str) -> Mesh:
    """Make a mesh of all of ``MESH_AXES`` that follows the links between its devices.

    Args:
        shape: sizes of the axes; several TPU slices share the first one equally.
        devices: the devices.
        key: the configuration key, for messages.

    Raises:
        ConfigError: the devices are no block of a slice, or an axis does not follow its links.
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
    except AssertionError:  # raised by jax if the chips' coordinates leave holes
        raise ConfigError(
            f"{key} asks for {asked} = {len(devices)} chips, but the next {len(devices)} of this slice are no block of "
            "it without holes; take 1, whole rows of the slice, or all"
        ) from None


Bounds = tuple[tuple[int, int], ...]
"""Begin and end of a part of an array, in every dimension."""


def shard_bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Return the bounds of a shard, given by its index."""
    return tuple(at.indices(size)[:2] for at, size in zip(index, shape, strict=True))


def local_bounds(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Bounds]:
    """Return the bounds that each device of this process holds of an array."""
    shards = sharding.devices_indices_map(shape)
    return {
        device: shard_bounds(index, shape) for device, index in shards.items() if device in sharding.addressable_devices
    }


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Constrain the dimensions of ``x`` to mesh axes; return it unchanged without a mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


def expect_described_tpus() -> None:
    """Compile for TPUs that this process does not have, too, from now on."""
    global _described_tpus
    if not _described_tpus:
        _described_tpus = True
        jax.clear_caches()  # of functions that were traced without the kernels


def by_platform(*args: object, tpu: Callable[..., _T], default: Callable[..., _T]) -> _T:
    """Run ``tpu(*args)`` in programs for TPUs, ``default(*args)`` in others.

    ``jax.lax.platform_dependent`` traces both. A process that cannot compile for TPUs skips the kernel, which halves
    the time an engine takes to trace its programs.
    """
    if _described_tpus or jax.default_backend() == "tpu":
        return jax.lax.platform_dependent(*args, tpu=tpu, default=default)
    return default(*args)
