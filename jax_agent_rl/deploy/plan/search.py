"""Layouts for a slice: all candidates are estimated, and the best compiled until some fit.

::

    meshes x batch sizes
      ─► divide the model, residents fit
      ─► estimated
      ─► the best is compiled ◄───────────────────────────────────────┐
           ├─► fits: counts; enough? ──► sorted by time               │
           └─► does not fit: its mesh's estimate is corrected, and    │
               fuller layouts of the mesh are left out ───────────────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.command import PlanResult
from jax_agent_rl.deploy.plan.compiled import format_bytes
from jax_agent_rl.deploy.plan.hlo import RING
from jax_agent_rl.deploy.plan.topology import (
    REMAT,
    Chip,
    Slice,
    as_overrides,
    batch_sizes,
    check_layout,
    choose_engine_mesh,
    engine_meshes,
    learner_meshes,
)
from jax_agent_rl.errors import CompilerError, ConfigError
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.runtime.engine_devices import (
    MASTER,
    ResidentBytes,
    engine_shapes,
    parameter_count,
)
from jax_agent_rl.types.supports import mask_words

TRIES = 3
"""Layouts compiled at most, per layout that should fit."""
MASK_WORD_BYTES = 4
"""Bytes of a word of a support's mask in the learner's micro-batches."""
EXPERT_NUMBER_BYTES = 2
"""Bytes of an expert's number in the learner's micro-batches."""
PRODUCTS = {"none": 6, "dots": 6, "full": 8}
"""Operations per parameter and token, by what the backward pass recomputes."""


@dataclass(frozen=True, kw_only=True)
class PlanEstimate:
    """Estimated memory and time of one configuration.

    Attributes:
        resident_bytes: lower bound of what stays on the fullest chip between programs.
        gradient_bytes: what a gradient adds: activations, and parameters gathered from other chips.
        seconds: time of a step, by products, weights read and what chips send for them.
    """

    resident_bytes: float
    gradient_bytes: float
    seconds: float

    @property
    def total(self) -> float:
        """Bytes of the fullest chip."""
        return self.resident_bytes + self.gradient_bytes


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout of a run.

    Attributes:
        changes: overrides of the configuration that was searched from.
        plan: the plan, once it is compiled.
        problem: why the compiler failed; None if it did not, or was not asked.
    """

    changes: tuple[str, ...]
    config: Config
    estimate: PlanEstimate
    plan: PlanResult | None = None
    problem: str | None = None

    @property
    def meshes(self) -> tuple[Any, ...]:
        """The meshes of learner and engine."""
        return self.config.learner.mesh, self.config.rollout.jetstream.mesh

    def is_at_least(self, other: Candidate) -> bool:
        """Return whether it has the other's meshes, and uses at least as much memory on them."""
        if self.meshes != other.meshes:
            return False
        learner = self.config.learner
        other_learner = other.config.learner
        slots = engine_shapes(self.config).max_concurrent_decodes
        other_slots = engine_shapes(other.config).max_concurrent_decodes
        return (
            learner.micro_batch_size >= other_learner.micro_batch_size
            and REMAT.index(learner.remat) <= REMAT.index(other_learner.remat)
            and slots >= other_slots
        )

    def as_json(self) -> dict[str, Any]:
        """Return the result of compiling, for JSON."""
        result = {
            "overrides": self.changes,
            "fits": False,
            "memory": None,
            "seconds": None,
            "problem": self.problem,
        }
        if self.plan is not None:
            result["fits"] = self.plan.fits
            result["memory"] = self.plan.memory
            result["seconds"] = self.plan.seconds
        return result


def candidates(
    configured: Callable[[Sequence[str]], Config], model: DecoderConfig, slice: Slice
) -> list[Candidate]:
    """Return all layouts whose meshes divide the model and whose arrays fit, best first.

    Args:
        configured: returns the configuration with overrides.

    Raises:
        ConfigError: there is none.
    """
    layouts: list[Candidate] = []
    reasons: set[str] = set()
    config = configured(())
    capacity = slice.chip.hbm_bytes
    for learner_mesh in learner_meshes(config, model, slice):
        for engine_mesh in engine_meshes(config, model, slice):
            meshes = {**learner_mesh, **engine_mesh}
            try:
                placement = check_layout(configured(as_overrides(meshes)), model, slice)
            except ConfigError as error:
                reasons.add(str(error))
                continue

            for sizes in batch_sizes(config):
                choice = {**meshes, **sizes}
                changed = choose_engine_mesh(configured(as_overrides(choice)), model, slice)
                estimated = estimate(
                    changed, model, slice.chip, engines=max(1, placement.engine_count)
                )
                if estimated.resident_bytes > capacity:
                    reasons.add(
                        f"what stays on a chip takes {format_bytes(estimated.resident_bytes)} of"
                        f" {format_bytes(capacity)}"
                    )
                    continue
                changes = as_overrides(choice, changing=config)
                layouts.append(Candidate(changes=changes, config=changed, estimate=estimated))

    if not layouts:
        raise ConfigError(
            f"no mesh for {slice.name}: {min(reasons, key=len)}; take a larger --topology,"
            " learner.lora, or a smaller rollout.jetstream.kv_cache_tokens"
        )
    return sorted(layouts, key=lambda layout: _order(layout, capacity))


def _order(layout: Candidate, capacity: int, correction: float = 1.0) -> tuple[bool, float, float]:
    """Return a sort key: layouts that should fit come first, by time; the others by memory."""
    total = layout.estimate.total * correction
    if total <= capacity:
        return False, layout.estimate.seconds, total
    return True, total, layout.estimate.seconds


def search(
    layouts: Sequence[Candidate],
    plan: Callable[[Candidate], PlanResult],
    *,
    capacity: int,
    budget: int,
) -> list[Candidate]:
    """Compile the best layouts until some fit.

    Those that fit are returned first, by step time; the others follow, by memory. A layout that
    fits is the best of its meshes by the estimate, so other meshes follow. One that does not fit
    corrects the estimate for the learner's mesh, and excludes fuller ones. Where the compiler
    fails, batch sizes do not matter: other layouts of these meshes are left out.

    Args:
        layouts: see :func:`candidates`.
        plan: compiles one.
        capacity: bytes of a chip.
        budget: how many should fit; :data:`TRIES` times as many are compiled at most.

    Raises:
        CompilerError: the compiler fails on every one.
    """
    waiting = list(layouts)
    tried: list[Candidate] = []
    fitting = 0
    corrections: dict[Any, float] = {}  # by learner mesh

    def order(layout: Candidate) -> tuple[bool, float, float]:
        return _order(layout, capacity, corrections.get(layout.config.learner.mesh, 1.0))

    while waiting and fitting < budget and len(tried) < TRIES * budget:
        best = min(waiting, key=order)
        try:
            result = plan(best)
        except CompilerError as error:
            tried.append(replace(best, problem=str(error)))
            waiting = [layout for layout in waiting if layout.meshes != best.meshes]
            continue

        tried.append(replace(best, plan=result))
        if result.fits:
            fitting += 1
            waiting = [layout for layout in waiting if layout.meshes != best.meshes]
        else:
            corrections[best.config.learner.mesh] = result.memory / best.estimate.total
            waiting = [layout for layout in waiting if not layout.is_at_least(best)]

    if all(layout.plan is None for layout in tried):
        raise CompilerError(
            f"none of {len(tried)} layouts could be compiled; of the first: {tried[0].problem}"
        )
    return sorted(tried, key=_rank)


def _rank(layout: Candidate) -> tuple[int, float]:
    """Return a sort key of compiled layouts: fitting ones by time, others by memory, failures."""
    if layout.plan is None:
        return 2, 0.0
    if layout.plan.fits:
        return 0, layout.plan.seconds
    return 1, layout.plan.memory


def layout_table(tried: Sequence[Candidate]) -> Table:
    """Return a table of the layouts that were tried, best first."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("step", "fullest chip", "change"):
        table.add_column(heading, no_wrap=heading != "change")
    for layout in tried:
        step = "-"
        if layout.plan is None:
            memory = "compiler failed"
        elif layout.plan.fits:
            memory = format_bytes(layout.plan.memory)
            step = f"{layout.plan.seconds:.3g} s"
        else:
            memory = f"{format_bytes(layout.plan.memory)} !"
        table.add_row(step, memory, " ".join(layout.changes) or "as it is configured")
    return table


def verdict(tried: Sequence[Candidate]) -> str:
    """Return a sentence on which layout to take."""
    best = tried[0]
    if best.plan is None or not best.plan.fits:
        return f"none of these {len(tried)} fits; what follows is of the one that takes least"
    if not best.changes:
        return "what is configured is the best of these"
    return f"the first, as overrides: {' '.join(best.changes)}"


# --- estimates ------------------------------------------------------------------------------------


def estimate(config: Config, model: DecoderConfig, chip: Chip, *, engines: int) -> PlanEstimate:
    """Estimate memory and time, to compare configurations by.

    Resident bytes are a lower bound, and a gradient's bytes rough.

    Args:
        engines: number of engines that sample concurrently.
    """
    rollout = config.rollout
    engine_devices = rollout.jetstream.mesh.engine_devices
    resident = ResidentBytes.estimate(config, model, devices=engine_devices)
    learner_bytes = resident.learner
    engine_bytes = resident.serving(engine_shapes(config))
    shares_chips = (
        rollout.placement != "separate"
        and rollout.jetstream.device_offset < config.learner.mesh.devices
    )
    if shares_chips and not rollout.sleep_during_update:
        resident_bytes = learner_bytes + engine_bytes
    else:  # on chips of their own, or in turn on the same
        resident_bytes = max(learner_bytes, engine_bytes)

    gradient_bytes = (
        _activation_bytes(config, model)
        + _gathered_bytes(config, model)
        + _replayed_bytes(config, model)
    )
    rollout_seconds = _rollout_seconds(config, chip, resident.weights, resident.position)
    seconds = _train_seconds(config, model, chip) + rollout_seconds / engines
    return PlanEstimate(
        resident_bytes=resident_bytes, gradient_bytes=gradient_bytes, seconds=seconds
    )


def _activation_bytes(config: Config, model: DecoderConfig) -> float:
    """Estimate a chip's bytes of activations for the backward pass, and of a layer's work space.

    Counted per token: projections and the gate's products, sharded over the axis ``tensor``, and
    whole hidden states. A layer's backward pass holds all its activations, and as many derivatives.
    """
    learner = config.learner
    mesh = learner.mesh
    tokens = learner.micro_batch_size * learner.pack_length / mesh.context
    queries = model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    hidden = model.hidden_size
    if model.experts is None:
        intermediate = model.intermediate_size
    else:
        intermediate = model.experts.per_token * model.experts.intermediate_size

    # Numbers per token and layer, by what the backward pass does not recompute.
    dots = (queries + 2 * keys + 2 * intermediate) / mesh.tensor + 3 * hidden
    everything = (3 * queries + 4 * keys + 5 * intermediate) / mesh.tensor + 8 * hidden
    saved = {"none": everything, "dots": dots, "full": hidden}[learner.remat]
    return tokens * _compute_width(config) * (model.num_layers * saved + 2 * everything)


def _gathered_bytes(config: Config, model: DecoderConfig) -> float:
    """Estimate a chip's bytes of gathered parameters: of two layers and the vocabulary."""
    mesh = config.learner.mesh
    if mesh.fsdp == 1:
        return 0.0
    shapes = model.parameter_shapes()
    layer = sum(math.prod(shape[1:]) for shape in shapes["layers"].values())
    vocabulary = math.prod(shapes["embed"])
    return (2 * layer / mesh.expert + vocabulary) / mesh.tensor * _compute_width(config)


def _replayed_bytes(config: Config, model: DecoderConfig) -> float:
    """Return a chip's bytes of supports and experts beside the tokens of a micro-batch."""
    bytes_per_token = 0
    if config.replays_supports:
        bytes_per_token += MASK_WORD_BYTES * mask_words(model.vocab_size)
    if model.experts is not None:
        bytes_per_token += EXPERT_NUMBER_BYTES * model.num_layers * model.experts.per_token
    return config.learner.micro_batch_size * config.learner.pack_length * bytes_per_token


def _compute_width(config: Config) -> int:
    """Return the bytes of a number in the learner's compute dtype."""
    return 2 if config.learner.compute_dtype == "bfloat16" else 4


def _train_seconds(config: Config, model: DecoderConfig, chip: Chip) -> float:
    """Estimate the seconds to train on a step's tokens."""
    mesh = config.learner.mesh
    rollout = config.rollout
    agent = config.agent
    parameters = parameter_count(model)
    width = _compute_width(config)

    rows = config.learner.micro_batch_size * mesh.data * mesh.fsdp * mesh.expert
    length = config.learner.pack_length
    group_tokens = rollout.group_size * agent.max_response_length + agent.max_prompt_length
    calls = math.ceil(rollout.prompts_per_step * group_tokens / (rows * length))

    operations = PRODUCTS[config.learner.remat] * parameters * rows * length
    product_seconds = operations / mesh.devices / chip.flops

    # Bytes that a chip sends for one micro-batch, along each axis.
    layers = model.num_layers
    tokens = config.learner.micro_batch_size * length / mesh.context
    kv_size = model.num_kv_heads * model.head_dim
    copies = mesh.data * mesh.context  # of each gradient
    weights = parameters / (mesh.tensor * mesh.expert) * (2 * width + MASTER) * (1 - 1 / mesh.fsdp)
    activations = 4 * layers * tokens * model.hidden_size * width * 2 * (1 - 1 / mesh.tensor)
    kv = 6 * layers * tokens * kv_size * width * (mesh.context - 1)
    gradients = 2 * MASTER * parameters / (mesh.tensor * mesh.expert * mesh.fsdp) * (1 - 1 / copies)
    link_seconds = (weights + activations + kv + gradients) / (RING * chip.link_bandwidth)
    return calls * max(product_seconds, link_seconds)


def _rollout_seconds(config: Config, chip: Chip, weights: float, position: float) -> float:
    """Estimate the seconds in which one engine samples a step's tokens.

    A decode step reads the weights and half of each slot's longest context.
    """
    rollout = config.rollout
    slots = engine_shapes(config).max_concurrent_decodes
    members = rollout.prompts_per_step * rollout.group_size
    steps = members * config.agent.max_response_length / slots
    kv = slots * rollout.max_model_len / 2 * position
    return steps * (weights + kv) / chip.hbm_bandwidth
