"""Meshes and micro-batches for a slice: all that could do are estimated, and the best compiled.

::

    meshes x rows ─► divide the model, what stays fits ─► estimated, best first ─► compiled, as the budget says
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from jax_agent_rl.config import Config
from jax_agent_rl.config_mesh import MeshConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.layout import engine_config
from jax_agent_rl.learner.sharding import parameter_shardings
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.plan.estimate import Estimate, estimate
from jax_agent_rl.plan.inventories import places
from jax_agent_rl.plan.plan import Plan
from jax_agent_rl.plan.report import amount
from jax_agent_rl.plan.topology import Slice

ROWS = (1, 2, 4, 8)
AXES = ("fsdp", "expert", "context", "tensor")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to lay a run out.

    Attributes:
        overrides: what to add to the configuration.
        plan: if it was compiled.
    """

    overrides: tuple[str, ...]
    config: Config
    estimate: Estimate
    plan: Plan | None = None


def candidates(
    configured: Callable[[Sequence[str]], Config], model: DecoderConfig, slice: Slice, devices: Sequence[Any]
) -> list[Candidate]:
    """All whose meshes divide the model and whose arrays fit, best first.

    Args:
        configured: a configuration with overrides.

    Raises:
        ConfigError: there is none.
    """
    found, reasons = [], set()
    for overrides in _overrides(configured(()), model, slice):
        try:
            config = configured(overrides)
            where = places(config, devices)
            parameter_shardings(where.learner, model.parameter_shapes())
            for mesh in where.engines[:1]:
                engine_config(model, mesh)
        except ConfigError as error:
            reasons.add(str(error))
            continue
        guess = estimate(config, model, slice.chip, engines=max(1, len(where.engines)))
        if guess.bytes > slice.chip.hbm_bytes:
            reasons.add(f"what stays on a chip takes {amount(guess.bytes)} of {amount(slice.chip.hbm_bytes)}")
            continue
        found.append(Candidate(overrides=overrides, config=config, estimate=guess))
    if not found:
        raise ConfigError(
            f"no mesh for {slice.name}: {min(reasons, key=len)}; take a larger --topology, learner.lora, or a smaller "
            "rollout.jetstream.cache_tokens"
        )
    return sorted(found, key=lambda one: (one.estimate.seconds, one.estimate.bytes))


def _overrides(config: Config, model: DecoderConfig, slice: Slice) -> Iterator[tuple[str, ...]]:
    """Every choice; those of engines that share chips with the learner, too."""
    engines = config.rollout.engines * config.rollout.jetstream.mesh.devices
    separate = config.rollout.placement == "separate"
    count = (slice.chips - engines * separate) // slice.count
    tensors = [1 << power for power in range(4)] if config.rollout.backend == "jetstream" and not separate else [None]
    for sizes, rows, tensor in itertools.product(_factors(count, len(AXES)), ROWS, tensors):
        mesh = MeshConfig(data=slice.count, **dict(zip(AXES, sizes, strict=True)))
        if mesh.expert > 1 and model.experts is None:
            continue
        chosen = [f"learner.mesh.{axis}={getattr(mesh, axis)}" for axis in ("data", *AXES)]
        chosen.append(f"learner.rows_per_micro_batch={rows}")
        if tensor is not None:
            chosen.append(f"rollout.jetstream.mesh.tensor={tensor}")
        yield tuple(chosen)


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of ``count`` in order."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factors(number // first, count - 1))


def search(found: Sequence[Candidate], plan: Callable[[Config], Plan], *, budget: int) -> list[Candidate]:
    """Compiles the best; those that fit come first, by the time of a step.

    Args:
        plan: compiles a configuration.
        budget: how many are compiled.
    """
    compiled = [
        Candidate(overrides=one.overrides, config=one.config, estimate=one.estimate, plan=plan(one.config))
        for one in found[:budget]
    ]
    return sorted(compiled, key=lambda one: (not one.plan.fits, one.plan.step.seconds) if one.plan else (True, 0.0))


def table(searched: Sequence[Candidate]) -> Table:
    """What was compiled, best first."""
    made = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("step", "fullest chip", "change"):
        made.add_column(heading)
    for one in searched:
        if one.plan is not None:
            full = amount(one.plan.fullest.total) + ("" if one.plan.fits else " !")
            made.add_row(f"{one.plan.step.seconds:.3g} s", full, " ".join(shown(one.overrides)))
    return made


def shown(overrides: Sequence[str]) -> list[str]:
    """Without axes of 1."""
    return [item for item in overrides if not (item.startswith("learner.mesh.") and item.endswith("=1"))]
