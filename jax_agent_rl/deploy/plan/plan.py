"""A plan: a run's programs compiled for a slice, whether they fit, and the time of a step of them."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jax.sharding import Mesh

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.compiled import (
    Compiled,
    Inventory,
    Phase,
    Program,
    Published,
    Resident,
    Tokens,
    compile_program,
    ideal_seconds,
)
from jax_agent_rl.deploy.plan.engine_programs import add_engine
from jax_agent_rl.deploy.plan.learner_programs import add_learner, describe
from jax_agent_rl.deploy.plan.topology import (
    Chip,
    DevicePlacement,
    Slice,
    choose_engine_mesh,
    list_idle,
    place_devices,
)
from jax_agent_rl.errors import ConfigError, ModelError
from jax_agent_rl.generation import mask_words
from jax_agent_rl.jetstream.sharding import learner_shardings
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.models.sharding import Device
from jax_agent_rl.runtime.engine_devices import engine_shapes
from jax_agent_rl.utils.hub import hub_name

BATCH, TEMPORARIES, CODE = "gradients and batches", "temporaries", "code"


@dataclass(frozen=True, kw_only=True)
class Load:
    """The fullest chip of a program while it runs there.

    Attributes:
        parts: bytes by kind, in order.
        refused: the compiler refused the program; then parts are as large as its message says, or
            smaller.
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
class StepTime:
    """A training step with trajectories of full length.

    Attributes:
        sampled: tokens sampled.
        trained: tokens in packed rows; a group's common prompt counts once with
        ``learner.share_prefixes``. rollout, learner, weights: seconds of each part. overlapped:
        rollout and learner work at the same time, on chips of their own. bounds: parts whose
        seconds are a lower bound, as exchanges in one of their programs are not known.
    """

    sampled: int
    trained: int
    rollout: float
    learner: float
    weights: float
    overlapped: bool
    bounds: tuple[Phase, ...] = ()

    @property
    def seconds(self) -> float:
        both = max(self.rollout, self.learner) if self.overlapped else self.rollout + self.learner
        return both + self.weights

    @property
    def waits(self) -> tuple[str, float]:
        """Which side waits, and for which share of the step."""
        if not self.overlapped:
            return "both, in turn", 1.0
        who = "learner" if self.rollout > self.learner else "engines"
        return who, abs(self.rollout - self.learner) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Bytes that engines report of the draws of a step, for the learner to score what was sampled.

    Attributes:
        masks: of supports, as they leave the engines' chips and reach the learner's: a bit for each
            id and draw.
        supports: of supports on their way between processes, at most; a nucleus of few ids takes
            much less.
        experts: of a mixture's routes, one number for each position, layer and chosen expert.
    """

    masks: int
    supports: int
    experts: int

    @classmethod
    def of(cls, config: Config, model: DecoderConfig) -> Replay:
        """Return the bytes of a step with trajectories of full length."""
        rollout, agent, experts = config.rollout, config.agent, model.experts
        members = rollout.prompts_per_step * rollout.group_size
        draws = members * agent.max_response_length if config.replays_supports else 0
        routes = 0
        if experts is not None:
            positions = members * (agent.max_prompt_length + agent.max_response_length)
            routes = (
                positions * model.num_layers * experts.per_token * (2 if experts.count > 256 else 1)
            )
        mask = 4 * mask_words(model.vocab_size)
        return cls(masks=draws * mask, supports=draws * math.ceil(4 / 3 * mask), experts=routes)


@dataclass(frozen=True, kw_only=True)
class ResourcePlan:
    """Plan of one configuration on one slice.

    Attributes:
        compiled: programs of the run.
        loads: the fullest chip of each.
        step: predicted time of a step.
    """

    config: Config
    model: DecoderConfig
    slice: Slice
    placement: DevicePlacement
    compiled: tuple[Compiled, ...]
    loads: tuple[Load, ...]
    step: StepTime
    utilization: float

    @property
    def fits(self) -> bool:
        return all(load.fits for load in self.loads) and self.host_pages <= self.host_memory

    @property
    def host_pages(self) -> int:
        """Bytes of KV that the engines of a host keep in its memory, on the host with most engines."""
        engines = Counter[int]()
        for mesh in self.placement.engines:
            engines[mesh.devices.flat[0].process_index] += mesh.shape["data"]
        return max(engines.values(), default=0) * engine_shapes(self.config).kv_offloading_bytes

    @property
    def host_memory(self) -> int:
        """Bytes of a host's memory."""
        return self.slice.chip.host_bytes * max(
            Counter(d.process_index for d in self.slice.devices).values()
        )

    @functools.cached_property
    def replay(self) -> Replay:
        return Replay.of(self.config, self.model)

    @property
    def fullest(self) -> Load:
        """The program that needs most of a chip."""
        return max(self.loads, key=lambda load: load.total)


def check(config: Config) -> DecoderConfig:
    """Return the model of a configuration that can be planned.

    Raises:
        ConfigError: it cannot be planned.
        ModelError: the model's ``config.json`` is missing or of another family.
    """
    if config.rollout.deterministic:
        raise ConfigError("plan: rollout.deterministic is for runs on one device; set it to false")
    try:
        return load_config(config.model.path)
    except ModelError as error:
        if hub_name(config.model.path) is None:
            raise
        raise ModelError(
            f"{error}, or name a well-known model by --architecture, which needs no files"
        ) from None


def inventory(
    config: Config,
    model: DecoderConfig,
    where: DevicePlacement,
    *,
    only: Phase | None = None,
    renumbered: Callable[[Mesh], Mesh] = lambda mesh: mesh,
) -> Inventory:
    """Return programs and arrays of a run.

    Args:
        config: configuration of the run.
        model: its architecture.
        where: devices of each phase.
        only: leave out what this phase does not need, ``learner`` or ``rollout``; None leaves out
            nothing.
        renumbered: returns the mesh for which to compile engines whose devices are not those of the
            learner.

    Raises:
        ConfigError: a mesh does not divide the model, or the configuration does not go with it.
    """
    made = Inventory()
    published = None if only == "rollout" else add_learner(made, config, model, where.learner)
    if where.engines and only != "learner":
        mesh = where.engines[0]  # the others are like it
        compiled_for = (
            mesh if {*mesh.devices.flat} == {*where.learner.devices.flat} else renumbered(mesh)
        )
        shapes, there = model.parameter_shapes(), learner_shardings(model, compiled_for)
        if (
            published is None or config.rollout.placement == "separate"
        ):  # from files, read for these very devices
            published = Published(describe(shapes, there), frozenset())
        elif len(where.engines) > 1:  # copied for each of them
            published = Published(
                describe(shapes, there, dtype=config.rollout.jetstream.dtype), frozenset()
            )
        add_engine(
            made,
            config,
            model,
            mesh,
            published,
            compiled_for=compiled_for,
            engines=where.engine_count,
        )
    return made


def make_plan(
    config: Config,
    model: DecoderConfig,
    slice: Slice,
    *,
    utilization: float,
    on_progress: Callable[[str], None] = lambda text: None,
) -> ResourcePlan:
    """Compile all programs of a run.

    Args:
        config: configuration of the run.
        model: its architecture.
        slice: the slice to plan for.
        utilization: share of the ideal that programs reach of which the compiler gives no time.
        on_progress: takes a line of progress.

    Raises:
        ConfigError: the configuration does not go with the slice.
    """
    config = choose_engine_mesh(config, model, slice)
    where = place_devices(config, slice.devices)
    for line in list_idle(config, slice, where):
        on_progress(line)
    on_progress("tracing")
    made = inventory(config, model, where, renumbered=slice.renumbered)
    compiled, before = [], ""
    for number, program in enumerate(made.programs, 1):
        on_progress(f"compiling {program.name} ({number} of {len(made.programs)}){before}")
        compiled.append(compile_program(program, slice.chip))
        before = f"; {program.name}: {compiled[-1].summary(slice.chip)}"
    return ResourcePlan(
        config=config,
        model=model,
        slice=slice,
        placement=where,
        compiled=tuple(compiled),
        loads=tuple(loads(made, compiled, capacity=slice.chip.hbm_bytes)),
        step=sum_step(
            config,
            compiled,
            slice.chip,
            engines=where.engine_count,
            disjoint=where.disjoint,
            utilization=utilization,
        ),
        utilization=utilization,
    )


def loads(inventory: Inventory, compiled: Sequence[Compiled], *, capacity: int) -> list[Load]:
    """Return the load of each program.

    Args:
        inventory: programs and resident arrays.
        compiled: the inventory's programs.
        capacity: bytes of a chip.
    """
    sizes = padded(inventory.residents, compiled)
    return [_load(one, inventory.residents, sizes, capacity) for one in compiled]


def _load(
    one: Compiled, residents: Sequence[Resident], sizes: Mapping[str, float], capacity: int
) -> Load:
    program = one.program
    here = set(program.mesh.devices.flat)
    there = [r for r in residents if program.phase not in r.absent or r.name in program.holds]

    def on(device: Device) -> dict[str, int]:
        return {r.name: round(r.bytes[device] * sizes[r.name]) for r in there if device in r.bytes}

    staying = max((on(device) for device in here), key=lambda parts: sum(parts.values()))
    held = sum(staying.get(name, 0) for name in program.holds)
    if one.memory is None:
        added = {
            TEMPORARIES: (
                one.needs if "temporaries (" in (one.problem or "") else max(0, one.needs - held)
            )
        }
    else:
        memory = one.memory
        added = {
            BATCH: max(0, memory.arguments - held) + memory.outputs - memory.aliased,
            TEMPORARIES: memory.temporaries,
            CODE: memory.code,
        }
    return Load(
        program=program, parts=staying | added, capacity=capacity, refused=one.memory is None
    )


def padded(residents: Sequence[Resident], compiled: Sequence[Compiled]) -> dict[str, float]:
    """Return each resident's padded size over its plain size: chips keep arrays in tiles of 8 x 128 numbers.

    Where a program's outputs take the memory of residents, the compiler reports their size; the one
    unknown resident among several takes what is left. 1 where no program reports it.
    """
    plain = {r.name: max(r.bytes.values()) for r in residents}
    known: dict[str, float] = {}
    reported = sorted(
        (
            (one.program.donates, one.memory.aliased)
            for one in compiled
            if one.memory and one.program.donates
        ),
        key=lambda pair: len(pair[0]),
    )
    for names, total in reported:
        unknown = [name for name in names if name not in known]
        if len(unknown) == 1:
            known[unknown[0]] = total - sum(known[name] for name in names if name in known)
    return {
        name: max(1.0, known[name] / size) if name in known and size else 1.0
        for name, size in plain.items()
    }


def sum_step(
    config: Config,
    compiled: Sequence[Compiled],
    chip: Chip,
    *,
    engines: int,
    disjoint: bool,
    utilization: float,
) -> StepTime:
    """Sum the programs of a run up to a step.

    Args:
        config: configuration of the run.
        compiled: its programs.
        chip: chip of the slice.
        engines: engines on the slice; 0 if they run elsewhere: then only the learner counts.
        disjoint: learner and engines share no chip.
        utilization: share of the ideal that programs reach of which the compiler gives no time.
    """
    groups, members = config.rollout.prompts_per_step, config.rollout.group_size
    prompt, response = config.agent.max_prompt_length, config.agent.max_response_length
    copies = 1 if config.learner.share_prefixes else members
    tokens: dict[Tokens | None, int] = {
        "prompts": groups * prompt,
        "sampled": groups * members * response,
        "trained": groups * (copies * prompt + members * response),
    }
    phases: dict[Phase, float] = dict.fromkeys(("learner", "weights", "rollout"), 0.0)
    for one in compiled:
        program = one.program
        calls = math.ceil(tokens[program.of] / program.tokens) if program.of else 1
        ideal = ideal_seconds(one, chip).total / utilization
        seconds = ideal if one.prediction is None else one.prediction.seconds
        phases[program.phase] += calls * program.calls * seconds
    return StepTime(
        sampled=tokens["sampled"],
        trained=tokens["trained"],
        rollout=phases["rollout"] / max(engines, 1),
        learner=phases["learner"],
        weights=phases["weights"],
        overlapped=disjoint and config.trainer.mode != "sync",
        bounds=tuple(
            sorted(
                {
                    one.program.phase
                    for one in compiled
                    if one.program.calls and not one.exchanges_known
                }
            )
        ),
    )


Profile = Literal["decode", "prefill", "learner"]


def compile_profiled(
    config: Config,
    model: DecoderConfig,
    slice: Slice,
    *,
    profile: Profile,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Compiled]:
    """Compile the programs of a run that are of one kind, and no others.

    Args:
        config: configuration of the run.
        model: its architecture.
        slice: the slice to compile for.
        profile: the kind.
        on_progress: takes a line of progress.

    Raises:
        ConfigError: the configuration does not go with the slice, or the run has no such program.
    """
    on_progress("tracing")
    only = "learner" if profile == "learner" else "rollout"
    config = choose_engine_mesh(config, model, slice)
    where = place_devices(config, slice.devices)
    programs = inventory(config, model, where, only=only, renumbered=slice.renumbered).programs
    chosen = [one for one in programs if profile in (one.phase, one.name.split()[0])]
    if not chosen:
        names = ", ".join(one.name for one in programs)
        raise ConfigError(
            f"--profile {profile}: this run has no such program on the slice, only {names}"
        )
    compiled = []
    for one in chosen:
        on_progress(f"compiling {one.name}")
        compiled.append(compile_program(one, slice.chip))
    return compiled
