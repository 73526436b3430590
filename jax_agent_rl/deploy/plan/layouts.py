"""Layouts of a run on a slice: which devices each phase takes, and the meshes and batch sizes to choose from."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.topology import Slice
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.sharding import engine_config, make_engine_mesh
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.mesh import Device
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings
from jax_agent_rl.runtime.engines import check_turns, engine_shapes


@dataclass(frozen=True, kw_only=True)
class DevicePlacement:
    """Devices of each phase.

    Attributes:
        learner: its mesh.
        engines: theirs, alike; empty where engines are none of the slice's.
    """

    learner: Mesh
    engines: tuple[Mesh, ...]

    @property
    def disjoint(self) -> bool:
        """Whether learner and engines share no chip."""
        learner = set(self.learner.devices.flat)
        return not any(learner & set(mesh.devices.flat) for mesh in self.engines)


def place_devices(config: Config, devices: Sequence[Device]) -> DevicePlacement:
    """Return the devices as a run would choose them.

    Raises:
        ConfigError: a mesh does not fit the devices, or two do not go together.
    """
    rollout, engine = config.rollout, config.rollout.jetstream
    if rollout.placement == "separate" and rollout.backend == "jetstream":
        return _separate(config, devices)
    learner = make_mesh(config.learner.mesh, devices)
    if rollout.backend != "jetstream":
        return DevicePlacement(learner=learner, engines=())
    hosts: dict[int, list[Device]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    sampling = list(hosts.values()) if rollout.placement == "colocated" else [hosts[devices[0].process_index]]
    engines = [make_engine_mesh(engine.mesh, device_offset=engine.device_offset, devices=own) for own in sampling]
    for mesh in engines:
        check_turns(config, learner, mesh)
    return DevicePlacement(learner=learner, engines=tuple(engines))


def _separate(config: Config, devices: Sequence[Device]) -> DevicePlacement:
    """Place the learner on the first devices, then each engine."""
    first, each, count = config.learner.mesh.devices, config.rollout.jetstream.mesh.devices, config.rollout.num_engines
    if first + each * count > len(devices):
        raise ConfigError(
            f"learner.mesh takes {first} chips and rollout.num_engines={count} engines {each} each "
            f"(rollout.jetstream.mesh)"
            f", which is more than {len(devices)}; lower one of them"
        )
    begins = [first + number * each for number in range(count)]
    engines = (make_engine_mesh(config.rollout.jetstream.mesh, devices=devices[b : b + each]) for b in begins)
    return DevicePlacement(learner=make_mesh(config.learner.mesh, devices[:first]), engines=tuple(engines))


AXES = ("fsdp", "expert", "context", "tensor")
ROWS = (1, 2, 4, 8)
REMAT = ("none", "dots", "full")
"""From the one that keeps most."""

Choice = Mapping[str, int | str]
"""Values by key of the configuration."""


def learner_meshes(config: Config, model: DecoderConfig, slice: Slice) -> Iterator[Choice]:
    """Yield every mesh of all chips that the learner may take, one copy on each slice."""
    engines = config.rollout.num_engines * config.rollout.jetstream.mesh.devices
    separate = config.rollout.placement == "separate"
    count = (slice.chips - engines * separate) // slice.count
    for sizes in _factors(count, len(AXES)):
        mesh = {"data": slice.count, **dict(zip(AXES, sizes, strict=True))}
        if mesh["expert"] == 1 or model.experts is not None:
            yield {f"learner.mesh.{axis}": size for axis, size in mesh.items()}


def engine_meshes(config: Config) -> Iterator[Choice]:
    """Yield every mesh of an engine that shares chips with the learner; else the configured one."""
    if config.rollout.backend != "jetstream" or config.rollout.placement == "separate":
        yield {}
        return
    for power in range(4):
        yield {"rollout.jetstream.mesh.tensor": 1 << power}


def batch_sizes(config: Config) -> Iterator[Choice]:
    """Yield every batch size: micro-batch rows, rematerialization, and contexts that an engine decodes."""
    slots: list[int] = []
    if config.rollout.backend == "jetstream":
        most, now = config.rollout.max_in_flight, engine_shapes(config).max_concurrent_decodes
        others = {max(1, now // 2), min(most, 2 * now), min(most, 4 * now)} - {now}
        slots = [config.rollout.jetstream.max_concurrent_decodes, *sorted(others)]
    for rows in ROWS:
        for remat in REMAT:
            learner = {"learner.micro_batch_size": rows, "learner.remat": remat}
            yield from ({**learner, "rollout.jetstream.max_concurrent_decodes": count} for count in slots)
            if not slots:
                yield learner


def overrides(choice: Choice) -> tuple[str, ...]:
    """Return a choice as command-line overrides."""
    return tuple(f"{key}={value}" for key, value in choice.items())


def changes(config: Config, choice: Choice) -> tuple[str, ...]:
    """Return the overrides that differ from a configuration."""
    return overrides({key: value for key, value in choice.items() if value != _value(config, key)})


def _value(config: Config, key: str) -> int | str:
    """Return the value of a key."""
    return functools.reduce(getattr, key.split("."), config)  # type: ignore[return-value]


def laid_out(config: Config, model: DecoderConfig, devices: Sequence[Device]) -> DevicePlacement:
    """Return the devices of each phase, checked against the model.

    Raises:
        ConfigError: a mesh does not go with the devices, or does not divide the model.
    """
    where = place_devices(config, devices)
    parameter_shardings(where.learner, model.parameter_shapes())
    for mesh in where.engines[:1]:  # the others are like it
        engine_config(model, mesh)
    return where


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as an ordered product of ``count`` factors."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factors(number // first, count - 1))
