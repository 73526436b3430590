"""TPU slices and hosts of GPUs, which need not exist, and the layouts of a run on them.

A layout is meshes, batch sizes and the devices of each phase. TPUs are as Cloud TPU's documentation
states them (docs.cloud.google.com/tpu, 2026), GPUs as NVIDIA's data sheets do. What follows calls a
GPU a chip as well, and a host's GPUs a slice: they are joined by NVLink, hosts by a network.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.launch.tpu.gcloud import SHAPES
from jax_agent_rl.deploy.plan.gpu import GPUS_PER_HOST, GpuTarget, describe_gpus
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.deterministic import check_model
from jax_agent_rl.jetstream.sharding import engine_config, make_engine_mesh
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.sharding import (
    Device,
    Platform,
    expect_described,
    make_mesh,
    parameter_shardings,
)
from jax_agent_rl.runtime.engine_devices import (
    check_one_process,
    check_turns,
    engine_shapes,
    of_one_host,
    report_idle,
    resolve_engine_mesh,
    with_engine_mesh,
)
from jax_agent_rl.utils.near_names import did_you_mean
from jax_agent_rl.utils.packages import install_command, is_installed

GIB = 1 << 30

Choice = Mapping[str, int | str]
"""Values by key of the configuration."""
AXES = ("fsdp", "expert", "context", "tensor")
ROWS = (1, 2, 4, 8)
REMAT = ("none", "dots", "full")
"""Kinds of rematerialization, from the one that keeps most."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation of TPU, or one model of GPU.

    Attributes:
        hbm_bytes: memory of a chip available to programs: according to libtpu, which keeps some; of
            a GPU what is left by CUDA's contexts and NCCL's buffers.
        flops: peak bfloat16 operations per second; a multiplication and an addition count as two.
        clock: cycles per second: the peak over the operations of a cycle, in squares of 128 x 128
            multipliers (four on v5e, eight on v4 and v5p, sixteen on v6e); a GPU's boost clock.
        hbm_bandwidth: bytes per second between a chip and its memory.
        link_bandwidth: bytes per second and direction of one link to a neighbour; of a GPU half of
            what it sends through NVLink's switch, so that a ring of two links has all of it.
        dcn_bandwidth: bytes per second and direction of a chip's share of the network between
            slices.
        host_bytes: a chip's share of its host's memory.
        hosts: shapes of slices on one host; larger slices have hosts of four chips.
        config: libtpu's name for how cores form devices; None where it assumes one device per chip.
        gpu: what XLA's CUDA compiler has to know of it; None for a TPU.
    """

    name: str
    hbm_bytes: int
    flops: float
    clock: float
    hbm_bandwidth: float
    link_bandwidth: float
    dcn_bandwidth: float
    host_bytes: int
    hosts: tuple[tuple[int, ...], ...]
    config: str | None = None
    gpu: GpuTarget | None = None

    @property
    def platform(self) -> Platform:
        return "tpu" if self.gpu is None else "cuda"

    @property
    def shapes(self) -> tuple[str, ...]:
        """Shapes of slices, smallest first."""
        if self.gpu is None:
            return SHAPES[self.name]
        return tuple("x".join(map(str, shape)) for shape in self.hosts)


_GPU_HOSTS = tuple((count,) for count in (1, 2, 4, GPUS_PER_HOST))
_CONTEXT_BYTES = 2 * GIB
"""Memory of a GPU that programs do not have: contexts of CUDA, cuBLAS, cuDNN and NCCL, roughly."""


def _gpu(
    name: str, target: GpuTarget, *, flops: float, nvlink: float, network: float, host_bytes: int
) -> Chip:
    """Return a GPU.

    Args:
        flops: dense bfloat16, without sparsity.
        nvlink: bytes per second that it sends to the other GPUs of its host.
        network: bytes per second that it sends to other hosts.
        host_bytes: memory of a host.
    """
    return Chip(
        name=name,
        hbm_bytes=target.memory_bytes - _CONTEXT_BYTES,
        flops=flops,
        clock=target.clock_ghz * 1e9,
        hbm_bandwidth=target.memory_bandwidth,
        link_bandwidth=nvlink / 2,
        dcn_bandwidth=network,
        host_bytes=host_bytes // GPUS_PER_HOST,
        hosts=_GPU_HOSTS,
        gpu=target,
    )


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            hbm_bytes=int(30.75 * GIB),
            flops=275e12,
            clock=1.05e9,
            hbm_bandwidth=1200e9,
            link_bandwidth=50e9,  # of 6 links (Jouppi et al. 2023, arXiv 2304.01433)
            # 81 Tbps between 1536 hosts (Chowdhery et al. 2022, arXiv 2204.02311, section 4)
            dcn_bandwidth=1.6e9,
            host_bytes=int(407e9 / 4),
            hosts=((2, 2, 1),),
            # Both cores of a chip are one device, as they are for JAX on a real chip.
            config="megacore",
        ),
        Chip(
            name="v5e",
            hbm_bytes=int(15.75 * GIB),
            flops=197e12,
            clock=1.5e9,
            hbm_bandwidth=819e9,
            link_bandwidth=50e9,  # 400 GB/s in both directions over 4 links
            dcn_bandwidth=3.1e9,
            host_bytes=int(384e9 / 8),
            hosts=((1, 1), (2, 2), (2, 4)),
        ),
        Chip(
            name="v5p",
            hbm_bytes=int(95.74 * GIB),
            flops=459e12,
            clock=1.75e9,
            hbm_bandwidth=2765e9,
            link_bandwidth=100e9,  # 1200 GB/s in both directions over 6 links
            dcn_bandwidth=6.25e9,
            host_bytes=int(448e9 / 4),
            hosts=((2, 2, 1),),
        ),
        Chip(
            name="v6e",
            hbm_bytes=int(31.25 * GIB),
            flops=918e12,
            clock=1.75e9,
            hbm_bandwidth=1600e9,
            link_bandwidth=100e9,  # 3200 Gbps over 4 links
            dcn_bandwidth=12.5e9,
            host_bytes=int(1440e9 / 8),
            hosts=((1, 1), (2, 2), (2, 4)),
        ),
        # Hosts as NVIDIA's DGX: 400 or 800 Gb/s of network for each GPU.
        _gpu(
            "h100",
            GpuTarget(
                product="NVIDIA H100 80GB HBM3",
                capability=(9, 0),
                cores=132,
                memory_bytes=84_942_979_072,
                memory_bandwidth=3.35e12,
                cache_bytes=50 << 20,
                clock_ghz=1.98,
            ),
            flops=989e12,
            nvlink=450e9,
            network=50e9,
            host_bytes=2 << 40,
        ),
        _gpu(
            "h200",
            GpuTarget(
                product="NVIDIA H200",
                capability=(9, 0),
                cores=132,
                memory_bytes=150_754_820_096,
                memory_bandwidth=4.8e12,
                cache_bytes=50 << 20,
                clock_ghz=1.98,
            ),
            flops=989e12,
            nvlink=450e9,
            network=50e9,
            host_bytes=2 << 40,
        ),
        _gpu(
            "b200",
            GpuTarget(
                product="NVIDIA B200",
                capability=(10, 0),
                cores=148,
                memory_bytes=180 * 10**9,
                memory_bandwidth=8e12,
                cache_bytes=126 << 20,
                clock_ghz=1.965,
            ),
            flops=2250e12,
            nvlink=900e9,
            network=50e9,
            host_bytes=2 << 40,
        ),
    )
}
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # only a cloud has the metadata server
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it takes no chip
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """``v5e:4x4``, or ``2*v5e:4x4`` for two of them; ``h100:8``, or ``2*h100:8`` for two hosts.

    Attributes:
        shape: chips in each direction of the torus; of a host its GPUs.
        count: slices, joined by the data centre's network.
    """

    chip: Chip
    shape: tuple[int, ...]
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Parse a slice's name.

        Raises:
            ConfigError: no such generation, or no such shape.
        """
        match = re.fullmatch(r"(?:(\d+)\*)?([a-z0-9]+):(\d+(?:x\d+)*)", text.strip().lower())
        if match is None:
            raise ConfigError(
                f"topology {text!r} is not of the form v5e:4x4, v5p:4x4x4, or 2*v5e:16x16 for two"
                " slices; h100:8, or 2*h100:8 for two hosts"
            )
        count = int(match[1] or 1)
        name = match[2]
        sizes = match[3]

        chip = CHIPS.get(name)
        if chip is None:
            hint = did_you_mean(name, CHIPS)
            raise ConfigError(
                f"topology {text!r}: no chip is called {name!r}; {hint}there are {', '.join(CHIPS)}"
            )
        if sizes not in chip.shapes:
            raise ConfigError(f"topology {text!r}: {name} comes as {', '.join(chip.shapes)}")
        if count == 0:
            raise ConfigError(
                f"topology {text!r} is not a slice; leave out '0*', or say how many:"
                f" 2*{name}:{sizes}"
            )
        return cls(chip=chip, shape=tuple(int(size) for size in sizes.split("x")), count=count)

    @property
    def name(self) -> str:
        """The name that :meth:`parse` takes."""
        if self.count == 1:
            return self._name_of_one
        return f"{self.count}*{self._name_of_one}"

    @property
    def _name_of_one(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def larger(self) -> Slice | None:
        """The next larger slices of this generation, as many; None if these are the largest.

        Of whole hosts of GPUs there are twice as many.
        """
        for sizes in self.chip.shapes:
            shape = tuple(map(int, sizes.split("x")))
            if math.prod(shape) > math.prod(self.shape):
                return replace(self, shape=shape)
        if self.chip.gpu is not None:
            return replace(self, count=2 * self.count)
        return None

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.shape) * self.count

    @functools.cached_property
    def devices(self) -> list[Any]:
        """Described devices, one per chip, by slice and coordinates.

        Programs compile for them, but cannot run.

        Raises:
            ConfigError: the compiler is not installed, or knows no such slice.
        """
        if self.chip.gpu is not None:
            return describe_gpus(self.chip.gpu, per_host=self.shape[0], hosts=self.count)
        if not is_installed("libtpu"):
            raise ConfigError(
                f"plan compiles with libtpu, which is not installed: {install_command('plan')}"
            )
        for name, value in _LIBTPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)

        options: dict[str, Any] = {}
        if self.count > 1:
            options["num_slices"] = self.count
        if self.chip.config is not None:
            options["chip_config_name"] = self.chip.config
        if self.shape in self.chip.hosts:  # otherwise libtpu assumes hosts of four chips
            options["chips_per_host_bounds"] = (*self.shape, 1, 1)[:3]

        try:
            from jax.experimental import topologies

            expect_described("tpu")
            topology = topologies.get_topology_desc(
                platform="tpu", topology_name=self._name_of_one, **options
            )
            return list(topology.devices)
        except ImportError as error:
            raise ConfigError(
                f"plan needs jax.experimental.topologies ({error}): pip install 'jax>=0.10'"
            ) from None
        except Exception as error:
            # Whatever the compiler's plug-in raises: its message is the best there is.
            raise ConfigError(f"libtpu does not give topology {self.name!r}: {error}") from error

    def renumbered(self, mesh: Mesh) -> Mesh:
        """Return an engine's mesh on the chips of a lone host, or as it is if none is large enough.

        libtpu compiles only for chips that are numbered from 0 on.
        """
        for shape in self.chip.hosts:
            if math.prod(shape) >= mesh.size:
                host = replace(self, shape=shape, count=1)
                devices = np.array(host.devices[: mesh.size]).reshape(mesh.devices.shape)
                return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        return mesh


# --- layouts --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DevicePlacement:
    """Meshes of the learner and of each process's engines.

    Attributes:
        engines: meshes that are alike; none where engines run elsewhere.
    """

    learner: Mesh
    engines: tuple[Mesh, ...]

    @property
    def engine_count(self) -> int:
        """Number of engines; the engines of a process lie along ``data``."""
        return sum(mesh.shape["data"] for mesh in self.engines)

    @property
    def disjoint(self) -> bool:
        """Whether learner and engines share no chip."""
        learner = set(self.learner.devices.flat)
        return not any(learner & set(mesh.devices.flat) for mesh in self.engines)


def choose_engine_mesh(config: Config, model: DecoderConfig, slice: Slice) -> Config:
    """Return the configuration with the engines' mesh that a run would choose.

    See :func:`resolve_engine_mesh`.
    """
    rollout = config.rollout
    mesh = rollout.jetstream.mesh
    devices = slice.devices
    if rollout.backend != "jetstream":
        return config

    host = devices[0].process_index
    host_config = of_one_host(config, sampling_hosts(config, slice))
    engine_devices = [device for device in devices if device.process_index == host]
    if rollout.placement == "separate":
        if mesh.data is None and mesh.tensor is not None:
            return with_engine_mesh(config, mesh)
        after_learner = devices[config.learner.mesh.devices :]
        # The slice may be too small; `place_devices` says so.
        engine_devices = after_learner[: mesh.devices] or engine_devices
    memory = slice.chip.hbm_bytes
    resolved = resolve_engine_mesh(host_config, model, devices=engine_devices, memory=memory)
    return with_engine_mesh(config, resolved.rollout.jetstream.mesh)


def sampling_hosts(config: Config, slice: Slice) -> int:
    """Return the number of hosts whose engines share the run's trajectories.

    Colocated engines run on every host. Of others, each may get all trajectories.
    """
    if config.rollout.backend != "jetstream" or config.rollout.placement != "colocated":
        return 1
    return len({device.process_index for device in slice.devices})


def place_devices(config: Config, devices: Sequence[Device]) -> DevicePlacement:
    """Return the devices of each phase as a run would choose them.

    Axes that are left open are chosen first, see :func:`choose_engine_mesh`.

    Raises:
        ConfigError: a mesh does not fit the devices, two do not go together, or several hosts
            cannot do this run.
    """
    rollout = config.rollout
    engine = rollout.jetstream
    if rollout.placement == "separate" and rollout.backend == "jetstream":
        return _place_separately(config, devices)

    learner = make_mesh(config.learner.mesh, devices)
    if rollout.backend != "jetstream":
        return DevicePlacement(learner=learner, engines=())

    hosts: dict[int, list[Device]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    check_one_process(config, len(hosts))
    if rollout.placement == "colocated":
        sampling_hosts = list(hosts.values())
    else:
        sampling_hosts = [hosts[devices[0].process_index]]

    meshes = []
    for host_devices in sampling_hosts:
        meshes.append(
            make_engine_mesh(engine.mesh, device_offset=engine.device_offset, devices=host_devices)
        )
    for mesh in meshes:
        check_turns(config, learner, mesh)
    return DevicePlacement(learner=learner, engines=tuple(meshes))


def _place_separately(config: Config, devices: Sequence[Device]) -> DevicePlacement:
    """Return the learner's devices and, behind them, each engine's."""
    rollout = config.rollout
    engine = rollout.jetstream
    learner_size = config.learner.mesh.devices
    engine_size = engine.mesh.devices
    end = learner_size + engine_size * rollout.num_engines
    if end > len(devices):
        raise ConfigError(
            f"learner.mesh takes {learner_size} chips and rollout.num_engines="
            f"{rollout.num_engines} engines {engine_size} each (rollout.jetstream.mesh), which is"
            f" more than {len(devices)}; lower one of them"
        )

    learner = make_mesh(config.learner.mesh, devices[:learner_size])
    engines = []
    for start in range(learner_size, end, engine_size):
        engine_devices = devices[start : start + engine_size]
        hosts = {device.process_index for device in engine_devices}
        if len(hosts) > 1:
            raise ConfigError(
                f"rollout.jetstream.mesh takes {engine_size} chips for a process's engines, which"
                f" would be chips of {len(hosts)} hosts; an engine has the chips of one: lower"
                " rollout.jetstream.mesh, or let learner.mesh take whole hosts"
            )
        engines.append(make_engine_mesh(engine.mesh, devices=engine_devices))
    return DevicePlacement(learner=learner, engines=tuple(engines))


def list_idle(config: Config, slice: Slice, placement: DevicePlacement) -> list[str]:
    """Return a line, with a fix, for each phase in which chips have nothing to do."""
    numbers = {device: number for number, device in enumerate(slice.devices)}
    sampling = set()
    for mesh in placement.engines:
        sampling.update(numbers[device] for device in mesh.devices.flat)
    learning = {numbers[device] for device in placement.learner.devices.flat}
    lines = report_idle(
        config,
        count=slice.chips,
        sampling=sampling,
        learning=learning,
        hosts=max(1, len(placement.engines)),
    )
    return [f"{line}, or add --search" for line in lines]


def check_layout(config: Config, model: DecoderConfig, slice: Slice) -> DevicePlacement:
    """Return the devices of each phase, checked against the model.

    Raises:
        ConfigError: a mesh does not go with the devices, or does not divide the model.
    """
    placement = place_devices(choose_engine_mesh(config, model, slice), slice.devices)
    parameter_shardings(placement.learner, model.parameter_shapes())
    if placement.engines:
        mesh = placement.engines[0]  # the other meshes are like it
        engine_config(model, mesh)
        if config.rollout.deterministic:
            check_model(model, mesh)
    return placement


def learner_meshes(config: Config, model: DecoderConfig, slice: Slice) -> Iterator[Choice]:
    """Yield every mesh of all chips that the learner may take.

    Each slice has one copy of the model.
    """
    chips = slice.chips
    if config.rollout.placement == "separate":
        chips -= config.rollout.num_engines * config.rollout.jetstream.mesh.devices
    for sizes in _factorizations(chips // slice.count, len(AXES)):
        mesh = {"data": slice.count, **dict(zip(AXES, sizes, strict=True))}
        if mesh["expert"] == 1 or model.experts is not None:
            yield {f"learner.mesh.{axis}": size for axis, size in mesh.items()}


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as an ordered product of ``count`` factors."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for later in _factorizations(number // first, count - 1):
                yield (first, *later)


def engine_meshes(config: Config, model: DecoderConfig, slice: Slice) -> Iterator[Choice]:
    """Yield every mesh of a process's engines that share chips with the learner.

    Other engines keep the configured mesh. The number of engines follows from their size, unless it
    is configured.
    """
    if config.rollout.backend != "jetstream" or config.rollout.placement == "separate":
        yield {}
        return
    mesh = config.rollout.jetstream.mesh
    host = slice.devices[0].process_index
    process_indices = [device.process_index for device in slice.devices]
    chips = process_indices.count(host) - config.rollout.jetstream.device_offset
    # A mixture is split by whole experts, see resolve_engine_mesh.
    by_experts = model.experts is not None and mesh.expert is None
    for size in (1, 2, 4, 8):
        sizes: dict[str, int] = {}
        if by_experts:
            one_engine = mesh.model_copy(update={"data": 1, "expert": size, "tensor": 1})
        else:
            one_engine = mesh.model_copy(update={"data": 1, "tensor": size})
        if size > 1 and one_engine.devices > chips:
            break  # an engine has the chips of one host
        if mesh.data is not None:
            sizes["data"] = max(1, chips // one_engine.devices)
        if by_experts:
            sizes["expert"] = size
            sizes["tensor"] = 1
        else:
            sizes["tensor"] = size
        yield {f"rollout.jetstream.mesh.{axis}": number for axis, number in sizes.items()}


def batch_sizes(config: Config) -> Iterator[Choice]:
    """Yield every batch size: micro-batch rows, rematerialization, contexts an engine decodes.

    Args:
        config: of one host's engines, see :func:`of_one_host`.
    """
    slots: list[Choice] = [{}]
    if config.rollout.backend == "jetstream":
        limit = config.rollout.max_in_flight
        current = engine_shapes(config).max_concurrent_decodes
        alternatives = {max(1, current // 2), min(limit, 2 * current), min(limit, 4 * current)}
        alternatives.discard(current)
        # The configured value comes first, as it is written: engines may have fewer.
        counts = (config.rollout.jetstream.max_concurrent_decodes, *sorted(alternatives))
        slots = [{"rollout.jetstream.max_concurrent_decodes": count} for count in counts]
    for rows in ROWS:
        for remat in REMAT:
            for slot_count in slots:
                yield {
                    "learner.micro_batch_size": rows,
                    "learner.remat": remat,
                    **slot_count,
                }


def as_overrides(choice: Choice, *, changing: Config | None = None) -> tuple[str, ...]:
    """Return a choice as command-line overrides.

    Args:
        changing: leave out overrides that do not change this configuration; None: leave out none.
    """
    overrides = []
    for key, value in choice.items():
        if changing is None or functools.reduce(getattr, key.split("."), changing) != value:
            overrides.append(f"{key}={value}")
    return tuple(overrides)
