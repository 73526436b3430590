"""Shardings of an engine's arrays on its mesh.

::

    attention      key/value heads with their queries, over all devices   ─► o     ─► add up
    latents        replicated; query heads over all devices               ─► o     ─► add up
    feed-forward   hidden units over ``tensor``, experts over ``expert``  ─► down  ─► add up
    vocabulary     embeddings and head over all devices                   ─► each samples its ids

If there are fewer key/value heads than devices, they are repeated. A vision tower is replicated.
Along ``data`` there are engines, each on a mesh of its own (``jetstream.data_parallel``); only
their weights are arrays on all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.attention import DEVICES
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.jetstream.mixers.table import ENGINE_MIXERS, has_states
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.layers import split_weight
from jax_agent_rl.models.parameters import PARAMETERS
from jax_agent_rl.models.sharding import (
    MESH_AXES,
    RULES,
    Device,
    parameter_shardings,
    place_mesh,
    replicated,
)

KEY = "rollout.jetstream.mesh"
ENGINE_RULES = RULES | {"heads": DEVICES, "vocab": DEVICES}

_ENGINE_AXES = {  # of arrays in another layout than the learner's, see forward.EngineParams
    "qkv": ("layers", "heads", "choices", "embed"),
    "qkv_bias": ("layers", "heads", "choices"),
    "k_b": ("layers", "heads", "latent", "choices"),
    "v_b": ("layers", "heads", "choices", "latent"),
    "sinks": ("layers", "heads", "choices"),
    "delta_qkvz": ("layers", "heads", "choices", "embed"),
    "delta_ba": ("layers", "heads", "choices", "embed"),
    "delta_conv": ("layers", "heads", "choices", "kernel"),
    "global_qkv": ("layers", "heads", "choices", "embed"),
    "gate_up": ("layers", "choices", "mlp", "embed"),
    "shared_gate_up": ("layers", "choices", "mlp", "embed"),
    "wide_gate_up": ("layers", "choices", "mlp", "embed"),
    "expert_gate": ("layers", "experts", "embed", "mlp"),
    "expert_up": ("layers", "experts", "embed", "mlp"),
    "expert_down": ("layers", "experts", "mlp", "embed"),
}
_SHARED = frozenset({"heads", "mlp"})
"""Axes that matrices have as inputs, and that the devices of an engine share."""
_MOST_ROW_DEVICES = 8


def make_engine_mesh(
    config: EngineMeshConfig, *, device_offset: int = 0, devices: Sequence[Device] | None = None
) -> Mesh:
    """Make a mesh over a process's devices from ``device_offset`` on, of all its engines.

    Args:
        config: sizes of the axes; null is 1.
        device_offset: number of the first device.
        devices: all devices of the process, or described ones to compile for; None for this
            process's.

    Raises:
        ConfigError: there are too few devices, or they are not a block of a slice.
    """
    devices = jax.local_devices() if devices is None else devices
    end = device_offset + config.devices
    if end > len(devices):
        raise ConfigError(
            f"{KEY} takes {config.devices} devices from number {device_offset} on, but this process"
            f" has {len(devices)}; lower {KEY} or rollout.jetstream.device_offset"
        )
    shape = tuple(getattr(config, axis, 1) or 1 for axis in MESH_AXES)
    return place_mesh(shape, devices[device_offset:end], key=KEY)


def split_mesh(mesh: Mesh) -> list[Mesh]:
    """Return the mesh of each engine along ``data``."""
    parts = np.split(mesh.devices, mesh.shape["data"], axis=MESH_AXES.index("data"))
    return [Mesh(devices, MESH_AXES, axis_types=mesh.axis_types) for devices in parts]


def engine_config(model: DecoderConfig, mesh: Mesh) -> DecoderConfig:
    """Return the model as each engine of a mesh computes it: with key/value heads for all devices.

    Raises:
        ConfigError: the devices cannot share the model evenly.
    """
    expert = mesh.shape["expert"]
    devices = expert * mesh.shape["tensor"]
    if expert > 1 and model.experts is None:
        raise ConfigError(
            f"{KEY}.expert={expert}, but a {model.family} model has no experts; set {KEY}.tensor"
            " instead"
        )

    kv_heads = math.lcm(model.num_kv_heads, devices)
    if model.num_heads % kv_heads:
        fitting = []
        for count in range(1, model.num_heads + 1):
            if model.num_heads % math.lcm(model.num_kv_heads, count) == 0:
                fitting.append(count)
        raise ConfigError(
            f"{KEY} gives an engine {devices} devices, but {model.num_heads} query heads with"
            f" {model.num_kv_heads} key/value heads can be shared evenly by {fitting} devices only"
        )

    if model.delta_net is not None and model.delta_net.key_heads % devices:
        raise ConfigError(
            f"{KEY} gives an engine {devices} devices, but {model.delta_net.key_heads} key heads of"
            " delta nets can be shared evenly by a divisor of that number only"
        )

    learner_shardings(model, mesh)  # raises if another dimension does not divide
    model = replace(model, num_kv_heads=kv_heads)
    if model.global_attention is None:
        return model
    global_kv_heads = math.lcm(model.global_attention.num_kv_heads, devices)
    if model.num_heads % global_kv_heads:
        raise ConfigError(
            f"{KEY} gives an engine {devices} devices, which cannot share the"
            f" {model.global_attention.num_kv_heads} key/value heads of full layers with"
            f" {model.num_heads} query heads evenly; set a smaller {KEY}.tensor"
        )
    global_attention = replace(model.global_attention, num_kv_heads=global_kv_heads)
    return replace(model, global_attention=global_attention)


def learner_shardings(model: DecoderConfig, mesh: Mesh) -> Params:
    """Return a sharding for every parameter in the *learner's* layout on an engine's mesh.

    Raises:
        ConfigError: a dimension does not divide.
    """
    shardings = parameter_shardings(mesh, model.parameter_shapes(), rules=ENGINE_RULES, key=KEY)
    if "vision" in shardings:
        shardings["vision"] = jax.tree.map(lambda _: replicated(mesh), shardings["vision"])
    return shardings


def engine_shardings(params: EngineParams, mesh: Mesh, *, by_rows: bool = False) -> EngineParams:
    """Return a sharding for every array of an engine's parameters, or of their shapes.

    Args:
        by_rows: split no matrix along its inputs, see :func:`row_spec`.
    """

    def sharding_of(path: tuple, x: jax.Array) -> NamedSharding:
        names = [str(getattr(key, "name", getattr(key, "key", None))) for key in path]
        if names[0] == "vision":
            return replicated(mesh)

        name = names[-1]
        is_quantized = name in ("numbers", "scale")
        if is_quantized:
            name = names[-2]
        elif name == "head":
            name = "lm_head"
        spec = row_spec(name) if by_rows else _spec(_engine_axes(name))
        if is_quantized:
            spec = split_weight(x, spec)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding_of, params)


def _engine_axes(name: str) -> tuple[str, ...]:
    """Return the logical axes of an array of one layer, or of the whole model."""
    axes = _ENGINE_AXES.get(name) or PARAMETERS[name].axes
    return tuple(axis for axis in axes if axis != "layers")


def _spec(axes: Sequence[str]) -> PartitionSpec:
    return PartitionSpec(*(ENGINE_RULES[axis] for axis in axes))


def row_spec(name: str) -> PartitionSpec:
    """Return how devices share an array if they share no matrix along its inputs.

    Where they would, they share its outputs instead.
    """
    axes = _engine_axes(name)
    is_matrix = name in PARAMETERS and PARAMETERS[name].is_matrix
    if is_matrix and axes[-1] in _SHARED:
        *stacks, _, inputs = axes
        return PartitionSpec(*(ENGINE_RULES[axis] for axis in stacks), ENGINE_RULES[inputs], None)
    return _spec(axes)


def shared_axis(name: str) -> int | None:
    """Return the axis of an array that :func:`row_spec` splits; None if devices hold all of it."""
    for axis, mesh_axes in enumerate(row_spec(name)):
        if mesh_axes in (DEVICES, ENGINE_RULES["mlp"]):
            return axis
    return None


def row_devices(model: DecoderConfig) -> int:
    """Return the most devices that can share a model's matrices by blocks of their outputs.

    Others may that are a divisor of it. It is the number of blocks, so that products have the same
    shapes on all these meshes: few for large products, and whole heads for each device.
    """
    heads = model.num_kv_heads
    if model.global_attention is not None:
        heads = math.gcd(heads, model.global_attention.num_kv_heads)
    if model.delta_net is not None:
        heads = math.gcd(heads, model.delta_net.key_heads)
    divisors = [count for count in range(1, _MOST_ROW_DEVICES + 1) if heads % count == 0]
    return divisors[-1]


def cache_sharding(model: DecoderConfig, mesh: Mesh) -> Any:
    """Return a cache's shardings: each mixer's own; chosen experts are replicated."""
    shardings: Any = KVCache  # a tree of shardings in place of arrays
    layers: list[Any] = []
    states: list[Any] = []
    for kind in model.layer_kinds:
        mixer = ENGINE_MIXERS[kind.mixer]
        sharding = mixer.cache_sharding(mesh)
        layers.append(None if mixer.is_recurrent else sharding)
        states.append(sharding if mixer.is_recurrent else None)
    routed = None if model.experts is None else replicated(mesh)
    return shardings(
        layers=tuple(layers),
        routed=routed,
        states=tuple(states) if has_states(model) else (),
    )
