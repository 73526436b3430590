"""The soft overlong penalty of DAPO: long responses lose reward before the limit cuts them."""

from __future__ import annotations

from dataclasses import dataclass

from jax_agent_rl.types import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongPenalty:
    """0 up to ``max_response_length - buffer_length`` ids, then falling linearly to ``-factor`` at the limit.

    Inserted ids count as well: they use up the same budget as sampled ones.

    Args:
        max_response_length: ``agent.max_response_length``.
        buffer_length: ids before the limit over which the penalty grows, >= 1.
        factor: the penalty at the limit, > 0.

    References:
        Yu et al., DAPO: An Open-Source LLM Reinforcement Learning System at Scale (arXiv:2503.14476), eq. 13.
    """

    max_response_length: int
    buffer_length: int
    factor: float = 1.0

    def __call__(self, trajectory: Trajectory) -> float:
        """The penalty of one trajectory, in [-factor, 0]."""
        over = len(trajectory.response_ids) - (self.max_response_length - self.buffer_length)
        return -self.factor * min(max(over / self.buffer_length, 0.0), 1.0)
