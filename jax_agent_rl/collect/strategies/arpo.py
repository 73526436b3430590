"""ARPO: branches where a tool result made the policy uncertain.

``initial_rollouts`` first chains of a total of ``group_size``. For every turn that follows a tool result, and each of
``beam_size - 1`` possible branches, a coin is tossed::

    dH  = H(first ids of the turn) - H(first ids of the trajectory's first turn)          nats per id
    branch before the turn  iff  clip(u - entropy_weight dH, 0, 1) <= branch_probability,   u uniform

H is the mean surprisal of the first ``entropy_tokens`` ids that were sampled, an unbiased estimate of their entropy.
(The authors sum over those ids and the ten most likely alternatives, and divide by the log of the vocabulary's size.)
Earlier turns come first where the total does not suffice. Branches branch too. What is missing of the total when
nothing branches any more is made up by new chains from the prompt; nothing is ever duplicated.

References: Dong et al. 2025, Agentic Reinforced Policy Optimization, arXiv 2507.19849, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax_agent_rl.collect.strategies.base import Growth, Start, Strategy, at_turn
from jax_agent_rl.config.strategy import ArpoConfig
from jax_agent_rl.types import Trajectory


class Arpo(Strategy):
    """See the module docstring."""

    def __init__(self, config: ArpoConfig):
        self._config = config

    def next_wave(self, growth: Growth) -> Sequence[Start]:
        if not growth.waves:
            return [Start()] * min(self._config.initial_rollouts, growth.group_size)
        budget = growth.group_size - growth.started
        living = [o.trajectory for o in growth.waves[-1] if o.trajectory is not None]
        turns = sorted((turn, index) for index, t in enumerate(living) for turn in _turns_after_tools(t))
        branches = [
            Start(fork=at_turn(living[index], turn))
            for turn, index in turns
            for _ in range(self._branches(living[index], turn, growth))
        ]
        return branches[:budget] or [Start(topped_up=True)] * budget

    def _branches(self, trajectory: Trajectory, turn: int, growth: Growth) -> int:
        """How many of the coins of a turn say so."""
        config = self._config
        rise = self._entropy(trajectory, turn) - self._entropy(trajectory, 0)
        tosses = growth.random("branch", trajectory.trajectory_id, turn)
        values = (tosses.random() - config.entropy_weight * rise for _ in range(config.beam_size - 1))
        return sum(min(max(value, 0.0), 1.0) <= config.branch_probability for value in values)

    def _entropy(self, trajectory: Trajectory, turn: int) -> float:
        first = trajectory.turns[turn].output.log_probs[: self._config.entropy_tokens]
        return -sum(first) / len(first)


def _turns_after_tools(trajectory: Trajectory) -> Iterator[int]:
    """Turns of its own that follow a tool result; the one a branch began with was decided on already."""
    inherited = trajectory.fork.turns if trajectory.fork else 0
    for turn in range(inherited + 1, trajectory.num_turns):
        if trajectory.turns[turn - 1].tool_calls:
            yield turn
