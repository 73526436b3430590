"""Ways to lay a run out on a slice: what may be chosen, and whether a choice goes with the model and the devices."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.inventories import Places, places
from jax_agent_rl.deploy.plan.topology import Slice
from jax_agent_rl.jetstream.layout import engine_config
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.mesh import Device
from jax_agent_rl.models.sharding import parameter_shardings
from jax_agent_rl.runtime.engines import engine_shapes

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
    return overrides({key: value for key, value in choice.items() if value != said(config, key)})


def said(config: Config, key: str) -> int | str:
    """Return the value of a key."""
    return functools.reduce(getattr, key.split("."), config)  # type: ignore[return-value]


def laid_out(config: Config, model: DecoderConfig, devices: Sequence[Device]) -> Places:
    """Return the devices of each half, checked against the model.

    Raises:
        ConfigError: a mesh does not go with the devices, or does not divide the model.
    """
    where = places(config, devices)
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
