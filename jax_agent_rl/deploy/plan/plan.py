"""A plan: a run's programs compiled for a slice, whether they fit, and how fast they could be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.compiled import Compiled, compile_program
from jax_agent_rl.deploy.plan.fit import Load, loads
from jax_agent_rl.deploy.plan.inventories import Places, inventory, places
from jax_agent_rl.deploy.plan.inventory import Inventory
from jax_agent_rl.deploy.plan.roofline import StepTime, step_of
from jax_agent_rl.deploy.plan.topology import Slice
from jax_agent_rl.errors import ConfigError, ModelError
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.utils.hub import hub_name


@dataclass(frozen=True, kw_only=True)
class ResourcePlan:
    """Of one configuration on one slice.

    Attributes:
        devices: of the slice.
        compiled: its programs.
        loads: the fullest chip of each.
        step: how long a step takes at least, by ``utilization`` of the chips' peak.
    """

    config: Config
    model: DecoderConfig
    slice: Slice
    devices: Sequence[Any]
    places: Places
    compiled: tuple[Compiled, ...]
    loads: tuple[Load, ...]
    step: StepTime
    utilization: float

    @property
    def fits(self) -> bool:
        return all(load.fits for load in self.loads)

    @property
    def fullest(self) -> Load:
        """The program that needs most of a chip."""
        return max(self.loads, key=lambda load: load.total)


def check(config: Config) -> DecoderConfig:
    """Return the model of a configuration that can be planned.

    Raises:
        ConfigError: it cannot.
        ModelError: the model's ``config.json`` is missing or of another family.
    """
    if config.rollout.deterministic:
        raise ConfigError("plan: rollout.deterministic is for runs on one device; set it to false")
    try:
        return load_config(config.model.path)
    except ModelError as error:
        if hub_name(config.model.path) is None:
            raise
        raise ModelError(f"{error}, or name a well-known model by --architecture, which needs no files") from None


def make_plan(
    config: Config,
    model: DecoderConfig,
    slice: Slice,
    *,
    utilization: float,
    devices: Sequence[Any],
    say: Callable[[str], None] = lambda text: None,
) -> ResourcePlan:
    """Compile all programs of a run.

    Args:
        config: of the run.
        model: its architecture.
        slice: to plan for.
        utilization: share of the roofline that programs are supposed to reach.
        devices: of the slice.
        say: takes a line of progress.

    Raises:
        ConfigError: the configuration does not go with the slice.
    """
    where = places(config, devices)
    say("tracing")
    made: Inventory = inventory(config, model, where)
    compiled = []
    for number, program in enumerate(made.programs, 1):
        say(f"compiling {program.name} ({number} of {len(made.programs)})")
        compiled.append(compile_program(program))
    return ResourcePlan(
        config=config,
        model=model,
        slice=slice,
        devices=devices,
        places=where,
        compiled=tuple(compiled),
        loads=tuple(loads(made, compiled, capacity=slice.chip.hbm_bytes)),
        step=step_of(
            config, compiled, slice.chip, engines=len(where.engines), apart=where.apart, utilization=utilization
        ),
        utilization=utilization,
    )
