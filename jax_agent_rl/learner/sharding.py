"""Where every array of the learner lives: logical axes, and one table from them to mesh axes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_agent_rl.config import MeshConfig
from jax_agent_rl.errors import ConfigError

MESH_AXES = ("data", "fsdp", "tensor")

RULES: dict[str, str | tuple[str, ...] | None] = {
    "rows": ("data", "fsdp"),  # batch rows
    "layers": None,
    "vocab": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
    "embed": "fsdp",
    "experts": None,
    "norm": None,
}

PARAMETER_AXES: dict[str, tuple[str, ...]] = {
    "embed": ("vocab", "embed"),
    "lm_head": ("vocab", "embed"),
    "final_norm": ("norm",),
    "value_head": ("norm",),
    "q": ("layers", "heads", "embed"),
    "k": ("layers", "heads", "embed"),
    "v": ("layers", "heads", "embed"),
    "o": ("layers", "embed", "heads"),
    "q_bias": ("layers", "heads"),
    "k_bias": ("layers", "heads"),
    "v_bias": ("layers", "heads"),
    "q_norm": ("layers", "norm"),
    "k_norm": ("layers", "norm"),
    "gate": ("layers", "mlp", "embed"),
    "up": ("layers", "mlp", "embed"),
    "down": ("layers", "embed", "mlp"),
    "router": ("layers", "experts", "embed"),
    "expert_gate": ("layers", "experts", "mlp", "embed"),
    "expert_up": ("layers", "experts", "mlp", "embed"),
    "expert_down": ("layers", "experts", "embed", "mlp"),
    "input_norm": ("layers", "norm"),
    "post_attention_norm": ("layers", "norm"),
    "pre_feedforward_norm": ("layers", "norm"),
    "post_feedforward_norm": ("layers", "norm"),
}


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh (data, fsdp, tensor) over the first devices.

    Raises:
        ConfigError: more devices are asked for than there are.
    """
    shape = (config.data, config.fsdp, config.tensor)
    need, have = int(np.prod(shape)), jax.device_count()
    if need > have:
        raise ConfigError(f"learner.mesh asks for {'x'.join(map(str, shape))} = {need} devices, there are {have}")
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:need])


def parameter_shardings(mesh: Mesh, shapes: dict[str, Any]) -> dict[str, Any]:
    """A sharding for every parameter of a tree of shapes.

    Raises:
        ConfigError: a dimension does not divide; names the parameter and the key to change.
    """

    def one(path: tuple, shape: tuple[int, ...]) -> NamedSharding:
        name = path[-1].key
        spec = [RULES[axis] for axis in PARAMETER_AXES[name]]
        for size, axis, mesh_axis in zip(shape, PARAMETER_AXES[name], spec, strict=True):
            if isinstance(mesh_axis, str) and size % mesh.shape[mesh_axis]:
                raise ConfigError(
                    f"parameter {name!r}: its {axis} dimension of {size} is not divisible by "
                    f"learner.mesh.{mesh_axis}={mesh.shape[mesh_axis]}"
                )
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(one, shapes, is_leaf=lambda x: isinstance(x, tuple))


def adapter_shardings(mesh: Mesh, adapters: dict[str, Any]) -> dict[str, Any]:
    """Adapters lie where their weight does; the rank is on every device."""

    def one(name: str) -> dict[str, NamedSharding]:
        layers, out, inputs = (RULES[axis] for axis in PARAMETER_AXES[name])
        return {
            "a": NamedSharding(mesh, PartitionSpec(layers, None, inputs)),
            "b": NamedSharding(mesh, PartitionSpec(layers, out, None)),
        }

    return {"adapters": {name: one(name) for name in adapters["adapters"]}}


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Batch arrays: rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(RULES["rows"]))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())
