"""Weight updates: validation, reading from files, and transfer into an engine's memory.

The learner's layout becomes the engine's, layer by layer::

    same devices    ──a program──► engine's layout and precision, in the old layer's memory
    other devices   ──a program──► engine's layout, sharded over the learner's devices
                    ──shard by shard──► engine's devices
    other hosts     ──all-gather──► all processes ──► each one's engine, as on the same devices

From device to device no byte passes through the host, and no device holds more than its part and
one layer beside it: with enough learner devices each shard of the engine is made on one of them and
transferred by itself; with fewer, a shard is cut there. Layers of a kind share a program.

The old weights are always given up on the way, not only where memory is short: a failure in the
middle leaves an engine without weights until the next version. Other engines serve meanwhile; if
there is none, the run ends, and publishes all weights again when it is resumed.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jax_agent_rl.errors import ModelError, WeightUpdateError
from jax_agent_rl.jetstream.forward import (
    EngineParams,
    engine_layer,
    engine_params,
    engine_params_without_layers,
    stack_indices,
)
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.sharding import engine_config, engine_shardings, learner_shardings
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import verify_probe
from jax_agent_rl.models.hf import load_params
from jax_agent_rl.models.layer_kinds import LayerKind
from jax_agent_rl.models.layers import DTYPES, EightBits
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
        if update.partial or isinstance(update.payload, EngineParams):
            return  # the latter are of this process, which has checked what they were made of
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


# --- layer by layer -------------------------------------------------------------------------------


class LayerSource(NamedTuple):
    """The learner's arrays with one layer.

    Attributes:
        stacked: arrays of several layers, [L, ...], or of this one alone, [1, ...].
        indices: of the layer in each of them, int32 scalars.
    """

    stacked: Params
    indices: dict[str, np.ndarray]


class CopyToProcess(Protocol):
    """Copies arrays on a mesh of all processes to each process's engine."""

    def layer(self, source: LayerSource) -> LayerSource:
        """Return one layer, alone in its arrays."""
        ...

    def others(self, params: Params) -> Params:
        """Return all parameters but the layers."""
        ...


@dataclass(frozen=True)
class JointParams:
    """Parameters on a mesh of all processes, of which a process gets a layer at a time."""

    params: Params
    copy: CopyToProcess


def arrange_layer(
    config: DecoderConfig,
    kind: LayerKind,
    dtype: jnp.dtype,
    quantize: jnp.dtype | None,
    stacked: Params,
    indices: dict[str, jax.Array],
) -> Params:
    """Return a layer in the engine's layout, see ``jetstream.forward.engine_layer``."""
    arrays = {}
    for name, x in stacked.items():
        arrays[name] = jax.lax.dynamic_index_in_dim(x, indices[name], keepdims=False)
    return engine_layer(config, kind, arrays, dtype=dtype, quantize=quantize)


def arrange_others(dtype: jnp.dtype, others: Params) -> EngineParams:
    """Return all but the layers in the engine's layout."""
    return engine_params_without_layers(others, dtype=dtype)


class WeightLoader:
    """Loads parameters into one engine, or into several that differ along ``data`` alone.

    Args:
        model: the model with the learner's key/value heads.
        config: the model with the engine's key/value heads.
        mesh: devices of the engine, or of all engines.
        dtype: type of the engine's weights.
        quantize: 8-bit type of its layers' matrices, see ``jetstream.forward.engine_params``.
        call: runs a program, as ``ProgramTable.call``.
        by_rows: see :func:`~jax_agent_rl.jetstream.sharding.engine_shardings`.
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
        by_rows: bool = False,
    ) -> None:
        self._model = model
        self._config = config
        self._mesh = mesh
        self._dtype = dtype
        self._quantize = quantize
        self._call = call
        self._devices: Devices = tuple(mesh.devices.flat)
        self._shardings = functools.partial(engine_shardings, by_rows=by_rows)
        self._shapes: dict[tuple, Any] = {}  # of programs' results

    def __call__(
        self, params: Params | JointParams, old: EngineParams | None = None
    ) -> EngineParams:
        """Copy parameters into the engine's layout; no reference to ``params`` is kept.

        Args:
            params: the learner's tree, on any devices of this process or on the host, or joint
                ones. Shapes give shapes.
            old: weights whose memory is reused: they are freed, perhaps even if this fails. None
                takes new memory.
        """
        if old is not None and isinstance(old.embed, np.ndarray):
            old = None  # asleep, on the host
        copy: CopyToProcess | None = None
        if isinstance(params, JointParams):
            copy = params.copy
            tree = params.params
            source = self._devices  # where the copies are
        else:
            placed = learner_shardings(self._model, self._mesh)
            tree = jax.tree.map(self._on_devices, params, placed)
            source = _devices(tree["embed"])

        if source != self._devices:
            arrange = functools.partial(self._arrange_on, staging_mesh(self._mesh, source))
        else:
            arrange = self._arrange_in_place
            if old is None:
                old = self._allocate(tree)

        layers = []
        for number in range(self._config.num_layers):
            layer = self._layer_source(tree["layers"], number)
            if copy is not None:
                layer = copy.layer(layer)
            old_layer = None if old is None else old.layers[number]
            layers.append(arrange(self._layer_program(number, layer), old_layer, layer))

        others = {name: x for name, x in tree.items() if name != "layers"}
        if copy is not None:
            others = copy.others(others)
        old_others = None if old is None else replace(old, layers=())
        arranged = arrange(self._others_program(others), old_others, (others,))
        return replace(arranged, layers=tuple(layers))

    def _layer_source(self, stacked: Params, number: int) -> LayerSource:
        arrays = {}
        indices = {}
        for name, index in stack_indices(self._config, stacked, number).items():
            arrays[name] = stacked[name]
            indices[name] = np.asarray(index, np.int32)
        return LayerSource(arrays, indices)

    def _layer_program(self, number: int, layer: LayerSource) -> _Arrangement:
        kind = self._config.layer_kind(number)
        return _Arrangement(
            key=("layer", kind, *_layouts(layer.stacked)),
            arrange=functools.partial(
                arrange_layer, self._config, kind, self._dtype, self._quantize
            ),
        )

    def _others_program(self, others: Params) -> _Arrangement:
        return _Arrangement(
            key=("others", *_layouts(others)),
            arrange=functools.partial(arrange_others, self._dtype),
        )

    def _shapes_of(self, program: _Arrangement, arguments: tuple) -> Any:
        """Return shapes of a program's results, traced once for all layers of a kind."""
        if program.key not in self._shapes:
            self._shapes[program.key] = jax.eval_shape(program.arrange, *arguments)
        return self._shapes[program.key]

    def _arrange_in_place(self, program: _Arrangement, old: Any, arguments: tuple) -> Any:
        """Arrange parameters that are on the engine's devices, in the memory of the old ones."""
        shapes = self._shapes_of(program, arguments)
        return self._call(
            ("weights", *program.key),
            program.replace,
            (0,),
            old,
            *arguments,
            default_sharding=replicated(self._mesh),
            out=self._shardings(shapes, self._mesh),
        )

    def _arrange_on(self, stage: Mesh, program: _Arrangement, old: Any, arguments: tuple) -> Any:
        """Arrange parameters on the learner's devices, then copy them to the engine's."""
        shapes = self._shapes_of(program, arguments)
        staged = self._call(
            ("staged weights", *program.key),
            program.arrange,
            (),
            *arguments,
            default_sharding=replicated(stage),
            out=self._shardings(shapes, stage),
        )
        # A failure on the learner's devices leaves these old weights intact.
        jax.block_until_ready(staged)
        free_arrays(old)
        return jax.tree.map(transfer, staged, self._shardings(shapes, self._mesh))

    def _allocate(self, params: Params) -> EngineParams:
        """Return memory for the first weights, or for those of an engine that slept."""

        def arrange(params: Params) -> EngineParams:
            return engine_params(self._config, params, dtype=self._dtype, quantize=self._quantize)

        shapes = jax.eval_shape(arrange, params)

        def zeros() -> EngineParams:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        return self._call(
            ("no weights",),
            zeros,
            (),
            default_sharding=replicated(self._mesh),
            out=self._shardings(shapes, self._mesh),
        )

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


class _Arrangement(NamedTuple):
    """What arranges a part of the parameters.

    Attributes:
        key: the part, and types and shardings of the parameters.
        arrange: maps parameters to the engine's.
    """

    key: tuple
    arrange: Callable[..., Any]

    def replace(self, old: Any, *arguments: Any) -> Any:
        """Map parameters as ``arrange`` does; ``old`` is there to be donated."""
        return self.arrange(*arguments)


def _layouts(params: Params) -> list[tuple]:
    """Return name, shape, type and sharding of each array."""
    layouts = []
    for name, x in named(params).items():
        layouts.append((name, x.shape, x.dtype.name, x.sharding))
    return layouts


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


def free_arrays(params: Any) -> None:
    """Free the memory that weights have on devices, whoever else refers to them."""
    for x in jax.tree.leaves(params):
        if isinstance(x, jax.Array):
            x.delete()


def to_host(params: EngineParams) -> EngineParams:
    """Copy weights to NumPy arrays."""
    return jax.tree.map(np.array, params)


def _devices(x: jax.Array) -> Devices:
    """Return the devices in the order programs use them."""
    return tuple(x.sharding.devices_indices_map(x.shape))


# --- several hosts --------------------------------------------------------------------------------


class GatherParams:
    """Copies parameters from a mesh of all processes to each process's engine.

    All processes must call it, in the same order as their other joint computations. Copies keep the
    learner's layout, and are valid until its next update: they may share its memory.

    Args:
        mesh: of this process's engine; the others have the same.
        dtype: type of the copies.
    """

    def __init__(self, model: DecoderConfig, mesh: Mesh, *, dtype: str) -> None:
        self._dtype = jnp.dtype(dtype)
        self._local = named(learner_shardings(model, mesh))
        self._all_processes = named(learner_shardings(model, all_process_mesh(mesh)))
        self._table = ProgramTable()

    def __call__(self, params: Params, old: Any = None) -> Params:
        """Return this process's copy of all parameters.

        Args:
            old: the engine's weights, which are freed first.
        """
        free_arrays(old)
        return jax.tree_util.tree_map_with_path(self._copy, params)

    def layer(self, source: LayerSource) -> LayerSource:
        """Return this process's copy of one layer, alone in its arrays."""
        stacked = source.stacked
        mesh = next(iter(stacked.values())).sharding.mesh
        alone = self._table.call(
            ("layer", *_layouts(stacked)),
            functools.partial(_only_layer, self._dtype),
            (),
            stacked,
            source.indices,
            default_sharding=replicated(mesh),
            out={name: x.sharding for name, x in stacked.items()},
        )
        copies = jax.tree_util.tree_map_with_path(self._copy, {"layers": alone})
        return LayerSource(copies["layers"], {name: np.asarray(0, np.int32) for name in stacked})

    def others(self, params: Params) -> Params:
        """Return this process's copy of all parameters but the layers."""
        return jax.tree_util.tree_map_with_path(self._copy, params)

    def _copy(self, path: tuple, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        dtype = dtype_of(path[-1].key, self._dtype)
        joint = jax.device_put(x.astype(dtype), self._all_processes[name])
        copy = transfer(joint, self._local[name])
        # One by one, or the next parameters would be gathered before this one is freed.
        return jax.block_until_ready(copy)


def _only_layer(dtype: jnp.dtype, stacked: Params, indices: dict[str, jax.Array]) -> Params:
    """Return stacks [1, ...] of one layer, rounded to a type."""
    alone = {}
    for name, x in stacked.items():
        layer = jax.lax.dynamic_slice_in_dim(x, indices[name], 1)
        alone[name] = layer.astype(dtype_of(name, dtype))
    return alone


class JointLoader:
    """Makes the weights of each process's engines from parameters on a mesh of all processes.

    All processes must call it, in the same order as their other joint computations. No device holds
    more than its engine's weights and a layer in the learner's layout.

    Args:
        mesh: of this process's engines; the others have the same.
        gathered_dtype: type in which parameters are exchanged.
        dtype: type of the engine's weights.
        quantize: 8-bit type of its layers' matrices; None keeps ``dtype``.
    """

    def __init__(
        self,
        model: DecoderConfig,
        mesh: Mesh,
        *,
        gathered_dtype: str,
        dtype: str,
        quantize: EightBits | None,
    ) -> None:
        self._shapes = named(model.parameter_shapes())
        self._gather = GatherParams(model, mesh, dtype=gathered_dtype)
        self._load = WeightLoader(
            model,
            engine_config(model, mesh),
            mesh,
            dtype=jnp.dtype(dtype),
            quantize=None if quantize is None else DTYPES[quantize],
            call=ProgramTable().call,
        )

    def __call__(self, params: Params, old: EngineParams | None) -> EngineParams:
        """Return the weights of this process's engines, as arrays on all of their devices.

        Args:
            old: their old weights, whose memory the new ones take.

        Raises:
            WeightUpdateError: the parameters are of another model.
        """
        require_same(self._shapes, {name: x.shape for name, x in named(params).items()})
        loaded = self._load(JointParams(params, self._gather), old)
        return jax.block_until_ready(loaded)


def all_process_mesh(engine: Mesh) -> Mesh:
    """Return a mesh of all devices of all processes, made of copies of an engine's mesh."""
    parts = []
    for number in range(jax.process_count()):
        devices = tuple(jax.local_devices(process_index=number))
        parts.append(staging_mesh(engine, devices).devices)
    all_devices = np.concatenate(parts, axis=MESH_AXES.index("data"))
    return Mesh(all_devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
