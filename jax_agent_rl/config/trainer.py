"""The keys of ``trainer`` that say how rollout and learner overlap. Part of :mod:`jax_agent_rl.config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from jax_agent_rl.config.base import NonNegative, Section
from jax_agent_rl.config.conditions import WhenKey

_FULLY_ASYNC = WhenKey("trainer.mode", "fully_async")
_DEFAULT_STALENESS = {"sync": 0, "one_step_off": 1, "fully_async": 1}


class OverlapSection(Section):
    """Which trainer, and how old its tokens may be."""

    mode: Literal["sync", "one_step_off", "fully_async"] = Field(
        default="sync",
        description="sync: roll out, then learn. one_step_off: roll out the next step while learning this one. "
        "fully_async: roll out all the time, also while weights change.",
    )
    max_staleness: NonNegative | None = Field(
        default=None,
        description="fully_async: most versions a token may be older than the weights it trains; up to (max_staleness "
        "+ 1) "
        "* rollout.prompts_per_step groups are under way. null: 1. The other modes fix it (sync 0, one_step_off 1).",
    )
    stragglers: Annotated[Literal["wait", "drop"], _FULLY_ASYNC] = Field(
        default="wait",
        description="fully_async: wait: the learner waits for groups that would get too old. drop: it never does, and "
        "what gets too old is lost, which favours short trajectories.",
    )
    oversample_prompts: Annotated[NonNegative, _FULLY_ASYNC & WhenKey("trainer.stragglers", "drop")] = Field(
        default=0, description="stragglers: drop: rows started on top, so that as many of the slowest may be lost."
    )
    in_flight_update: Annotated[Literal["auto", "keep", "recompute", "wait"], _FULLY_ASYNC] = Field(
        default="auto",
        description="fully_async: what running generations do when weights change. keep: they go on with the KV of the "
        "old weights; recompute: they go on, their context computed anew; wait: they end their turn first. auto: the "
        "first of these that the engine can do.",
    )

    @property
    def staleness_bound(self) -> int:
        """``max_staleness``, resolved."""
        return _DEFAULT_STALENESS[self.mode] if self.max_staleness is None else self.max_staleness


def trainer_problems(trainer: OverlapSection) -> Iterator[str]:
    """Every inconsistency of these keys, each with its fix."""
    mode, fixed = trainer.mode, _DEFAULT_STALENESS[trainer.mode]
    if mode != "fully_async" and trainer.max_staleness not in (None, fixed):
        yield (
            f"trainer.max_staleness={trainer.max_staleness}: with trainer.mode={mode} it is {fixed}; leave it out, or "
            f"set "
            "trainer.mode=fully_async"
        )


def with_correction(sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """Token-level importance weights where tokens may be stale and nothing is said about correction.

    Args:
        sections: the tree a user gave, not validated yet.
    """
    trainer, algorithm = sections.get("trainer"), sections.get("algorithm") or {}
    if not isinstance(trainer, Mapping) or not isinstance(algorithm, Mapping):
        return sections
    stale = trainer.get("max_staleness")
    if trainer.get("mode", "sync") == "sync" or stale == 0 or "rollout_correction" in algorithm:
        return sections
    loss = algorithm.get("policy_loss")
    if isinstance(loss, Mapping) and loss.get("loss_mode") == "decoupled":  # it brings its own
        return sections
    return {**sections, "algorithm": {**algorithm, "rollout_correction": {"rollout_is": "token"}}}
