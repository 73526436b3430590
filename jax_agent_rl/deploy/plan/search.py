"""Layouts for a slice: all that could do are estimated, and the best compiled until some fit.

::

    meshes x batches ─► divide the model, what stays fits ─► estimated ─► best is compiled ─► fits: counts ─► enough?
                                                                 ▲                        └── does not ─┐
                                                                 └ its mesh's estimate is corrected, ◄──┘
                                                                   fuller ones are left out
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.compile_subprocess import PlanResult
from jax_agent_rl.deploy.plan.estimate import PlanEstimate, estimate
from jax_agent_rl.deploy.plan.layouts import (
    REMAT,
    Choice,
    batch_sizes,
    changes,
    engine_meshes,
    laid_out,
    learner_meshes,
    overrides,
)
from jax_agent_rl.deploy.plan.report import amount
from jax_agent_rl.deploy.plan.topology import Slice
from jax_agent_rl.errors import CompilerError, ConfigError
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.runtime.engines import engine_shapes

TRIES = 3
"""Layouts compiled at most, for each that shall fit."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to lay a run out.

    Attributes:
        changes: overrides that make it of the configuration searched from.
        plan: if it was compiled.
        problem: why the compiler failed on it.
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

    def holds_no_less(self, other: Candidate) -> bool:
        """Return whether it has the other's meshes, and at least as much memory use on them."""
        return self.meshes == other.meshes and all(
            mine >= theirs for mine, theirs in zip(_at_once(self.config), _at_once(other.config), strict=True)
        )

    def as_json(self) -> dict[str, Any]:
        """Return what compiling it showed, for JSON."""
        found = {"fits": False, "memory": None, "seconds": None, "problem": self.problem}
        if self.plan is not None:
            found |= {"fits": self.plan.fits, "memory": self.plan.memory, "seconds": self.plan.seconds}
        return {"overrides": self.changes, **found}


def _at_once(config: Config) -> tuple[int, int, int]:
    """Return the sizes with which a chip's memory grows."""
    learner = config.learner
    kept = len(REMAT) - REMAT.index(learner.remat)
    return learner.micro_batch_size, kept, engine_shapes(config).max_concurrent_decodes


def candidates(
    configured: Callable[[Sequence[str]], Config], model: DecoderConfig, slice: Slice, devices: Sequence[Any]
) -> list[Candidate]:
    """Return all layouts whose meshes divide the model and whose arrays fit, best first.

    Args:
        configured: a configuration with overrides.
        model: its architecture.
        slice: to plan for.
        devices: of the slice.

    Raises:
        ConfigError: there is none.
    """
    found: list[Candidate] = []
    reasons: set[str] = set()
    config = configured(())
    for learner in learner_meshes(config, model, slice):
        for engine in engine_meshes(config):
            meshes = {**learner, **engine}
            try:
                where = laid_out(configured(overrides(meshes)), model, devices)
            except ConfigError as error:
                reasons.add(str(error))
                continue
            for sizes in batch_sizes(config):
                made = _candidate(configured, config, {**meshes, **sizes}, model, slice, engines=len(where.engines))
                if made.estimate.stays <= slice.chip.hbm_bytes:
                    found.append(made)
                else:
                    stays, there = amount(made.estimate.stays), amount(slice.chip.hbm_bytes)
                    reasons.add(f"what stays on a chip takes {stays} of {there}")
    if not found:
        raise ConfigError(
            f"no mesh for {slice.name}: {min(reasons, key=len)}; take a larger --topology, learner.lora, or a smaller "
            "rollout.jetstream.kv_cache_tokens"
        )
    return sorted(found, key=lambda one: _order(one, slice.chip.hbm_bytes))


def _candidate(
    configured: Callable[[Sequence[str]], Config],
    config: Config,
    choice: Choice,
    model: DecoderConfig,
    slice: Slice,
    *,
    engines: int,
) -> Candidate:
    made = configured(overrides(choice))
    guess = estimate(made, model, slice.chip, engines=max(1, engines))
    return Candidate(changes=changes(config, choice), config=made, estimate=guess)


def _order(one: Candidate, capacity: int, correction: float = 1.0) -> tuple[bool, float, float]:
    """Return a sort key: those that should fit come first, by time; the others by memory."""
    total = one.estimate.total * correction
    return (False, one.estimate.seconds, total) if total <= capacity else (True, total, one.estimate.seconds)


def search(
    found: Sequence[Candidate], plan: Callable[[Candidate], PlanResult], *, capacity: int, budget: int
) -> list[Candidate]:
    """Compile the best until some fit; return those that fit first, by step time, then the others by memory.

    What fits is the best of its meshes by the estimate, so the next are of others. What does not says how far the
    estimate is off for the learner's mesh, and that nothing fuller will do. Where the compiler fails, it does so
    whatever runs at once: others of these meshes are left out.

    Args:
        found: candidates, see :func:`candidates`.
        plan: compiles one.
        capacity: bytes of a chip.
        budget: how many shall fit; :data:`TRIES` times as many are compiled at most.

    Raises:
        CompilerError: the compiler fails on every one.
    """
    waiting, tried, fitting = list(found), list[Candidate](), 0
    corrections: dict[Any, float] = {}
    while waiting and fitting < budget and len(tried) < TRIES * budget:
        one = min(waiting, key=lambda each: _order(each, capacity, corrections.get(each.config.learner.mesh, 1.0)))
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
            waiting = [each for each in waiting if not each.holds_no_less(one)]
    if all(one.plan is None for one in tried):
        raise CompilerError(f"none of {len(tried)} layouts could be compiled; of the first: {tried[0].problem}")
    return sorted(tried, key=_rank)


def _rank(one: Candidate) -> tuple[int, float]:
    if one.plan is None:
        return 2, 0.0
    return (0, one.plan.seconds) if one.plan.fits else (1, one.plan.memory)


def table(searched: Sequence[Candidate]) -> Table:
    """Tabulate what was tried, best first."""
    made = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("step", "fullest chip", "change"):
        made.add_column(heading, no_wrap=heading != "change")
    for one in searched:
        step, full = "-", "compiler failed"
        if one.plan is not None:
            full = amount(one.plan.memory) + ("" if one.plan.fits else " !")
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
