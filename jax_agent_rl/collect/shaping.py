"""Penalties on a trajectory's reward that depend on its ids alone (``algorithm.shaping``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax_agent_rl.config.algorithm import ShapingConfig
from jax_agent_rl.types import Group, Trajectory


def shape(group: Group, config: ShapingConfig, *, max_response_length: int) -> Group:
    """The group with its rewards reduced; what was taken off is in ``reward_parts``."""
    if not config.overlong_buffer and not config.repetition_factor:
        return group
    shaped = tuple(_shape(t, config, max_response_length) for t in group.trajectories)
    return replace(group, trajectories=shaped)


def overlong_penalty(length: int, *, limit: int, buffer: int, factor: float) -> float:
    """0 up to ``limit - buffer`` ids, then a straight line to ``-factor`` at ``limit``.

    References: Yu et al. 2025 (DAPO), arXiv 2503.14476, soft overlong punishment.
    """
    return min(-(length - (limit - buffer)) / buffer * factor, 0.0)


def repetition(ids: Sequence[int], ngram: int) -> float:
    """Share of n-grams that stand earlier in the text already: 0 (none) to almost 1; 0 if there is but one.

    References: Yeo et al. 2025, Demystifying Long Chain-of-Thought Reasoning, arXiv 2502.03373.
    """
    count = len(ids) - ngram + 1
    if count < 2:
        return 0.0
    return 1 - len({tuple(ids[i : i + ngram]) for i in range(count)}) / count


def sampled_ids(trajectory: Trajectory) -> list[int]:
    """The ids the policy sampled, without what was inserted."""
    return [i for i, mask in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if mask]


def _shape(trajectory: Trajectory, config: ShapingConfig, limit: int) -> Trajectory:
    penalties = {}
    if config.overlong_buffer:
        penalties["overlong_penalty"] = overlong_penalty(
            len(trajectory.response_ids), limit=limit, buffer=config.overlong_buffer, factor=config.overlong_factor
        )
    if config.repetition_factor:
        share = repetition(sampled_ids(trajectory), config.repetition_ngram)
        penalties["repetition_penalty"] = -config.repetition_factor * share
    return replace(
        trajectory,
        reward=trajectory.reward + sum(penalties.values()),
        reward_parts={**trajectory.reward_parts, **penalties},
    )
