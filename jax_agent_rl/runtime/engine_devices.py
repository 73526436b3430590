"""Devices of the jetstream engines of a process: chosen where the configuration leaves them open, and idle ones.

::

    tensor   as few devices as hold the weights and the KV cache, beside the learner's state if it is there, too
    expert   for a mixture, these instead: kernels prefer whole experts to parts of all
    data     as many engines as the process's other devices allow

Only accelerators are filled up: simulated devices of a CPU share its cores, so they get one engine
on one device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from jax_agent_rl.config import Config, EngineMeshConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.optimizer import optimizer_bytes
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.models.sharding import Device
from jax_agent_rl.observe.progress import number_ranges

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jax_agent_rl.jetstream.shapes import EngineShapes

MASTER = 4
"""Bytes of a parameter, and of its gradient."""
_USED_SHARE = 0.8
"""Share of a device's memory for what stays there; activations and programs need the rest."""


@dataclass(frozen=True, kw_only=True)
class ResidentBytes:
    """What stays on each device.

    Attributes:
        learner: parameters, gradient and optimizer.
        weights: the engine's.
        position: KV of one token, and its experts.
    """

    learner: float
    weights: float
    position: float

    @classmethod
    def estimate(cls, config: Config, model: DecoderConfig, *, devices: int) -> ResidentBytes:
        """Estimate the bytes of an engine on so many devices, and of the configured learner."""
        mesh, engine = config.learner.mesh, config.rollout.jetstream
        shapes, count, learner = model.parameter_shapes(), parameter_count(model), 0.0
        if config.algorithm.adv_estimator == "gae":
            learner += 2 * MASTER * count + optimizer_bytes(config.critic, shapes)
        if config.learner.lora is not None:
            learner += MASTER * count / 2
        else:
            reference = config.algorithm.kl.where != "none" and config.distill is None
            learner += (2 + reference) * MASTER * count + optimizer_bytes(config.learner, shapes)
        teachers = (
            [t.path for t in config.distill.teachers if t.url is None] if config.distill else []
        )
        teacher_bytes = 2 if config.learner.compute_dtype == "bfloat16" else 4
        learner += sum(parameter_count(load_config(path)) for path in teachers) * teacher_bytes
        own = 2 if engine.dtype == "bfloat16" else 4
        heads = math.lcm(model.num_kv_heads, devices) / devices
        keys_values = (
            2
            * model.num_layers
            * heads
            * model.head_dim
            * (own if engine.kv_dtype == "auto" else 1)
        )
        routed, experts = 0, model.experts
        if experts is not None:
            routed = model.num_layers * experts.per_token * (2 if experts.count > 256 else 1)
        return cls(
            learner=learner / (mesh.fsdp * mesh.tensor * mesh.expert),
            weights=count * (own if engine.quantize == "none" else 1) / devices,
            position=keys_values + routed,
        )

    def serving(self, shapes: EngineShapes) -> float:
        """Return the bytes of weights and KV cache."""
        return self.weights + shapes.pages * shapes.page * self.position


def parameter_count(model: DecoderConfig) -> int:
    """Return the number of a model's parameters."""
    return sum(
        map(
            math.prod,
            jax.tree.leaves(model.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple)),
        )
    )


def resolve_engine_mesh(
    config: Config,
    model: DecoderConfig,
    *,
    devices: Sequence[Device] | None = None,
    memory: int | None = None,
) -> Config:
    """Return the configuration with numbers for the engines' mesh.

    Args:
        config: the resolved configuration.
        model: the model.
        devices: of a process, or described ones; None for this process's.
        memory: bytes of a device; None asks the device.

    Raises:
        ConfigError: ``expert`` takes more devices than there are.
    """
    from jax_agent_rl.jetstream.sharding import make_engine_mesh

    rollout, mesh = config.rollout, config.rollout.jetstream.mesh
    if mesh.data is not None and mesh.tensor is not None:
        return with_engine_mesh(config, mesh)
    devices = jax.local_devices() if devices is None else devices
    one_program = rollout.deterministic or rollout.jetstream.engine_factory is not None
    if one_program or devices[0].platform == "cpu":
        return with_engine_mesh(config, mesh)
    own = devices[rollout.jetstream.device_offset :]
    most = len(own) // ((mesh.expert or 1) * (mesh.data or 1))
    if not most:  # this says what is missing
        make_engine_mesh(mesh, device_offset=rollout.jetstream.device_offset, devices=devices)
    meshes = [mesh]
    if mesh.tensor is None:
        axis = "expert" if model.experts is not None and mesh.expert is None else "tensor"
        every = [mesh.model_copy(update={axis: size}) for size in range(1, most + 1)]
        meshes = [one for one in every if _divides(one, model, own)] or every[:1]
    if memory is None:
        memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    for one in meshes:
        data = mesh.data or max(1, len(own) // one.engine_devices)
        made = with_engine_mesh(config, one.model_copy(update={"data": data}))
        if memory is None or _need(made, model) <= _USED_SHARE * memory:
            return made
    return made


def with_engine_mesh(config: Config, mesh: EngineMeshConfig) -> Config:
    """Return the configuration with this ``rollout.jetstream.mesh``; what is null is 1."""
    mesh = EngineMeshConfig(data=mesh.data or 1, expert=mesh.expert or 1, tensor=mesh.tensor or 1)
    engine = config.rollout.jetstream.model_copy(update={"mesh": mesh})
    return config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"jetstream": engine})}
    )


def _divides(mesh: EngineMeshConfig, model: DecoderConfig, devices: Sequence[Device]) -> bool:
    from jax_agent_rl.jetstream.sharding import engine_config, make_engine_mesh

    try:
        engine_config(model, make_engine_mesh(mesh.model_copy(update={"data": 1}), devices=devices))
    except ConfigError:
        return False
    return True


def _need(config: Config, model: DecoderConfig) -> float:
    """Return the bytes that stay on a device of an engine."""
    rollout, engine = config.rollout, config.rollout.jetstream
    stay = ResidentBytes.estimate(config, model, devices=engine.mesh.engine_devices)
    shared = (
        rollout.placement != "separate"
        and rollout.backend == "jetstream"
        and not rollout.sleep_during_update
    )
    beside = engine.device_offset >= config.learner.mesh.devices
    return stay.serving(engine_shapes(config)) + (stay.learner if shared and not beside else 0.0)


def engine_mesh(config: Config) -> Mesh:
    """Return the mesh of this process's embedded engines.

    Raises:
        ConfigError: there are too few devices.
    """
    from jax_agent_rl.jetstream.sharding import make_engine_mesh

    engine = resolve_engine_mesh(config, load_config(config.model.path)).rollout.jetstream
    return make_engine_mesh(engine.mesh, device_offset=engine.device_offset)


def engine_shapes(config: Config) -> EngineShapes:
    """Return the shapes that each embedded engine compiles: for its part of the trajectories in flight."""
    from jax_agent_rl.jetstream.shapes import EngineShapes, kv_cache_tokens, prefill_buckets

    engine, longest = config.rollout.jetstream, config.rollout.max_model_len
    in_flight = -(-config.rollout.max_in_flight // (engine.mesh.data or 1))
    slots = min(engine.max_concurrent_decodes, in_flight)
    return EngineShapes(
        max_model_len=longest,
        max_concurrent_decodes=slots,
        kv_cache_tokens=engine.kv_cache_tokens or kv_cache_tokens(longest, slots, in_flight),
        decode_steps=engine.decode_steps,
        prefill_buckets=engine.prefill_buckets or prefill_buckets(config.agent.max_prompt_length),
        patch_buckets=engine.patch_buckets,
        kv_offloading_bytes=int(engine.kv_offloading_size * 2**30),
        num_speculative_tokens=engine.num_speculative_tokens,
    )


def check_turns(config: Config, learner: Mesh, engines: Mesh) -> None:
    """Refuse a concurrent engine and learner on several common devices, which would deadlock.

    Collectives run in launch order on each device. Programs of engine and learner launched
    concurrently have no common order, so each could wait for a device that is in the other.

    Args:
        config: the resolved configuration.
        learner: mesh of the learner.
        engines: mesh of the colocated engines.

    Raises:
        ConfigError: an engine and the learner span several of the same devices, and the trainer
            does not alternate them.
    """
    from jax_agent_rl.jetstream.sharding import split_mesh

    own = set(learner.devices.flat)
    mode, shared = (
        config.trainer.mode,
        max(len(own & set(one.devices.flat)) for one in split_mesh(engines)),
    )
    if mode == "sync" or config.rollout.placement != "colocated" or shared < 2:
        return
    raise ConfigError(
        f"trainer.mode={mode}: engine and learner work at the same time, and both exchange data"
        f" over the same {shared} devices, where they would deadlock; give the engine devices of"
        " its own (a smaller learner.mesh, and rollout.jetstream.device_offset behind it), let"
        " each engine take one (rollout.jetstream.mesh.tensor=1), or set trainer.mode=sync or"
        " rollout.placement=hybrid"
    )


# --- idle devices ---------------------------------------------------------------------------------


def report_idle(
    config: Config,
    *,
    count: int,
    sampling: Collection[int],
    learning: Collection[int],
    hosts: int = 1,
) -> list[str]:
    """Return a line, with a fix, for each phase in which devices have nothing to do.

    Args:
        config: the configuration.
        count: number of all devices.
        sampling: numbers of those with an engine; empty if engines run elsewhere.
        learning: numbers of the learner's; empty without a learner.
        hosts: number of processes, each of which has engines.
    """
    everything = set(range(count))
    if (
        sampling and learning and not set(sampling) & set(learning)
    ):  # they sample and learn at the same time
        sampling = learning = {*sampling, *learning}
    lines = []
    if sampling and (idle := everything - set(sampling)):
        engine = config.rollout.jetstream
        own = count // hosts - engine.device_offset
        fix = f"set rollout.jetstream.mesh.tensor to a divisor of {own}"
        if engine.mesh.data is not None and own % engine.mesh.engine_devices == 0:
            fix = (
                f"set rollout.jetstream.mesh.data={own // engine.mesh.engine_devices}, or leave"
                " it out"
            )
        lines.append(f"{_devices(idle)} of {count} have no engine to sample with: {fix}")
    if learning and (idle := everything - set(learning)):
        mesh = config.learner.mesh
        factor, rest = divmod(count, mesh.devices)
        key = (
            f"learner.mesh.fsdp={mesh.fsdp * factor}"
            if not rest
            else f"axes of learner.mesh whose product is {count}"
        )
        lines.append(f"{_devices(idle)} of {count} have no part in learning: set {key}")
    return lines


def idle_here(config: Config, engines: Mesh | None, learner: Mesh | None) -> list[str]:
    """Return the lines of :func:`report_idle` for the devices of all processes; none on CPUs.

    Args:
        config: the resolved configuration.
        engines: mesh of this process's engines; the others have the same.
        learner: mesh of the learner.
    """
    devices, local = jax.devices(), jax.local_devices()
    if devices[0].platform == "cpu":
        return []
    number = {device: i for i, device in enumerate(devices)}
    places = [] if engines is None else [local.index(device) for device in engines.devices.flat]
    hosts = [jax.local_devices(process_index=host) for host in range(jax.process_count())]
    return report_idle(
        config,
        count=len(devices),
        sampling={number[host[place]] for host in hosts for place in places if place < len(host)},
        learning=set() if learner is None else {number[device] for device in learner.devices.flat},
        hosts=len(hosts),
    )


def expect_idle(config: Config, count: int) -> list[str]:
    """Return the lines of :func:`report_idle` for a host with so many devices, before a run chooses its mesh."""
    engine, mesh = config.rollout.jetstream, config.rollout.jetstream.mesh
    sampling = range(0)
    if config.rollout.backend == "jetstream" and config.rollout.placement != "separate":
        data = mesh.data or max(1, (count - engine.device_offset) // mesh.engine_devices)
        is_open = mesh.data is None and mesh.tensor is None
        sampling = range(
            engine.device_offset,
            count if is_open else engine.device_offset + data * mesh.engine_devices,
        )
    alone = (
        config.learner.multihost.num_processes in (None, 1)
        and config.learner.multihost.coordinator is None
    )
    learning = range(config.learner.mesh.devices if alone else count)
    return report_idle(config, count=count, sampling=sampling, learning=learning)


def _devices(numbers: Collection[int]) -> str:
    """Name devices by number, such as ``devices 2, 5-7``."""
    return f"{'device' if len(numbers) == 1 else 'devices'} {number_ranges(numbers, dash='-')}"
