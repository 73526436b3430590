"""A step's trajectories with the rewards of their tokens.

Shapes: N trajectories, L ids of a response.

The response of a trajectory with segments is the one of all its sequences, one after another: a
trajectory is estimated as a whole, however many pieces it has. What depends on time (returns,
discounts, first turns) follows the order in which its turns were sampled. This is another order if
sub-agents answered between two turns of their caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jax_agent_rl.learner.advantages.estimators import PerToken
from jax_agent_rl.outcomes import PROGRESS, partial_scores, progress_rewards, reward_of_turn
from jax_agent_rl.trajectory_graph import timeline
from jax_agent_rl.types import Group, Trajectory, Turn


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """A whole step, before it is cut into mini-batches.

    Attributes:
        trajectories: in order of their groups.
        groups: int [N], a number for each group and role. Rewards of trajectories with the same
            number are compared.
        masks: bool [L] each, ``loss_mask``: sampled tokens, and observations that are trained on.
        rewards: token rewards. The reward of a turn is at its last sampled token, the final reward
            at the last one of all.
        greedy: float64 [N], total reward of the greedy rollout of the same prompt (ReMax); NaN
            without one.
        baselines: float64 [N], total reward that is expected of the same role (RAE); 0 where
            nothing is known.
        values: float64 [L + 1] each, the critic's value of the state before every id and after the
            last. None without a critic.
    """

    trajectories: Sequence[Trajectory]
    groups: np.ndarray
    masks: list[np.ndarray]
    rewards: PerToken
    greedy: np.ndarray
    baselines: np.ndarray
    values: list[np.ndarray] | None = None

    @property
    def totals(self) -> np.ndarray:
        """float64 [N]: S, the sum of each trajectory's token rewards."""
        return np.array([rewards.sum() for rewards in self.rewards])

    @property
    def members(self) -> list[np.ndarray]:
        """For each group and role the indices of its trajectories."""
        num_groups = int(self.groups.max(initial=-1)) + 1
        return [np.flatnonzero(self.groups == group) for group in range(num_groups)]

    @property
    def orders(self) -> list[np.ndarray]:
        """For each trajectory the indices of its response in the order of time, int64 [L]."""
        orders = []
        for trajectory in self.trajectories:
            spans = []
            for begin, turn in timeline(trajectory):
                end = begin + len(turn.output.token_ids) + len(turn.appended_ids)
                spans.append(np.arange(begin, end))
            orders.append(np.concatenate(spans))
        return orders

    def broadcast(self, per_trajectory: np.ndarray) -> PerToken:
        """Spread one number per trajectory over all its sampled tokens."""
        return [value * mask for value, mask in zip(per_trajectory, self.masks, strict=True)]


def scored_batch(groups: Sequence[Group], *, turn_reward: str) -> ScoredBatch:
    """Lay out scored groups.

    Args:
        turn_reward: ``algorithm.turn_reward``: the reward of a turn with tool calls, besides the
            (shaped) reward of the trajectory.
    """
    trajectories: list[Trajectory] = []
    group_numbers: list[int] = []
    masks: list[np.ndarray] = []
    rewards: list[np.ndarray] = []
    greedy: list[float] = []
    baselines: list[float] = []
    number_of: dict[tuple[int, str | None], int] = {}  # of each group and role
    for index, group in enumerate(groups):
        greedy_reward = np.nan if group.greedy_reward is None else group.greedy_reward
        for trajectory in group.trajectories:
            sequences = trajectory.sequences
            mask = np.concatenate([np.asarray(s.loss_mask, bool) for s in sequences])
            trajectories.append(trajectory)
            masks.append(mask)
            rewards.append(_token_rewards(trajectory, turn_reward, len(mask)))
            group_numbers.append(number_of.setdefault((index, trajectory.role), len(number_of)))
            greedy.append(greedy_reward)
            baselines.append(group.baselines.get(trajectory.role or "", 0.0))

    return ScoredBatch(
        trajectories=trajectories,
        groups=np.array(group_numbers, np.intp),
        masks=masks,
        rewards=rewards,
        greedy=np.array(greedy, np.float64),
        baselines=np.array(baselines, np.float64),
    )


def _token_rewards(trajectory: Trajectory, turn_reward: str, length: int) -> np.ndarray:
    """Return the token rewards of a response, see :class:`ScoredBatch`."""
    rewards_of_turns = turn_rewards(trajectory, turn_reward)
    rewards_of_turns[-1] += trajectory.reward
    last_sampled = [begin + len(turn.output.token_ids) - 1 for begin, turn in timeline(trajectory)]
    rewards = np.zeros(length)
    rewards[last_sampled] = rewards_of_turns
    return rewards


def all_turns(trajectory: Trajectory) -> list[Turn]:
    """Return the turns of all sequences of a trajectory in the order of time."""
    return [turn for _, turn in timeline(trajectory)]


def turn_spans(trajectory: Trajectory) -> list[slice]:
    """Return each turn's span in the response: sampled ids, and appended ones with loss."""
    spans = []
    for begin, turn in timeline(trajectory):
        end = begin + len(turn.output.token_ids)
        if turn.learn_appended:
            end += len(turn.appended_ids)
        spans.append(slice(begin, end))
    return spans


def turn_rewards(trajectory: Trajectory, source: str) -> np.ndarray:
    """Return one reward per turn in the order of time, float64.

    Args:
        trajectory: of several turns.
        source: ``algorithm.turn_reward``.
    """
    turns = all_turns(trajectory)
    if source == PROGRESS:
        scores = partial_scores(trajectory, [turn.score for turn in turns])
        return np.array(progress_rewards(scores), np.float64)
    return np.array([reward_of_turn(turn, source) for turn in turns], np.float64)
