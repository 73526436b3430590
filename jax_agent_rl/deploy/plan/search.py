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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.compiled import format_bytes
from jax_agent_rl.deploy.plan.estimate import PlanEstimate, estimate
from jax_agent_rl.deploy.plan.result import PlanResult
from jax_agent_rl.deploy.plan.topology import (
    REMAT,
    Slice,
    as_overrides,
    batch_sizes,
    check_layout,
    choose_engine_mesh,
    engine_meshes,
    learner_meshes,
    sampling_hosts,
)
from jax_agent_rl.errors import CompilerError, ConfigError
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.runtime.engine_devices import engine_shapes, of_one_host

TRIES = 3
"""Layouts compiled at most, per layout that should fit."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout of a run.

    Attributes:
        changes: overrides of the configuration that was searched from.
        hosts: number of hosts whose engines share the run's trajectories.
        plan: the plan, once it is compiled.
        problem: why the compiler failed; None if it did not, or was not asked.
    """

    changes: tuple[str, ...]
    config: Config
    estimate: PlanEstimate
    hosts: int = 1
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
        return (
            learner.micro_batch_size >= other_learner.micro_batch_size
            and REMAT.index(learner.remat) <= REMAT.index(other_learner.remat)
            and self._slots >= other._slots
        )

    @property
    def _slots(self) -> int:
        """Contexts that one engine decodes at a time."""
        return engine_shapes(of_one_host(self.config, self.hosts)).max_concurrent_decodes

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
    config = configured(())
    hosts = sampling_hosts(config, slice)
    capacity = slice.chip.hbm_bytes
    refused = _Refusals(capacity)
    for learner_mesh in learner_meshes(config, model, slice):
        for engine_mesh in engine_meshes(config, model, slice):
            meshes = {**learner_mesh, **engine_mesh}
            try:
                meshes_only = configured(as_overrides(meshes))
                # Engines of a large model fill a host's chips whatever the learner does: this needs
                # no devices, and is decided first.
                bound = estimate(meshes_only, model, slice.chip, engines=1, hosts=hosts)
                if max(bound.learner_bytes, bound.weight_bytes) > capacity:
                    refused.add(meshes_only, bound)
                    continue
                placement = check_layout(meshes_only, model, slice)
            except ConfigError as error:
                refused.add_error(error)
                continue

            for sizes in batch_sizes(of_one_host(config, hosts)):
                choice = {**meshes, **sizes}
                changed = choose_engine_mesh(configured(as_overrides(choice)), model, slice)
                estimated = estimate(
                    changed,
                    model,
                    slice.chip,
                    engines=max(1, placement.engine_count),
                    hosts=hosts,
                )
                if estimated.least_bytes > capacity:
                    refused.add(changed, estimated)
                    continue
                changes = as_overrides(choice, changing=config)
                layouts.append(
                    Candidate(changes=changes, config=changed, estimate=estimated, hosts=hosts)
                )

    if not layouts:
        raise ConfigError(f"no mesh for {slice.name}: {'; '.join(refused.reasons())}")
    return sorted(layouts, key=lambda layout: _order(layout, capacity))


class _Refusals:
    """Why layouts are left out: of each kind of reason, the layout that came closest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._learner: tuple[float, Config] | None = None
        self._engine: tuple[float, Config] | None = None
        self._both: tuple[float, Config] | None = None
        self._errors: set[str] = set()

    def add(self, config: Config, estimated: PlanEstimate) -> None:
        """Note a layout whose arrays do not fit."""
        learner_fits = estimated.learner_bytes <= self._capacity
        engine_fits = estimated.engine_bytes <= self._capacity
        self._learner = _smaller(self._learner, estimated.learner_bytes, config)
        self._engine = _smaller(self._engine, estimated.engine_bytes, config)
        if learner_fits and engine_fits:
            self._both = _smaller(self._both, estimated.least_bytes, config)

    def add_error(self, error: ConfigError) -> None:
        """Note meshes that do not go with the devices or the model."""
        self._errors.add(str(error))

    def reasons(self) -> list[str]:
        """Return a sentence with a fix for each kind of reason."""
        reasons = []
        capacity = format_bytes(self._capacity)
        if self._both is not None:
            size, config = self._both
            fix = "a smaller rollout.jetstream.kv_cache_tokens, or take a larger --topology"
            if not config.rollout.sleep_during_update:
                fix = f"rollout.sleep_during_update=true, or {fix}"
            reasons.append(
                f"what stays on a chip, of learner and engine together, takes at least"
                f" {format_bytes(size)} of {capacity}: set {fix}"
            )
        if self._engine is not None and self._engine[0] > self._capacity:
            size, config = self._engine
            mesh = config.rollout.jetstream.mesh
            reasons.append(
                f"what stays on a chip of an engine takes at least {format_bytes(size)} of"
                f" {capacity}, with rollout.jetstream.mesh of {mesh.engine_devices} chips; an"
                " engine has those of one host: set rollout.jetstream.quantize=int8, a smaller"
                " rollout.jetstream.kv_cache_tokens, or sample elsewhere (rollout.backend=remote)"
            )
        if self._learner is not None and self._learner[0] > self._capacity:
            size, config = self._learner
            reasons.append(
                f"what stays on a chip of the learner takes at least {format_bytes(size)} of"
                f" {capacity}, with learner.mesh of {config.learner.mesh.devices} chips: take a"
                " larger --topology, or learner.lora"
            )
        if self._errors:
            reasons.append(f"other meshes: {min(self._errors, key=len)}")
        return reasons


def _smaller(
    closest: tuple[float, Config] | None, size: float, config: Config
) -> tuple[float, Config]:
    if closest is None or size < closest[0]:
        return size, config
    return closest


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


def estimate_table(layouts: Sequence[Candidate]) -> Table:
    """Return a table of what layouts are estimated to need, before anything is compiled."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("learning", "sampling", "change"):
        table.add_column(heading, no_wrap=heading != "change")
    for layout in layouts:
        estimate = layout.estimate
        table.add_row(
            format_bytes(estimate.resident_bytes + estimate.gradient_bytes),
            format_bytes(estimate.rollout_bytes),
            " ".join(layout.changes) or "as it is configured",
        )
    return table


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
        if len(tried) == 1:
            return "this one does not fit"
        return f"none of these {len(tried)} fits; what follows is of the one that takes least"
    if not best.changes:
        return "what is configured is the best of these"
    return f"the first, as overrides: {' '.join(best.changes)}"
