"""A configuration on a slice: which chips each half of the run takes, and everything that is on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.inventory import Inventory
from jax_agent_rl.deploy.plan.learner_half import described, learner_half
from jax_agent_rl.deploy.plan.rollout_half import rollout_half
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.layout import make_engine_mesh, parameter_places
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.mesh import Device
from jax_agent_rl.models.sharding import make_mesh
from jax_agent_rl.runtime.engines import check_turns


@dataclass(frozen=True, kw_only=True)
class Places:
    """Devices of each half.

    Attributes:
        learner: its mesh.
        engines: theirs, alike; empty where engines are none of the slice's.
    """

    learner: Mesh
    engines: tuple[Mesh, ...]

    @property
    def apart(self) -> bool:
        """Whether learner and engines share no chip."""
        learner = set(self.learner.devices.flat)
        return not any(learner & set(mesh.devices.flat) for mesh in self.engines)


def places(config: Config, devices: Sequence[Device]) -> Places:
    """Return the devices as a run would choose them.

    Raises:
        ConfigError: a mesh does not fit the devices, or two do not go together.
    """
    rollout, engine = config.rollout, config.rollout.jetstream
    if rollout.placement == "separate" and rollout.backend == "jetstream":
        return _separate(config, devices)
    learner = make_mesh(config.learner.mesh, devices)
    if rollout.backend != "jetstream":
        return Places(learner=learner, engines=())
    hosts: dict[int, list[Device]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    sampling = list(hosts.values()) if rollout.placement == "colocated" else [hosts[devices[0].process_index]]
    engines = [make_engine_mesh(engine.mesh, device_offset=engine.device_offset, devices=own) for own in sampling]
    for mesh in engines:
        check_turns(config, learner, mesh)
    return Places(learner=learner, engines=tuple(engines))


def _separate(config: Config, devices: Sequence[Device]) -> Places:
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
    return Places(learner=make_mesh(config.learner.mesh, devices[:first]), engines=tuple(engines))


def inventory(config: Config, model: DecoderConfig, where: Places) -> Inventory:
    """Return programs and arrays of a run.

    Raises:
        ConfigError: a mesh does not divide the model, or the configuration does not go with it.
    """
    learner = learner_half(config, model, where.learner)
    made, published, holds = learner.inventory, learner.published, learner.holds
    if where.engines:
        mesh = where.engines[0]  # the others are like it
        shapes, there = model.parameter_shapes(), parameter_places(model, mesh)
        if config.rollout.placement == "separate":  # from files, read for these very devices
            published, holds = described(shapes, there), frozenset()
        elif len(where.engines) > 1:  # copied for each of them
            published, holds = described(shapes, there, dtype=config.rollout.jetstream.dtype), frozenset()
        rollout = rollout_half(config, model, mesh, published, holds)
        made.programs += rollout.programs
        made.residents += rollout.residents
    return made
