"""A plan: a run's programs compiled for a slice, whether they fit, and the time of a step."""

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
    TokenKind,
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
from jax_agent_rl.jetstream.sharding import learner_shardings
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.models.sharding import Device
from jax_agent_rl.runtime.engine_devices import engine_shapes, of_one_host, parameter_dtype
from jax_agent_rl.types.supports import mask_words
from jax_agent_rl.utils.hub import hub_name

BATCH = "gradients and batches"
TEMPORARIES = "temporaries"
CODE = "code"


@dataclass(frozen=True, kw_only=True)
class Load:
    """The fullest chip of a program while it runs there.

    Attributes:
        parts: bytes by kind, in order.
        capacity: bytes of a chip.
        refused: the compiler refused the program, so that ``parts`` may be too small.
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
            ``learner.share_prefixes``.
        rollout: seconds of sampling; with ``rollout.deterministic``, of scoring as well.
        learner: seconds of the learner's programs.
        weights: seconds of the publication of weights.
        overlapped: rollout and learner work at the same time, on chips of their own.
        bounds: parts whose seconds are a lower bound, as exchanges in one of their programs are not
            known.
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
        if self.overlapped:
            return max(self.rollout, self.learner) + self.weights
        return self.rollout + self.learner + self.weights

    @property
    def waits(self) -> tuple[str, float]:
        """Which side waits, and for which share of the step."""
        if not self.overlapped:
            return "both, in turn", 1.0
        side = "learner" if self.rollout > self.learner else "engines"
        if not self.seconds:
            return side, 0.0
        return side, abs(self.rollout - self.learner) / self.seconds


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Bytes that engines report of a step's draws, for the learner to score what was sampled.

    A draw's support is the set of ids that the sampling settings left possible.

    Attributes:
        masks: bytes of supports as they leave the engines' chips and reach the learner's: a bit for
            each id and draw.
        supports: most bytes of supports on their way between processes; a nucleus of few ids takes
            much less.
        experts: bytes of a mixture's routes: one number for each position, layer and chosen expert.
    """

    masks: int
    supports: int
    experts: int

    @classmethod
    def of(cls, config: Config, model: DecoderConfig) -> Replay:
        """Return the bytes of a step with trajectories of full length."""
        agent = config.agent
        members = config.rollout.prompts_per_step * config.rollout.group_size

        draws = 0
        if config.replays_supports:
            draws = members * agent.max_response_length
        mask_bytes = 4 * mask_words(model.vocab_size)
        base64_bytes = math.ceil(4 / 3 * mask_bytes)

        route_bytes = 0
        if model.experts is not None:
            positions = members * (agent.max_prompt_length + agent.max_response_length)
            number_bytes = 2 if model.experts.count > 256 else 1
            choices = len(model.expert_layers) * model.experts.per_token
            route_bytes = positions * choices * number_bytes
        return cls(masks=draws * mask_bytes, supports=draws * base64_bytes, experts=route_bytes)


@dataclass(frozen=True, kw_only=True)
class ResourcePlan:
    """Plan of one configuration on one slice.

    Attributes:
        compiled: programs of the run.
        loads: the fullest chip of each program.
        step: predicted time of a step.
        utilization: share of the ideal that programs reach of which the compiler gives no time.
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
        """Bytes of KV that engines keep in their host's memory, on the host with most engines."""
        engines = Counter[int]()
        for mesh in self.placement.engines:
            host = mesh.devices.flat[0].process_index
            engines[host] += mesh.shape["data"]
        return max(engines.values(), default=0) * engine_shapes(self.config).kv_offloading_bytes

    @property
    def host_memory(self) -> int:
        """Bytes of a host's memory."""
        chips = Counter(device.process_index for device in self.slice.devices)
        return self.slice.chip.host_bytes * max(chips.values())

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
        ModelError: the model's ``config.json`` is missing or of another family.
    """
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
    placement: DevicePlacement,
    *,
    only: Phase | None = None,
    renumbered: Callable[[Mesh], Mesh] = lambda mesh: mesh,
) -> Inventory:
    """Return programs and arrays of a run.

    Args:
        placement: devices of each phase.
        only: leave out what this phase does not need, ``learner`` or ``rollout``; None leaves out
            nothing.
        renumbered: returns the mesh for which to compile engines whose devices are not the
            learner's.

    Raises:
        ConfigError: a mesh does not divide the model, or the configuration does not go with it.
    """
    inventory = Inventory()
    published = None
    if only != "rollout":
        published = add_learner(inventory, config, model, placement.learner)
    if not placement.engines or only == "learner":
        return inventory

    mesh = placement.engines[0]  # the other meshes are like it
    compiled_for = mesh
    if set(mesh.devices.flat) != set(placement.learner.devices.flat):
        compiled_for = renumbered(mesh)

    shapes = model.parameter_shapes()
    shardings = learner_shardings(model, compiled_for)
    if published is None or config.rollout.placement == "separate":
        # From files, which are read for these very devices.
        published = Published(describe(shapes, shardings), frozenset())
    elif len(placement.engines) > 1:  # copied for each of them
        copies = describe(shapes, shardings, dtype=parameter_dtype(config))
        published = Published(copies, frozenset(), by_layer=True)
    hosts = 1
    if config.rollout.placement == "colocated":  # on every host
        hosts = len(placement.engines)
    add_engine(
        inventory,
        of_one_host(config, hosts),
        model,
        mesh,
        published,
        compiled_for=compiled_for,
        engines=placement.engine_count // hosts,
    )
    return inventory


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
        utilization: share of the ideal that programs reach of which the compiler gives no time.
        on_progress: takes a line of progress.

    Raises:
        ConfigError: the configuration does not go with the slice.
    """
    config = choose_engine_mesh(config, model, slice)
    placement = place_devices(config, slice.devices)
    for line in list_idle(config, slice, placement):
        on_progress(line)

    on_progress("tracing")
    parts = inventory(config, model, placement, renumbered=slice.renumbered)

    compiled: list[Compiled] = []
    previous = ""
    for number, program in enumerate(parts.programs, 1):
        on_progress(f"compiling {program.name} ({number} of {len(parts.programs)}){previous}")
        result = compile_program(program, slice.chip, keeps_answers=True)
        compiled.append(result)
        previous = f"; {program.name}: {result.summary(slice.chip)}"

    step = sum_step(
        config,
        compiled,
        slice.chip,
        engines=placement.engine_count,
        disjoint=placement.disjoint,
        utilization=utilization,
    )
    return ResourcePlan(
        config=config,
        model=model,
        slice=slice,
        placement=placement,
        compiled=tuple(compiled),
        loads=tuple(loads(parts, compiled, capacity=slice.chip.hbm_bytes)),
        step=step,
        utilization=utilization,
    )


def loads(inventory: Inventory, compiled: Sequence[Compiled], *, capacity: int) -> list[Load]:
    """Return the load of each program of an inventory on a chip of ``capacity`` bytes."""
    padding = padding_ratios(inventory.residents, compiled)
    return [_load(result, inventory.residents, padding, capacity) for result in compiled]


def _load(
    compiled: Compiled, residents: Sequence[Resident], padding: Mapping[str, float], capacity: int
) -> Load:
    """Return the load of one program.

    Args:
        padding: see :func:`padding_ratios`.
    """
    program = compiled.program
    present = []
    for resident in residents:
        if program.phase not in resident.absent or resident.name in program.holds:
            present.append(resident)

    def bytes_on(device: Device) -> dict[str, int]:
        sizes = {}
        for resident in present:
            if device in resident.bytes:
                sizes[resident.name] = round(resident.bytes[device] * padding[resident.name])
        return sizes

    devices = set(program.mesh.devices.flat)
    resident_bytes = max(map(bytes_on, devices), key=lambda sizes: sum(sizes.values()))
    # The program's arguments are among the residents: they count once.
    held = sum(resident_bytes.get(name, 0) for name in program.holds)

    if compiled.memory is not None:
        memory = compiled.memory
        added = {
            BATCH: max(0, memory.arguments - held) + memory.outputs - memory.aliased,
            TEMPORARIES: memory.temporaries,
            CODE: memory.code,
        }
    elif "temporaries (" in (compiled.problem or ""):  # the message says these alone
        added = {TEMPORARIES: compiled.required_bytes}
    else:
        added = {TEMPORARIES: max(0, compiled.required_bytes - held)}
    return Load(
        program=program,
        parts=resident_bytes | added,
        capacity=capacity,
        refused=compiled.memory is None,
    )


def padding_ratios(residents: Sequence[Resident], compiled: Sequence[Compiled]) -> dict[str, float]:
    """Return each resident's padded size over its plain size, by name.

    Chips keep arrays in tiles of 8 x 128 numbers. Where a program's outputs take the memory of
    residents, the compiler reports their size; the one unknown resident among several takes what is
    left. The ratio is 1 where no program reports it.
    """
    sizes = {resident.name: max(resident.bytes.values()) for resident in residents}
    reports = []
    for result in compiled:
        program = result.program
        if result.memory is None or not program.donates:
            continue
        total = float(result.memory.aliased)
        if program.donated_bytes:  # the rest of it is padded in the same way
            total *= sum(sizes[name] for name in program.donates) / program.donated_bytes
        reports.append((program.donates, total))
    reports.sort(key=lambda report: len(report[0]))

    padded: dict[str, float] = {}
    for names, total in reports:
        unknown = [name for name in names if name not in padded]
        if len(unknown) == 1:
            padded[unknown[0]] = total - sum(padded[name] for name in names if name in padded)

    ratios = {}
    for resident in residents:
        size = sizes[resident.name]
        ratios[resident.name] = 1.0
        if resident.name in padded and size:
            ratios[resident.name] = max(1.0, padded[resident.name] / size)
    return ratios


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
        engines: number of engines on the slice; 0 if they run elsewhere: then only the learner
            counts.
        disjoint: learner and engines share no chip.
        utilization: share of the ideal that programs reach of which the compiler gives no time.
    """
    groups = config.rollout.prompts_per_step
    members = config.rollout.group_size
    prompt = config.agent.max_prompt_length
    response = config.agent.max_response_length
    prompt_copies = 1 if config.learner.share_prefixes else members
    # With rollout.deterministic: prompts, answers, then the whole contexts for their old log-probs.
    fed = groups * (prompt + members * response) + groups * members * (prompt + response)
    tokens: dict[TokenKind, int] = {
        "prompts": groups * prompt,
        "sampled": groups * members * response,
        "trained": groups * (prompt_copies * prompt + members * response),
        "fed": fed,
    }

    phases: dict[Phase, float] = {"learner": 0.0, "weights": 0.0, "rollout": 0.0}
    bounds: set[Phase] = set()
    for result in compiled:
        program = result.program
        calls = program.calls
        if program.token_kind is not None:
            calls *= math.ceil(tokens[program.token_kind] / program.tokens)
        if result.prediction is None:
            seconds = ideal_seconds(result, chip).total / utilization
        else:
            seconds = result.prediction.seconds
        phases[program.phase] += calls * seconds
        if program.calls and not result.exchanges_known:
            bounds.add(program.phase)
    return StepTime(
        sampled=tokens["sampled"],
        trained=tokens["trained"],
        rollout=phases["rollout"] / max(engines, 1),
        learner=phases["learner"],
        weights=phases["weights"],
        overlapped=disjoint and config.trainer.mode != "sync",
        bounds=tuple(sorted(bounds)),
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
        on_progress: takes a line of progress.

    Raises:
        ConfigError: the configuration does not go with the slice, or the run has no such program.
    """
    on_progress("tracing")
    only = "learner" if profile == "learner" else "rollout"
    config = choose_engine_mesh(config, model, slice)
    placement = place_devices(config, slice.devices)
    parts = inventory(config, model, placement, only=only, renumbered=slice.renumbered)

    selected = []
    for program in parts.programs:
        if profile in (program.phase, program.name.split()[0]):
            selected.append(program)
    if not selected:
        names = ", ".join(program.name for program in parts.programs)
        raise ConfigError(
            f"--profile {profile}: this run has no such program on the slice, only {names}"
        )

    compiled = []
    for program in selected:
        on_progress(f"compiling {program.name}")
        compiled.append(compile_program(program, slice.chip))
    return compiled
