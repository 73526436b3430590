"""How fast a run could be: every program as long as its slowest part (products, memory, links), and a step of them.

A bound, not a measurement: parts overlap perfectly, the products' operands pass through memory once, and everything
else costs nothing. ``utilization`` says which share of it is supposed to be reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.plan.compiled import Compiled
from jax_agent_rl.deploy.plan.inventory import Phase, Tokens
from jax_agent_rl.deploy.plan.topology import Chip

RING = 2
"""Directions of a ring of links, used at the same time."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one call of a program, by resource."""

    products: float
    memory: float
    links: float

    @property
    def total(self) -> float:
        return max(self.products, self.memory, self.links)

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(("products", "memory", "links"), key=lambda part: getattr(self, part))


def moved(one: Compiled) -> float:
    """Return the least bytes that pass through all chips' memory in a call."""
    if not one.work.flops and one.memory:  # a program without products passes over all that it is given
        return (one.memory.arguments + one.memory.outputs) * one.program.mesh.size
    return one.work.bytes


def seconds_of(one: Compiled, chip: Chip) -> Seconds:
    """Return the least time of a call; without exchanges where these are unknown."""
    chips = one.program.mesh.size
    links = sum(
        e.bytes / (chip.dcn_bandwidth if e.between_slices else RING * chip.link_bandwidth) for e in one.exchanges
    )
    return Seconds(
        products=one.work.flops / chips / chip.flops,
        memory=moved(one) / chips / chip.hbm_bandwidth,
        links=links,
    )


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A training step with trajectories of full length.

    Attributes:
        sampled: tokens sampled.
        trained: tokens in packed rows; a group's common prompt counts once with ``learner.share_prefixes``.
        rollout, learner, weights: seconds of each part.
        overlapped: rollout and learner work at the same time, on chips of their own.
        bounds: parts that take longer than is said here: what chips exchange in one of their programs is not known.
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


def step_of(
    config: Config, compiled: Sequence[Compiled], chip: Chip, *, engines: int, disjoint: bool, utilization: float
) -> StepTime:
    """Sum the programs of a run up to a step.

    Args:
        config: of the run.
        compiled: its programs.
        chip: of the slice.
        engines: of the slice; 0 where they are elsewhere: then only the learner counts.
        disjoint: learner and engines share no chip.
        utilization: share of the bound that is reached.
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
        phases[program.phase] += calls * program.calls * seconds_of(one, chip).total / utilization
    return StepTime(
        sampled=tokens["sampled"],
        trained=tokens["trained"],
        rollout=phases["rollout"] / max(engines, 1),
        learner=phases["learner"],
        weights=phases["weights"],
        overlapped=disjoint and config.trainer.mode != "sync",
        bounds=tuple(sorted({one.program.phase for one in compiled if one.program.calls and not one.exchanges_known})),
    )
