"""Devices of a process's jetstream engines: chosen where the configuration is open, and idle ones.

::

    tensor   as few devices as hold the weights and the KV cache, and the learner's state if it is
             on the same devices
    expert   for a mixture of experts, these instead: kernels prefer whole experts to parts of all
    data     as many engines as the process's other devices allow

Only accelerators are filled up: simulated devices of a CPU share its cores, so they get one engine
on one device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_agent_rl.config import Config, EngineMeshConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.optimizer import optimizer_bytes
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.models.layer_kinds import MixerName
from jax_agent_rl.models.parameters import PARAMETERS
from jax_agent_rl.models.sharding import Device
from jax_agent_rl.observe.progress import number_ranges
from jax_agent_rl.rollout.protocol import PULL
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE

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
        learner: parameters, gradient and optimizer, and a copy that it offers to engines.
        weights: the engine's.
        position: what layers remember of one token, and the ids of its experts.
        state: what recurrent layers remember of one context.
    """

    learner: float
    weights: float
    position: float
    state: float = 0.0

    @classmethod
    def estimate(cls, config: Config, model: DecoderConfig, *, devices: int) -> ResidentBytes:
        """Estimate the bytes of an engine on so many devices, and of the configured learner."""
        learner_mesh = config.learner.mesh
        engine = config.rollout.jetstream
        count = parameter_count(model)

        dtype_bytes = 2 if engine.dtype == "bfloat16" else 4
        weight_bytes = dtype_bytes if engine.quantize == "none" else 1
        kv_bytes = dtype_bytes if engine.kv_dtype == "auto" else 1

        position = 0.0
        for kind in model.layer_kinds:
            if kind.keys == "shared":  # it reads another layer's
                continue
            position += POSITION_BYTES[kind.mixer](model, devices, kv_bytes)
        if model.experts is not None:
            expert_id_bytes = 2 if model.experts.count > 256 else 1
            position += len(model.expert_layers) * model.experts.per_token * expert_id_bytes

        return cls(
            learner=_learner_bytes(config, model)
            / (learner_mesh.fsdp * learner_mesh.tensor * learner_mesh.expert),
            weights=count * weight_bytes / devices,
            position=position,
            state=_state_bytes(model, dtype_bytes) / devices,  # heads are split
        )

    def serving(self, shapes: EngineShapes) -> float:
        """Return the bytes of weights, KV cache and recurrent states."""
        pages = shapes.pages * shapes.page * self.position
        return self.weights + pages + shapes.num_states * self.state


def _kv_position_bytes(
    mixer: MixerName, model: DecoderConfig, devices: int, number_bytes: int
) -> float:
    heads = model.heads(mixer)
    # Heads are repeated where there are fewer of them than devices.
    heads_per_device = math.lcm(heads.num_kv_heads, devices) / devices
    return 2 * heads_per_device * heads.head_dim * number_bytes


def _latent_position_bytes(model: DecoderConfig, devices: int, number_bytes: int) -> float:
    # Every device has the latents, whose heads are split.
    assert model.latent is not None
    return model.latent.cached_dim * number_bytes


def _no_position_bytes(model: DecoderConfig, devices: int, number_bytes: int) -> float:
    return 0.0


@functools.cache
def _state_bytes(model: DecoderConfig, number_bytes: int) -> int:
    """Return the bytes of a context's recurrent state, on all devices together."""
    from jax_agent_rl.jetstream.mixers.table import empty_cache

    dtype = jnp.bfloat16 if number_bytes == 2 else jnp.float32
    make_cache = functools.partial(empty_cache, model, 1, 1, dtype, num_states=1, state_dtype=dtype)
    states = jax.eval_shape(make_cache).states
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))


POSITION_BYTES: dict[MixerName, Callable[[DecoderConfig, int, int], float]] = {
    "attention": functools.partial(_kv_position_bytes, "attention"),
    "global_attention": functools.partial(_kv_position_bytes, "global_attention"),
    "latent_attention": _latent_position_bytes,
    "delta_net": _no_position_bytes,
}
"""From a model, an engine's devices and the bytes of a number to what a layer remembers of one
token, bytes on each device."""


def _learner_bytes(config: Config, model: DecoderConfig) -> float:
    """Return the bytes of the configured learner, critic and teachers, on all devices together.

    Weights that the learner offers on its devices are among them.
    """
    shapes = model.parameter_shapes()
    count = parameter_count(model)
    total = 0.0

    if config.algorithm.adv_estimator == "gae":
        total += 2 * MASTER * count + optimizer_bytes(config.critic, shapes)

    if config.learner.lora is not None:
        total += MASTER * count / 2
    else:
        copies = 2  # parameters and gradient
        if config.algorithm.kl.keeps_reference and config.distill is None:
            copies += 1  # the reference model
        total += copies * MASTER * count + optimizer_bytes(config.learner, shapes)

    dtype = offered_dtype(config)
    if dtype is not None:
        total += count * jnp.dtype(dtype).itemsize

    if config.distill:
        teacher_bytes = 2 if config.learner.compute_dtype == "bfloat16" else 4
        for teacher in config.distill.teachers:
            if teacher.url is None:
                total += parameter_count(load_config(teacher.path)) * teacher_bytes
    return total


def parameter_count(model: DecoderConfig) -> int:
    """Return the number of a model's parameters."""
    shapes = jax.tree.leaves(model.parameter_shapes(), is_leaf=lambda x: isinstance(x, tuple))
    return sum(math.prod(shape) for shape in shapes)


def active_parameter_count(model: DecoderConfig) -> float:
    """Return the number of parameters that a token meets: of the experts, those it chooses."""
    count = float(parameter_count(model))
    if model.experts is None:
        return count
    unchosen_share = 1 - model.experts.per_token / model.experts.count
    for name, shape in model.parameter_shapes()["layers"].items():
        if PARAMETERS[name].is_of_experts:
            count -= unchosen_share * math.prod(shape)
    return count


def resolve_engine_mesh(
    config: Config,
    model: DecoderConfig,
    *,
    devices: Sequence[Device] | None = None,
    memory: int | None = None,
) -> Config:
    """Return the configuration with numbers for the engines' mesh.

    Args:
        config: of one host's engines, see :func:`of_one_host`.
        devices: of a process, or described ones; None for this process's.
        memory: bytes of a device; None asks the device.

    Raises:
        ConfigError: ``expert`` takes more devices than there are.
    """
    from jax_agent_rl.jetstream.sharding import make_engine_mesh

    rollout = config.rollout
    mesh = rollout.jetstream.mesh
    if mesh.data is not None and mesh.tensor is not None:
        return with_engine_mesh(config, mesh)
    if devices is None:
        devices = jax.local_devices()
    is_external = rollout.jetstream.engine_factory is not None
    if is_external or devices[0].platform == "cpu":
        return with_engine_mesh(config, mesh)

    engine_devices = devices[rollout.jetstream.device_offset :]
    max_size = len(engine_devices) // ((mesh.expert or 1) * (mesh.data or 1))
    if max_size == 0:
        # Raises the error that says what is missing.
        make_engine_mesh(mesh, device_offset=rollout.jetstream.device_offset, devices=devices)

    # Candidates for one engine, the smallest first.
    candidates = [mesh]
    if mesh.tensor is None:
        axis = "expert" if model.experts is not None and mesh.expert is None else "tensor"
        sizes = [mesh.model_copy(update={axis: size}) for size in range(1, max_size + 1)]
        candidates = []
        for size in sizes:
            if _divides(size, model, engine_devices, deterministic=rollout.deterministic):
                candidates.append(size)
        if not candidates:
            candidates = sizes[:1]

    if memory is None:
        memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    for candidate in candidates:
        data = mesh.data or max(1, len(engine_devices) // candidate.engine_devices)
        resolved = with_engine_mesh(config, candidate.model_copy(update={"data": data}))
        if memory is None or _resident_bytes(resolved, model) <= _USED_SHARE * memory:
            return resolved
    return resolved  # the largest, although it does not fit


def with_engine_mesh(config: Config, mesh: EngineMeshConfig) -> Config:
    """Return the configuration with this ``rollout.jetstream.mesh``; what is null is 1."""
    mesh = EngineMeshConfig(data=mesh.data or 1, expert=mesh.expert or 1, tensor=mesh.tensor or 1)
    engine = config.rollout.jetstream.model_copy(update={"mesh": mesh})
    rollout = config.rollout.model_copy(update={"jetstream": engine})
    return config.model_copy(update={"rollout": rollout})


def _divides(
    mesh: EngineMeshConfig,
    model: DecoderConfig,
    devices: Sequence[Device],
    *,
    deterministic: bool,
) -> bool:
    """Return whether one engine of this mesh can shard the model."""
    from jax_agent_rl.jetstream.deterministic import check_model
    from jax_agent_rl.jetstream.sharding import engine_config, make_engine_mesh

    try:
        made = make_engine_mesh(mesh.model_copy(update={"data": 1}), devices=devices)
        engine_config(model, made)
        if deterministic:
            check_model(model, made)
    except ConfigError:
        return False
    return True


def _resident_bytes(config: Config, model: DecoderConfig) -> float:
    """Return the bytes that stay on a device of an engine, a learner's there included."""
    rollout = config.rollout
    engine = rollout.jetstream
    resident = ResidentBytes.estimate(config, model, devices=engine.mesh.engine_devices)
    total = resident.serving(engine_shapes(config))

    is_embedded = rollout.backend == "jetstream" and rollout.placement != "separate"
    has_learner_devices = engine.device_offset < config.learner.mesh.devices
    if is_embedded and has_learner_devices and not rollout.sleep_during_update:
        total += resident.learner
    return total


def parameter_dtype(config: Config) -> str:
    """Return the dtype in which an embedded engine takes parameters without loss.

    This is its ``Capabilities.weight_dtype``.
    """
    from jax_agent_rl.jetstream.weights import weight_dtype

    if config.rollout.jetstream.engine_factory is not None:
        return AS_THEY_ARE  # it converts weights itself
    precision = engine_precision(config)
    return weight_dtype(precision["dtype"], precision["quantize"])


def engine_precision(config: Config) -> dict[str, Any]:
    """Return ``dtype``, ``kv_dtype`` and ``quantize`` of an embedded engine."""
    engine = config.rollout.jetstream
    return {
        "dtype": engine.dtype,
        "kv_dtype": None if engine.kv_dtype == "auto" else engine.kv_dtype,
        "quantize": None if engine.quantize == "none" else engine.quantize,
    }


def offered_dtype(config: Config) -> str | None:
    """Return the dtype of the copy of all parameters on the learner's devices, for engines to pull.

    None where ``rollout.weight_transport`` keeps none. Rollout servers are taken to be configured
    as ``rollout.jetstream`` is.
    """
    if config.rollout.weight_transport != PULL:
        return None
    return parameter_dtype(config)


def of_one_host(config: Config, hosts: int) -> Config:
    """Return the configuration of one host's engines, with its share of the trajectories.

    Args:
        hosts: number of hosts whose engines share the run's trajectories.
    """
    share = math.ceil(config.rollout.max_in_flight / hosts)
    rollout = config.rollout.model_copy(update={"max_in_flight": share})
    return config.model_copy(update={"rollout": rollout})


def of_this_host(config: Config) -> Config:
    """Return the configuration of the engines on this process's devices, see :func:`of_one_host`.

    Colocated engines of the JAX engine run in every process of the learner.
    """
    rollout = config.rollout
    if rollout.backend != "jetstream" or rollout.placement != "colocated":
        return config
    return of_one_host(config, jax.process_count())


def engine_mesh(config: Config) -> Mesh:
    """Return the mesh of this process's embedded engines.

    Raises:
        ConfigError: there are too few devices.
    """
    from jax_agent_rl.jetstream.sharding import make_engine_mesh

    engine = resolve_engine_mesh(config, load_config(config.model.path)).rollout.jetstream
    return make_engine_mesh(engine.mesh, device_offset=engine.device_offset)


def engine_shapes(config: Config) -> EngineShapes:
    """Return the shapes that each embedded engine compiles, for its part of the trajectories.

    Args:
        config: of one host's engines, see :func:`of_one_host`.
    """
    from jax_agent_rl.jetstream.shapes import EngineShapes, kv_cache_tokens, prefill_buckets

    engine = config.rollout.jetstream
    max_model_len = config.rollout.max_model_len
    in_flight = math.ceil(config.rollout.max_in_flight / (engine.mesh.data or 1))
    slots = min(engine.max_concurrent_decodes, in_flight)
    cache_tokens = engine.kv_cache_tokens or kv_cache_tokens(max_model_len, slots, in_flight)
    state_checkpoints = engine.state_checkpoints
    if state_checkpoints is None:
        # One for every trajectory in flight: after its last turn, or after its prompt.
        state_checkpoints = in_flight
    return EngineShapes(
        max_model_len=max_model_len,
        max_concurrent_decodes=slots,
        kv_cache_tokens=cache_tokens,
        decode_steps=engine.decode_steps,
        prefill_buckets=engine.prefill_buckets or prefill_buckets(config.agent.max_prompt_length),
        patch_buckets=engine.patch_buckets,
        kv_offloading_bytes=int(engine.kv_offloading_size * 2**30),
        state_checkpoints=state_checkpoints,
        num_speculative_tokens=engine.num_speculative_tokens,
    )


def check_one_process(config: Config, processes: int) -> None:
    """Refuse ``rollout.deterministic`` in several processes.

    Each would need all weights and contexts.

    Args:
        processes: of the learner.

    Raises:
        ConfigError: there are several.
    """
    if config.rollout.deterministic and processes > 1:
        raise ConfigError(
            f"rollout.deterministic computes in one process, but there are {processes};"
            " start one, or set rollout.deterministic=false"
        )


def check_turns(config: Config, learner: Mesh, engines: Mesh) -> None:
    """Refuse a concurrent engine and learner on several common devices, which would deadlock.

    Collectives run in launch order on each device. Programs of engine and learner launched
    concurrently have no common order, so each could wait for a device that is in the other.

    Raises:
        ConfigError: an engine and the learner span several of the same devices, and the trainer
            does not alternate them.
    """
    from jax_agent_rl.jetstream.sharding import split_mesh

    mode = config.trainer.mode
    learner_devices = set(learner.devices.flat)
    if config.rollout.deterministic:
        learner_devices |= set(engines.devices.flat)  # it scores on them
    shared = max(len(learner_devices & set(mesh.devices.flat)) for mesh in split_mesh(engines))
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
        count: number of all devices.
        sampling: numbers of those with an engine; empty if engines run elsewhere.
        learning: numbers of the learner's; empty without a learner.
        hosts: number of processes, each of which has engines.
    """
    if sampling and learning and not set(sampling) & set(learning):
        # Engines and learner work at the same time, so none of their devices waits for the others.
        sampling = learning = {*sampling, *learning}

    all_devices = set(range(count))
    lines = []
    without_engine = all_devices - set(sampling)
    if sampling and without_engine:
        engine = config.rollout.jetstream
        host_devices = count // hosts - engine.device_offset
        fix = f"set rollout.jetstream.mesh.tensor to a divisor of {host_devices}"
        if engine.mesh.data is not None and host_devices % engine.mesh.engine_devices == 0:
            data = host_devices // engine.mesh.engine_devices
            fix = f"set rollout.jetstream.mesh.data={data}, or leave it out"
        lines.append(
            f"{_name_devices(without_engine)} of {count} have no engine to sample with: {fix}"
        )

    without_learner = all_devices - set(learning)
    if learning and without_learner:
        mesh = config.learner.mesh
        if count % mesh.devices == 0:
            key = f"learner.mesh.fsdp={mesh.fsdp * (count // mesh.devices)}"
        else:
            key = f"axes of learner.mesh whose product is {count}"
        lines.append(
            f"{_name_devices(without_learner)} of {count} have no part in learning: set {key}"
        )
    return lines


def idle_device_warnings(config: Config, engines: Mesh | None, learner: Mesh | None) -> list[str]:
    """Return the lines of :func:`report_idle` for the devices of all processes; none on CPUs.

    Args:
        engines: mesh of this process's engines; other processes have the same.
        learner: None without a learner.
    """
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return []
    number = {device: i for i, device in enumerate(devices)}
    hosts = [jax.local_devices(process_index=host) for host in range(jax.process_count())]

    sampling = set()
    if engines is not None:
        local_devices = jax.local_devices()
        for device in engines.devices.flat:
            local_index = local_devices.index(device)
            for host in hosts:
                if local_index < len(host):
                    sampling.add(number[host[local_index]])

    learning = set()
    if learner is not None:
        learning = {number[device] for device in learner.devices.flat}

    return report_idle(
        config, count=len(devices), sampling=sampling, learning=learning, hosts=len(hosts)
    )


def expect_idle(config: Config, count: int) -> list[str]:
    """Return the lines of :func:`report_idle` for a host of ``count`` devices, before a run."""
    engine = config.rollout.jetstream
    mesh = engine.mesh

    sampling = range(0)
    if config.rollout.backend == "jetstream" and config.rollout.placement != "separate":
        if mesh.data is None and mesh.tensor is None:
            end = count  # a run will choose a mesh that fills the host
        else:
            data = mesh.data or max(1, (count - engine.device_offset) // mesh.engine_devices)
            end = engine.device_offset + data * mesh.engine_devices
        sampling = range(engine.device_offset, end)

    is_one_process = config.learner.multihost.is_one_process
    learning = range(config.learner.mesh.devices if is_one_process else count)
    return report_idle(config, count=count, sampling=sampling, learning=learning)


def _name_devices(numbers: Collection[int]) -> str:
    """Name devices by number, such as ``devices 2, 5-7``."""
    noun = "device" if len(numbers) == 1 else "devices"
    return f"{noun} {number_ranges(numbers, dash='-')}"
