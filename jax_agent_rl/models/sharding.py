"""The mesh of devices, its axes, and how arrays are sharded on it.

Arrays have logical axes (``models.parameters``); one table, :data:`RULES`, leads from them to mesh
axes. XLA partitions most of a model. Only attention over a row and the experts' exchange are
written per shard, and kernels per platform (:func:`by_platform`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jax_agent_rl.config import MeshConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.parameters import parameter_at

# From the slowest to the fastest link: neighbouring devices, which exchange most, differ in the
# last axis.
MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
ROWS = ("data", "fsdp", "expert")
"""Axes that split the rows of a batch."""

Device = Any
"""A ``jax.Device``; jaxlib ships no types."""

_T = TypeVar("_T")
Platform = Literal["tpu", "cuda"]
described_platforms: set[Platform] = set()
"""Platforms whose devices this process does not have, and also compiles programs for."""

RULES: dict[str, str | tuple[str, ...] | None] = {
    "rows": ROWS,
    "tokens": "context",
    "layers": None,
    "vocab": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
    "embed": "fsdp",
    "experts": "expert",
    "choices": None,
    "norm": None,
    "kernel": None,
    "latent": None,
    "patch": None,
    "tower_mlp": None,  # Qwen2.5-VL's 3420 would keep eight devices from splitting the decoder
    "rank": None,
}
"""From the logical axes of ``models.parameters`` and of batches to mesh axes."""


def make_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:
    """Make a mesh of all of ``MESH_AXES`` over the first devices.

    Args:
        devices: of all processes, or described ones to compile for; None for ``jax.devices()``.

    Raises:
        ConfigError: the mesh needs more devices than there are or, over several processes, fewer; a
            copy of the model would span several slices; or the mesh does not follow the links
            of a slice.
    """
    if devices is None:
        devices = jax.devices()
    processes = len({device.process_index for device in devices})
    shape = tuple(getattr(config, axis) for axis in MESH_AXES)
    need = int(np.prod(shape))
    have = len(devices)
    if need > have:
        raise ConfigError(
            f"learner.mesh asks for {_describe_shape(shape)} = {need} devices, there are {have};"
            f" lower learner.mesh to {have} in all"
        )
    if processes > 1 and need != have:
        raise ConfigError(
            f"learner.mesh takes {need} of {have} devices, but each of the {processes} processes"
            f" has to take part; make the product of learner.mesh {have}"
        )

    slices = _count_slices(devices[:need])
    if config.data % slices:
        raise ConfigError(
            f"learner.mesh.data={config.data} on {slices} slices: only copies of the model may be"
            " on different ones, which exchange gradients alone; set learner.mesh.data to a"
            f" multiple of {slices}"
        )
    return place_mesh(shape, devices[:need], key="learner.mesh")


def _describe_shape(shape: Sequence[int]) -> str:
    """Return the sizes of the axes that split something, as in ``data=2, tensor=4``."""
    parts = []
    for axis, size in zip(MESH_AXES, shape, strict=True):
        if size > 1:
            parts.append(f"{axis}={size}")
    return ", ".join(parts)


def slice_number(device: Device) -> int | None:
    """Return the number of a device's TPU slice, or of a GPU's host; None for other devices.

    Within it devices are joined by fast links.
    """
    number = getattr(device, "slice_index", None)
    if number == 0 and device.platform == "gpu":
        # jaxlib numbers the slices of described GPUs in their coordinates alone.
        return getattr(device, "coords", (0,))[0]
    return number


def _count_slices(devices: Sequence[Device]) -> int:
    """Return the number of TPU slices, or of hosts of GPUs; 1 for other devices."""
    return len({slice_number(device) for device in devices})


def parameter_shardings(
    mesh: Mesh,
    shapes: dict[str, Any],
    *,
    rules: Mapping[str, str | tuple[str, ...] | None] = RULES,
    key: str = "learner.mesh",
) -> dict[str, Any]:
    """Return a sharding for every parameter of a tree of shapes.

    Args:
        shapes: nested as the parameter tree.
        rules: from logical to mesh axes.
        key: the mesh's configuration key, for messages.

    Raises:
        ConfigError: a dimension does not divide.
    """

    def parameter_sharding(path: tuple, shape: tuple[int, ...]) -> NamedSharding:
        axes = parameter_at(path).axes
        spec = [rules[axis] for axis in axes]
        for size, axis, mesh_axes in zip(shape, axes, spec, strict=True):
            if mesh_axes is None:
                mesh_axes = ()
            elif isinstance(mesh_axes, str):
                mesh_axes = (mesh_axes,)
            if size % math.prod(mesh.shape[name] for name in mesh_axes):
                factors = [
                    f"{key}.{name}={mesh.shape[name]}" for name in mesh_axes if mesh.shape[name] > 1
                ]
                raise ConfigError(
                    f"parameter {path[-1].key!r}: its {axis} dimension of {size} is not divisible"
                    f" by {' x '.join(factors)}"
                )
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(
        parameter_sharding, shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def adapter_shardings(mesh: Mesh, adapters: dict[str, Any]) -> dict[str, Any]:
    """Shard adapters as their weights; the rank is not split."""

    def adapter_sharding(path: tuple, _: Any) -> NamedSharding:
        spec = [RULES[axis] for axis in parameter_at(path).axes]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(adapter_sharding, adapters)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of batch arrays [R, …].

    Rows are split over data, fsdp and expert, the other axis over context.
    """
    return NamedSharding(mesh, PartitionSpec(RULES["rows"], RULES["tokens"]))


def place(x: Any, sharding: Sharding) -> Any:
    """Copy an array to a sharding; a shape gets the sharding.

    Over several processes, each must hold all of the array unless it is sharded already.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=sharding)
    if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x.copy(), sharding)  # a new buffer even if the sharding is the same
    host = np.asarray(x)
    return jax.make_array_from_process_local_data(sharding, host, host.shape)


def gathered(x: jax.Array) -> jax.Array:
    """Replicate an array over its mesh; every process must call it."""
    sharding = x.sharding
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return jax.jit(_same, out_shardings=replicated(sharding.mesh))(x)


def _same(x: jax.Array) -> jax.Array:
    return x


def row_shards(mesh: Mesh) -> int:
    """Return the number of parts the rows of a batch are split into."""
    return int(np.prod([mesh.shape[axis] for axis in ROWS]))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays that are the same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place_mesh(shape: Sequence[int], devices: Sequence[Device], *, key: str) -> Mesh:
    """Make a mesh of all of ``MESH_AXES`` that follows the links between its devices.

    Args:
        shape: sizes of the axes; several TPU slices share the first one equally.
        key: the configuration key, for messages.

    Raises:
        ConfigError: the devices are not a block of a slice, or an axis does not follow its links.
    """
    types = (AxisType.Auto,) * len(shape)
    slices = _count_slices(devices)
    asked = _describe_shape(shape)
    try:
        if slices == 1:
            return jax.make_mesh(tuple(shape), MESH_AXES, axis_types=types, devices=devices)
        slice_shape = (shape[0] // slices, *shape[1:])
        shape_of_slices = (slices, *[1] * (len(shape) - 1))
        slice_indices = {device.slice_index for device in devices}
        placed = create_hybrid_device_mesh(
            slice_shape,
            shape_of_slices,
            devices,
            # Described hosts of GPUs differ in their process alone, see `slice_number`.
            process_is_granule=len(slice_indices) == 1,
        )
        return Mesh(placed, MESH_AXES, axis_types=types)
    except NotImplementedError:  # jax gives an axis whole dimensions of a large slice
        raise ConfigError(
            f"{key} asks for {asked}, which jax cannot place on the links of these {len(devices)}"
            " chips; make each axis a product of the slice's dimensions"
        ) from None
    except AssertionError:  # raised by jax if the chips' coordinates leave holes
        raise ConfigError(
            f"{key} asks for {asked} = {len(devices)} chips, but the next {len(devices)} of this"
            " slice are not a block of it without holes; take 1, whole rows of the slice, or all"
        ) from None


Bounds = tuple[tuple[int, int], ...]
"""Begin and end of a part of an array, in every dimension."""


def shard_bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Return the bounds of a shard, given by its index."""
    bounds = []
    for part, size in zip(index, shape, strict=True):
        begin, end, _ = part.indices(size)
        bounds.append((begin, end))
    return tuple(bounds)


def local_bounds(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Bounds]:
    """Return the bounds that each device of this process holds of an array."""
    bounds = {}
    for device, index in sharding.devices_indices_map(shape).items():
        if device in sharding.addressable_devices:
            bounds[device] = shard_bounds(index, shape)
    return bounds


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Constrain the dimensions of ``x`` to mesh axes; return it unchanged without a mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


def expect_described(platform: Platform) -> None:
    """Compile from now on also for devices of a platform that this process does not have."""
    if platform not in described_platforms:
        described_platforms.add(platform)
        jax.clear_caches()  # of functions that were traced without the kernels


def compiles_for(platform: Platform) -> bool:
    """Return whether this process may compile programs for a platform."""
    backend = "gpu" if platform == "cuda" else platform
    return platform in described_platforms or jax.default_backend() == backend


def by_platform(
    *args: object,
    default: Callable[..., _T],
    tpu: Callable[..., _T] | None = None,
    cuda: Callable[..., _T] | None = None,
) -> _T:
    """Run ``tpu(*args)`` in programs for TPUs, ``cuda(*args)`` for GPUs, else ``default(*args)``.

    ``jax.lax.platform_dependent`` traces all of them. A process that cannot compile for a platform
    skips its kernel, which halves the time an engine takes to trace its programs.

    Args:
        tpu: None where TPUs have no kernel.
        cuda: None where GPUs have no kernel.
    """
    kernels: dict[str, Callable[..., _T]] = {}
    if tpu is not None and compiles_for("tpu"):
        kernels["tpu"] = tpu
    if cuda is not None and compiles_for("cuda"):
        kernels["cuda"] = cuda
    if not kernels:
        return default(*args)
    return jax.lax.platform_dependent(*args, default=default, **kernels)
