"""Weight updates: validation, reading from files, and transfer into an engine's memory.

The learner's layout becomes the engine's::

    same devices    ──one program──► engine's layout and precision, in the old weights' memory
    other devices   ──one program──► engine's layout, sharded over the learner's devices
                    ──shard by shard──► engine's devices
    other hosts     ──all-gather per parameter──► all processes ──► each one's engine

From device to device no byte passes through the host, and no device holds more than its part: with
enough learner devices each shard of the engine is made on one of them and transferred by itself;
with fewer, a shard is cut there.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jax_agent_rl.errors import ModelError, WeightUpdateError
from jax_agent_rl.jetstream.forward import EngineParams, engine_params
from jax_agent_rl.jetstream.sharding import engine_shardings, learner_shardings
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import verify_probe
from jax_agent_rl.models.hf import load_params
from jax_agent_rl.models.offered import OFFER, pull
from jax_agent_rl.models.parameters import dtype_of
from jax_agent_rl.models.sharding import (
    MESH_AXES,
    Bounds,
    Device,
    local_bounds,
    place,
    replicated,
    shard_bounds,
)
from jax_agent_rl.models.stored import MANIFEST, StoredParams, named, require_same
from jax_agent_rl.rollout.protocol import ARRAYS, FILES, PULL, SHARDS, WeightUpdate
from jax_agent_rl.utils.pull_tickets import PullOffer, PullTicket
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, check_files

WEIGHT_PAYLOADS = frozenset({ARRAYS, FILES, PULL, SHARDS})
LOOPBACK = "127.0.0.1"
Devices = tuple[Device, ...]


def weight_dtype(dtype: str, quantize: str | None) -> str:
    """Return ``Capabilities.weight_dtype`` of an engine.

    Args:
        dtype: type of its weights and activations.
        quantize: 8-bit type of its matrices, which are rounded from what is sent.
    """
    if quantize is None:
        return dtype
    return AS_THEY_ARE


class ServedWeights:
    """Shapes and types of the parameters an engine serves.

    Args:
        params: the first parameters; only their structure is remembered.
        mesh: the engine's devices; each reads its part of files.
    """

    def __init__(self, config: DecoderConfig, params: Params, mesh: Mesh) -> None:
        self._config = config
        self._shardings = learner_shardings(config, mesh)
        self._structure = _structure(params)
        self._nesting = jax.tree.structure(params)

    async def receive(self, update: WeightUpdate) -> WeightUpdate:
        """Read and verify an update in a thread, while decoding goes on.

        Arrays without a probe are taken as they are.

        Returns:
            Arrays in the learner's layout, which give the log-probs of the probe.

        Raises:
            WeightUpdateError: they are damaged, of another model, or under wrong names.
        """
        update.require_kind(WEIGHT_PAYLOADS)
        if update.kind == ARRAYS and update.probe is None:
            return update
        return await asyncio.to_thread(self._receive, update)

    def _receive(self, update: WeightUpdate) -> WeightUpdate:
        if update.kind != ARRAYS:
            update = self._read(update)
        if update.probe is None:
            return update
        self._check_structure(update.payload)
        params = jax.tree.map(jax.device_put, update.payload, self._shardings)
        verify_probe(self._config, params, update.probe)
        return replace(update, payload=params, probe=None)

    def _read(self, update: WeightUpdate) -> WeightUpdate:
        dtype = self._structure["embed"][1]
        if update.kind == SHARDS:
            if not isinstance(update.payload, str):
                kind = type(update.payload).__name__
                raise WeightUpdateError(f"payload must be the address of a folder, got {kind}")

            stored = StoredParams(update.payload, manifest_digest=update.digests.get(MANIFEST))
            params = stored.read(
                self._config.parameter_shapes(), dtype=dtype, shardings=self._shardings
            )
            return replace(update, kind=ARRAYS, payload=params)

        if update.kind == PULL:
            ticket = update.payload
            if isinstance(ticket, PullOffer):  # of this process
                ticket = ticket.ticket(LOOPBACK)
            if not isinstance(ticket, PullTicket):
                raise WeightUpdateError(
                    f"payload must be a PullTicket, got {type(update.payload).__name__}"
                )
            params = pull(
                ticket,
                self._config.parameter_shapes(),
                digest=update.digests.get(OFFER),
                dtype=dtype,
                shardings=self._shardings,
            )
            return replace(update, kind=ARRAYS, payload=params)

        check_files(update.payload, update.digests)
        try:
            params = load_params(
                update.payload, self._config, dtype=dtype, shardings=self._shardings
            )
        except ModelError as error:
            raise WeightUpdateError(f"the update does not fit the model served: {error}") from error
        return replace(update, kind=ARRAYS, payload=params)

    def check(self, update: WeightUpdate, version: int) -> None:
        """Check that an update can follow ``version``.

        Raises:
            WeightUpdateError: it cannot.
        """
        update.require_newer(version)
        of_adapters_alone = update.adapters and not update.payload
        if update.partial and not of_adapters_alone:
            raise WeightUpdateError(
                "the jetstream backend takes whole updates, got partial=True; send every parameter"
            )
        if not update.partial:
            self._check_structure(update.payload)

    def _check_structure(self, params: Params) -> None:
        require_same(self._structure, _structure(params))
        if jax.tree.structure(params) != self._nesting:
            raise WeightUpdateError(
                "the update does not fit the model served: its parameters are nested differently"
            )


def _structure(params: Params) -> dict[str, tuple]:
    """Return shape and type of every parameter by its name."""
    return {name: (x.shape, x.dtype) for name, x in named(params).items()}


class WeightLoader:
    """Loads parameters into one engine, or into several that differ along ``data`` alone.

    Args:
        model: the model with the learner's key/value heads.
        config: the model with the engine's key/value heads.
        mesh: devices of the engine, or of all engines.
        dtype: type of the engine's weights.
        quantize: 8-bit type of its layers' matrices, see ``jetstream.forward.engine_params``.
        call: runs a program, as ``ProgramTable.call``.
    """

    def __init__(
        self,
        model: DecoderConfig,
        config: DecoderConfig,
        mesh: Mesh,
        *,
        dtype: jnp.dtype,
        quantize: jnp.dtype | None,
        call: Callable[..., Any],
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._call = call
        self._devices: Devices = tuple(mesh.devices.flat)
        self._arrange = functools.partial(engine_params, config, dtype=dtype, quantize=quantize)

    def __call__(self, params: Params, old: EngineParams | None = None) -> EngineParams:
        """Copy parameters into the engine's layout; no reference to ``params`` is kept.

        Args:
            params: the learner's tree, on any devices of this process or on the host. Shapes give
                shapes.
            old: weights whose memory is reused: they are freed, perhaps even if this fails. None
                takes new memory.
        """
        if old is not None and isinstance(old.embed, np.ndarray):
            old = None  # asleep, on the host
        params = jax.tree.map(self._on_devices, params, learner_shardings(self._model, self._mesh))
        source = _devices(params["embed"])
        layouts = tuple((x.dtype.name, x.sharding) for x in jax.tree.leaves(params))
        shapes = jax.eval_shape(self._arrange, params)
        shardings = engine_shardings(shapes, self._mesh)
        if source == self._devices:
            return self._arrange_in_place(params, old, layouts, shapes, shardings)

        stage = staging_mesh(self._mesh, source)
        staged = self._call(
            ("staged weights", layouts),
            self._arrange,
            (),
            params,
            default_sharding=replicated(stage),
            out=engine_shardings(shapes, stage),
        )
        # A failure on the learner's devices leaves the old weights intact.
        jax.block_until_ready(staged)
        for x in jax.tree.leaves(old):
            x.delete()
        return jax.tree.map(transfer, staged, shardings)

    def _arrange_in_place(
        self,
        params: Params,
        old: EngineParams | None,
        layouts: tuple,
        shapes: EngineParams,
        shardings: EngineParams,
    ) -> EngineParams:
        """Arrange parameters that are on the engine's devices, in the memory of the old weights."""
        to_engine: dict[str, Any] = {"default_sharding": replicated(self._mesh), "out": shardings}

        def zeros() -> EngineParams:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def arrange(old: EngineParams, params: Params) -> EngineParams:
            return self._arrange(params)

        if old is None:
            old = self._call(("no weights",), zeros, (), **to_engine)
        return self._call(("weights", layouts), arrange, (0,), old, params, **to_engine)

    def _on_devices(self, x: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
        """Put host arrays on devices.

        Arrays of a lone device get the same sharding, without a copy.
        """
        if isinstance(x, np.ndarray):
            return jax.device_put(x, sharding)
        is_on_lone_device = len(self._devices) == 1 and self._devices == _devices(x)
        if not is_on_lone_device:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return place(x, sharding)
        return jax.device_put(x, sharding)


def staging_mesh(engine: Mesh, devices: Devices) -> Mesh:
    """Return the engine's mesh on other devices.

    Its axes are as long as the number of devices allows; it is replicated over the rest.
    """
    expert = math.gcd(engine.shape["expert"], len(devices))
    tensor = 1
    if expert == engine.shape["expert"]:  # else shards of both axes would not nest
        tensor = math.gcd(engine.shape["tensor"], len(devices) // expert)
    sizes = {"data": len(devices) // (expert * tensor), "expert": expert, "tensor": tensor}
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    return Mesh(
        np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(shape)
    )


def transfer(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Copy an array to other devices, cutting each shard from one that contains it.

    Replicas are read in turn. A device that holds what it needs copies nothing.
    ``jax.device_put`` would gather differently sharded arrays on the host.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return place(x, sharding)

    shards = []
    for shard in x.addressable_shards:
        shards.append((shard_bounds(shard.index, x.shape), shard.device, shard.data))

    parts = []
    for number, (device, target) in enumerate(local_bounds(sharding, x.shape).items()):
        sources = [shard for shard in shards if _contains(shard[0], target)]
        local_sources = [shard for shard in sources if shard[1] == device]
        if local_sources:
            bounds, _, data = local_sources[0]
        else:
            bounds, _, data = sources[number % len(sources)]
        if target != bounds:
            index = []
            for (begin, end), (first, _) in zip(target, bounds, strict=True):
                index.append(slice(begin - first, end - first))
            data = data[tuple(index)]
        parts.append(jax.device_put(data, device))
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def _contains(bounds: Bounds, target: Bounds) -> bool:
    """Whether the bounds of a shard, begin and end of each axis, contain others."""
    for (begin, end), (target_begin, target_end) in zip(bounds, target, strict=True):
        if target_begin < begin or end < target_end:
            return False
    return True


def to_host(params: EngineParams) -> EngineParams:
    """Copy weights to NumPy arrays."""
    return jax.tree.map(np.array, params)


def _devices(x: jax.Array) -> Devices:
    """Return the devices in the order programs use them."""
    return tuple(x.sharding.devices_indices_map(x.shape))


class GatherParams:
    """Copies parameters from a mesh of all processes to each process's engine.

    All processes must call it, in the same order as their other joint computations. No device holds
    more than its engine's part of the model and one parameter.

    Args:
        mesh: of this process's engine; the others have the same.
        dtype: type of the copies.
    """

    def __init__(self, model: DecoderConfig, mesh: Mesh, *, dtype: str) -> None:
        self._dtype = jnp.dtype(dtype)
        self._local = learner_shardings(model, mesh)
        self._all_processes = learner_shardings(model, all_process_mesh(mesh))

    def __call__(self, params: Params) -> Params:
        """Return this process's copy, valid until the learner's next update.

        It may share the learner's memory.
        """
        return jax.tree_util.tree_map_with_path(
            self._copy, params, self._all_processes, self._local
        )

    def _copy(
        self, path: tuple, x: jax.Array, all_processes: NamedSharding, local: NamedSharding
    ) -> jax.Array:
        dtype = dtype_of(path[-1].key, self._dtype)
        joint = jax.device_put(x.astype(dtype), all_processes)
        copy = transfer(joint, local)
        # One by one, or the next parameters would be gathered before this one is freed.
        return jax.block_until_ready(copy)


def all_process_mesh(engine: Mesh) -> Mesh:
    """Return a mesh of all devices of all processes, made of copies of an engine's mesh."""
    parts = []
    for number in range(jax.process_count()):
        devices = tuple(jax.local_devices(process_index=number))
        parts.append(staging_mesh(engine, devices).devices)
    all_devices = np.concatenate(parts, axis=MESH_AXES.index("data"))
    return Mesh(all_devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
