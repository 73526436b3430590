"""Layouts for a slice: all candidates are estimated, and the best compiled until some fit.

::

    meshes x batches ─► divide the model, what stays fits ─► estimated ─► best is compiled ─► fits: counts ─► enough?
                                                                 ▲                        └── does not ─┐
                                                                 └ its mesh's estimate is corrected, ◄──┘
                                                                   fuller ones are left out
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
from jax_agent_rl.generation import mask_words
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.runtime.engine_devices import (
    MASTER,
    ResidentBytes,
    engine_shapes,
    parameter_count,
)

TRIES = 3
"""Layouts compiled at most, per layout that should fit."""
WORD, ROUTED = 4, 2
"""Bytes of a word of a support's mask, and of an expert's number, in the learner's micro-batches.
"""
PRODUCTS = {"none": 6, "dots": 6, "full": 8}
"""Operations per parameter and token, by what the backward pass recomputes."""


@dataclass(frozen=True, kw_only=True)
class PlanEstimate:
    """Estimated memory and time of one configuration.

    Attributes:
        stays: lower bound of the bytes resident on the fullest chip.
        passes: bytes that a gradient adds: activations, and parameters gathered from other chips.
        seconds: time of a step, by products, weights read and what chips send for them.
    """

    stays: float
    passes: float
    seconds: float

    @property
    def total(self) -> float:
        """Bytes of the fullest chip."""
        return self.stays + self.passes


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout of a run.

    Attributes:
        changes: overrides of the configuration that was searched from.
        plan: the plan, once compiled.
        problem: why the compiler failed.
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

        def sizes(config: Config) -> tuple[int, int, int]:
            kept = len(REMAT) - REMAT.index(config.learner.remat)
            return (
                config.learner.micro_batch_size,
                kept,
                engine_shapes(config).max_concurrent_decodes,
            )

        pairs = zip(sizes(self.config), sizes(other.config), strict=True)
        return self.meshes == other.meshes and all(mine >= theirs for mine, theirs in pairs)

    def as_json(self) -> dict[str, Any]:
        """Return the result of compiling, for JSON."""
        found = {"fits": False, "memory": None, "seconds": None, "problem": self.problem}
        if self.plan is not None:
            found |= {
                "fits": self.plan.fits,
                "memory": self.plan.memory,
                "seconds": self.plan.seconds,
            }
        return {"overrides": self.changes, **found}


def candidates(
    configured: Callable[[Sequence[str]], Config], model: DecoderConfig, slice: Slice
) -> list[Candidate]:
    """Return all layouts whose meshes divide the model and whose arrays fit, best first.

    Args:
        configured: returns the configuration with overrides.
        model: its architecture.
        slice: the slice to plan for.

    Raises:
        ConfigError: there is none.
    """
    found: list[Candidate] = []
    reasons: set[str] = set()
    config = configured(())
    for learner in learner_meshes(config, model, slice):
        for engine in engine_meshes(config, model, slice):
            meshes = {**learner, **engine}
            try:
                where = check_layout(configured(as_overrides(meshes)), model, slice)
            except ConfigError as error:
                reasons.add(str(error))
                continue
            for sizes in batch_sizes(config):
                choice = {**meshes, **sizes}
                made = choose_engine_mesh(configured(as_overrides(choice)), model, slice)
                guess = estimate(made, model, slice.chip, engines=max(1, where.engine_count))
                if guess.stays <= slice.chip.hbm_bytes:
                    changes = as_overrides(choice, changing=config)
                    found.append(Candidate(changes=changes, config=made, estimate=guess))
                else:
                    stays, there = format_bytes(guess.stays), format_bytes(slice.chip.hbm_bytes)
                    reasons.add(f"what stays on a chip takes {stays} of {there}")
    if not found:
        raise ConfigError(
            f"no mesh for {slice.name}: {min(reasons, key=len)}; take a larger --topology,"
            " learner.lora, or a smaller rollout.jetstream.kv_cache_tokens"
        )
    return sorted(found, key=lambda one: _order(one, slice.chip.hbm_bytes))


def _order(one: Candidate, capacity: int, correction: float = 1.0) -> tuple[bool, float, float]:
    """Return a sort key: those that should fit come first, by time; the others by memory."""
    total = one.estimate.total * correction
    return (
        (False, one.estimate.seconds, total)
        if total <= capacity
        else (True, total, one.estimate.seconds)
    )


def search(
    found: Sequence[Candidate],
    plan: Callable[[Candidate], PlanResult],
    *,
    capacity: int,
    budget: int,
) -> list[Candidate]:
    """Compile the best until some fit; return those that fit by step time, then the others by memory.

    A layout that fits is the best of its meshes by the estimate, so other meshes follow. One that
    does not fit corrects the estimate for the learner's mesh, and excludes fuller ones. Where the
    compiler fails, batch sizes do not matter: other layouts of these meshes are left out.

    Args:
        found: see :func:`candidates`.
        plan: compiles one.
        capacity: bytes of a chip.
        budget: how many should fit; :data:`TRIES` times as many are compiled at most.

    Raises:
        CompilerError: the compiler fails on every one.
    """
    waiting, tried, fitting = list(found), list[Candidate](), 0
    corrections: dict[Any, float] = {}
    while waiting and fitting < budget and len(tried) < TRIES * budget:
        one = min(
            waiting,
            key=lambda each: _order(each, capacity, corrections.get(each.config.learner.mesh, 1.0)),
        )
        try:
            made = plan(one)
        except CompilerError as error:
            tried.append(replace(one, problem=str(error)))
            waiting = [each for each in waiting if each.meshes != one.meshes]
            continue
        tried.append(replace(one, plan=made))
        if made.fits:
            fitting += 1
            waiting = [each for each in waiting if each.meshes != one.meshes]
        else:
            corrections[one.config.learner.mesh] = made.memory / one.estimate.total
            waiting = [each for each in waiting if not each.is_at_least(one)]
    if all(one.plan is None for one in tried):
        raise CompilerError(
            f"none of {len(tried)} layouts could be compiled; of the first: {tried[0].problem}"
        )

    def rank(one: Candidate) -> tuple[int, float]:
        if one.plan is None:
            return 2, 0.0
        return (0, one.plan.seconds) if one.plan.fits else (1, one.plan.memory)

    return sorted(tried, key=rank)


def table(searched: Sequence[Candidate]) -> Table:
    """Tabulate what was tried, best first."""
    made = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("step", "fullest chip", "change"):
        made.add_column(heading, no_wrap=heading != "change")
    for one in searched:
        step, full = "-", "compiler failed"
        if one.plan is not None:
            full = format_bytes(one.plan.memory) + ("" if one.plan.fits else " !")
            step = f"{one.plan.seconds:.3g} s" if one.plan.fits else "-"
        made.add_row(step, full, " ".join(one.changes) or "as it is configured")
    return made


def verdict(searched: Sequence[Candidate]) -> str:
    """Return a sentence on which layout to take."""
    best = searched[0]
    if best.plan is None or not best.plan.fits:
        return f"none of these {len(searched)} fits; what follows is of the one that takes least"
    if not best.changes:
        return "what is configured is the best of these"
    return f"the first, as overrides: {' '.join(best.changes)}"


# --- estimates ------------------------------------------------------------------------------------


def estimate(config: Config, model: DecoderConfig, chip: Chip, *, engines: int) -> PlanEstimate:
    """Estimate memory (resident: a lower bound; a gradient's: roughly) and a time to compare configurations by.

    Args:
        config: configuration of the run.
        model: its architecture.
        chip: chip of the slice.
        engines: engines that sample concurrently.
    """
    learner, engine = config.learner.mesh, config.rollout.jetstream.mesh
    resident = ResidentBytes.estimate(config, model, devices=engine.engine_devices)
    state, serving = resident.learner, resident.serving(engine_shapes(config))
    shared = (
        config.rollout.placement != "separate"
        and config.rollout.jetstream.device_offset < learner.devices
    )
    in_turn = (
        state + serving
        if shared and not config.rollout.sleep_during_update
        else max(state, serving)
    )
    return PlanEstimate(
        stays=in_turn,
        passes=_activation_bytes(config, model)
        + _gathered_bytes(config, model)
        + _replayed_bytes(config, model),
        seconds=_train_seconds(config, model, chip)
        + _rollout_seconds(config, chip, resident.weights, resident.position) / engines,
    )


def _activation_bytes(config: Config, model: DecoderConfig) -> float:
    """Estimate a chip's bytes of activations kept for the backward pass, and of a layer's work space.

    Counted per token: projections and the gate's products, sharded over the axis ``tensor``, and
    whole hidden states. A layer's backward pass holds all its activations, and as many derivatives.
    """
    learner, mesh = config.learner, config.learner.mesh
    tokens = learner.micro_batch_size * learner.pack_length / mesh.context
    queries, keys, hidden = (
        model.num_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
        model.hidden_size,
    )
    experts = model.experts
    forward = (
        model.intermediate_size
        if experts is None
        else experts.per_token * experts.intermediate_size
    )
    dots = (queries + 2 * keys + 2 * forward) / mesh.tensor + 3 * hidden
    everything = (3 * queries + 4 * keys + 5 * forward) / mesh.tensor + 8 * hidden
    kept = {"none": everything, "dots": dots, "full": hidden}[learner.remat]
    return tokens * _compute_width(config) * (model.num_layers * kept + 2 * everything)


def _gathered_bytes(config: Config, model: DecoderConfig) -> float:
    """Estimate a chip's bytes of gathered parameters: of two layers and the vocabulary."""
    mesh = config.learner.mesh
    if mesh.fsdp == 1:
        return 0.0
    shapes = model.parameter_shapes()
    layer = sum(math.prod(shape[1:]) for shape in shapes["layers"].values())
    return (
        (2 * layer / mesh.expert + math.prod(shapes["embed"]))
        / mesh.tensor
        * _compute_width(config)
    )


def _replayed_bytes(config: Config, model: DecoderConfig) -> float:
    """Return a chip's bytes of supports and experts beside the tokens of a micro-batch."""
    learner, experts = config.learner, model.experts
    support = WORD * mask_words(model.vocab_size) if config.replays_supports else 0
    routed = 0 if experts is None else ROUTED * model.num_layers * experts.per_token
    return learner.micro_batch_size * learner.pack_length * (support + routed)


def _compute_width(config: Config) -> int:
    """Return the bytes of a number in the learner's compute dtype."""
    return 2 if config.learner.compute_dtype == "bfloat16" else 4


def _train_seconds(config: Config, model: DecoderConfig, chip: Chip) -> float:
    """Estimate the seconds to train on a step's tokens."""
    count = parameter_count(model)
    mesh, rollout = config.learner.mesh, config.rollout
    rows = config.learner.micro_batch_size * mesh.data * mesh.fsdp * mesh.expert
    length = config.learner.pack_length
    members = rollout.group_size * config.agent.max_response_length + config.agent.max_prompt_length
    calls = math.ceil(rollout.prompts_per_step * members / (rows * length))
    width = _compute_width(config)
    products = PRODUCTS[config.learner.remat] * count * rows * length / mesh.devices / chip.flops
    gathered = count / (mesh.tensor * mesh.expert) * (2 * width + MASTER) * (1 - 1 / mesh.fsdp)
    tokens = config.learner.micro_batch_size * length / mesh.context
    summed = 4 * model.num_layers * tokens * model.hidden_size * width * 2 * (1 - 1 / mesh.tensor)
    seen = (
        6
        * model.num_layers
        * tokens
        * model.num_kv_heads
        * model.head_dim
        * width
        * (mesh.context - 1)
    )
    copies = mesh.data * mesh.context  # of each gradient
    added = 2 * MASTER * count / (mesh.tensor * mesh.expert * mesh.fsdp) * (1 - 1 / copies)
    links = (gathered + summed + seen + added) / (RING * chip.link_bandwidth)
    return calls * max(products, links)


def _rollout_seconds(config: Config, chip: Chip, weights: float, position: float) -> float:
    """Estimate the seconds in which one engine samples a step's tokens.

    A decode step reads the weights and half of each slot's longest context.
    """
    rollout = config.rollout
    slots = engine_shapes(config).max_concurrent_decodes
    steps = rollout.prompts_per_step * rollout.group_size * config.agent.max_response_length / slots
    return steps * (weights + slots * rollout.max_model_len / 2 * position) / chip.hbm_bandwidth
