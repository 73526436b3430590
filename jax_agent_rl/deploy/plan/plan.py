"""A plan: a run's programs compiled for a slice, whether they fit, and how fast they could be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.compiled import Compiled, compile_program
from jax_agent_rl.deploy.plan.engine_programs import engine_inventory
from jax_agent_rl.deploy.plan.inventory import Inventory, Program, Resident
from jax_agent_rl.deploy.plan.layouts import DevicePlacement, place_devices
from jax_agent_rl.deploy.plan.learner_programs import described, learner_inventory
from jax_agent_rl.deploy.plan.roofline import StepTime, step_of
from jax_agent_rl.deploy.plan.topology import Slice
from jax_agent_rl.errors import ConfigError, ModelError
from jax_agent_rl.jetstream.sharding import learner_shardings
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.models.mesh import Device
from jax_agent_rl.utils.hub import hub_name

BATCH, TEMPORARIES, CODE = "gradients and batches", "temporaries", "code"


@dataclass(frozen=True, kw_only=True)
class Load:
    """The fullest chip of a program while it runs there.

    Attributes:
        parts: bytes by what they are; in order.
        refused: the compiler would not make it; then parts are what it said, or less.
    """

    program: Program
    parts: Mapping[str, int]
    capacity: int
    refused: bool = False

    @functools.cached_property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity and not self.refused


@dataclass(frozen=True, kw_only=True)
class ResourcePlan:
    """Plan of one configuration on one slice.

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
    placement: DevicePlacement
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
    where = place_devices(config, devices)
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
        placement=where,
        compiled=tuple(compiled),
        loads=tuple(loads(made, compiled, capacity=slice.chip.hbm_bytes)),
        step=step_of(
            config, compiled, slice.chip, engines=len(where.engines), disjoint=where.disjoint, utilization=utilization
        ),
        utilization=utilization,
    )


def inventory(config: Config, model: DecoderConfig, where: DevicePlacement) -> Inventory:
    """Return programs and arrays of a run.

    Raises:
        ConfigError: a mesh does not divide the model, or the configuration does not go with it.
    """
    learner = learner_inventory(config, model, where.learner)
    made, published, holds = learner.inventory, learner.published, learner.holds
    if where.engines:
        mesh = where.engines[0]  # the others are like it
        shapes, there = model.parameter_shapes(), learner_shardings(model, mesh)
        if config.rollout.placement == "separate":  # from files, read for these very devices
            published, holds = described(shapes, there), frozenset()
        elif len(where.engines) > 1:  # copied for each of them
            published, holds = described(shapes, there, dtype=config.rollout.jetstream.dtype), frozenset()
        rollout = engine_inventory(config, model, mesh, published, holds)
        made.programs += rollout.programs
        made.residents += rollout.residents
    return made


def loads(inventory: Inventory, compiled: Sequence[Compiled], *, capacity: int) -> list[Load]:
    """Return the load of each program.

    Args:
        inventory: programs and resident arrays.
        compiled: the inventory's programs.
        capacity: bytes of a chip.
    """
    sizes = padded(inventory.residents, compiled)
    return [_load(one, inventory.residents, sizes, capacity) for one in compiled]


def _load(one: Compiled, residents: Sequence[Resident], sizes: Mapping[str, float], capacity: int) -> Load:
    program = one.program
    here = set(program.mesh.devices.flat)
    there = [r for r in residents if program.phase not in r.absent or r.name in program.holds]

    def on(device: Device) -> dict[str, int]:
        return {r.name: round(r.bytes[device] * sizes[r.name]) for r in there if device in r.bytes}

    staying = max((on(device) for device in here), key=lambda parts: sum(parts.values()))
    held = sum(staying.get(name, 0) for name in program.holds)
    if one.memory is None:
        added = {TEMPORARIES: one.needs if "temporaries (" in (one.problem or "") else max(0, one.needs - held)}
    else:
        memory = one.memory
        added = {
            BATCH: max(0, memory.arguments - held) + memory.outputs - memory.aliased,
            TEMPORARIES: memory.temporaries,
            CODE: memory.code,
        }
    return Load(program=program, parts=staying | added, capacity=capacity, refused=one.memory is None)


def padded(residents: Sequence[Resident], compiled: Sequence[Compiled]) -> dict[str, float]:
    """Return each resident's padded size over its plain size: chips keep arrays in tiles of 8 x 128 numbers.

    Where a program's outputs take the memory of residents, the compiler has said how much that is; where one resident
    among several is not known, it is what is left. 1 where no program says.
    """
    plain = {r.name: max(r.bytes.values()) for r in residents}
    known: dict[str, float] = {}
    said = sorted(
        ((one.program.donates, one.memory.aliased) for one in compiled if one.memory and one.program.donates),
        key=lambda pair: len(pair[0]),
    )
    for names, total in said:
        unknown = [name for name in names if name not in known]
        if len(unknown) == 1:
            known[unknown[0]] = total - sum(known[name] for name in names if name in known)
    return {name: max(1.0, known[name] / size) if name in known and size else 1.0 for name, size in plain.items()}
