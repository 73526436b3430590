"""The trajectories of a step as the advantage estimators see them. Shapes: N trajectories, L ids of a response.

The response of a trajectory with segments is that of all its sequences, one after another: it is estimated as a whole,
in one piece or in many.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from jax_agent_rl.types import Group, ToolCallRecord, Trajectory, Turn

PerToken = list[np.ndarray]
"""For each trajectory one number per response id, float64 [L]; 0 where the mask is 0."""


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """A whole step, before it is cut into mini-batches.

    Attributes:
        trajectories: in order of their groups.
        groups: int [N], number of each trajectory's group.
        masks: bool [L] each, ``loss_mask``: what was sampled, and observations that are trained on.
        rewards: token rewards; a turn's stand at its last sampled token, the final one at the last of all.
        greedy: float64 [N], reward of the greedy rollout of the same prompt (ReMax); NaN where there is none.
        values: float64 [L + 1] each, the critic's value of the state before every id and after the last; or None.
    """

    trajectories: Sequence[Trajectory]
    groups: np.ndarray
    masks: list[np.ndarray]
    rewards: PerToken
    greedy: np.ndarray
    values: list[np.ndarray] | None = None

    @property
    def totals(self) -> np.ndarray:
        """float64 [N]: S, the sum of each trajectory's token rewards."""
        return np.array([rewards.sum() for rewards in self.rewards])

    @property
    def members(self) -> list[np.ndarray]:
        """For each group the indices of its trajectories."""
        return [np.flatnonzero(self.groups == g) for g in range(int(self.groups.max(initial=-1)) + 1)]

    def broadcast(self, per_trajectory: np.ndarray) -> PerToken:
        """Spread one number per trajectory over all its sampled tokens."""
        return [value * mask for value, mask in zip(per_trajectory, self.masks, strict=True)]


def scored_batch(groups: Sequence[Group], *, turn_reward: str) -> ScoredBatch:
    """Lays out scored groups.

    Args:
        groups: of the step.
        turn_reward: ``algorithm.turn_reward``, what a turn with tool calls earns besides the final reward.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    masks = [np.concatenate([np.asarray(s.loss_mask, bool) for s in t.sequences]) for t in trajectories]
    rewards = []
    for trajectory, mask in zip(trajectories, masks, strict=True):
        own = turn_rewards(trajectory, turn_reward)
        own[-1] += trajectory.reward
        rewards.append(np.zeros(len(mask)))
        np.add.at(rewards[-1], turn_ends(trajectory), own)
    counts = [len(g.trajectories) for g in groups]
    baselines = [np.nan if g.greedy_reward is None else g.greedy_reward for g in groups]
    return ScoredBatch(
        trajectories=trajectories,
        groups=np.repeat(np.arange(len(groups)), counts),
        masks=masks,
        rewards=rewards,
        greedy=np.repeat(np.asarray(baselines, np.float64), counts),
    )


def mini_batches(groups: Sequence[Group], num_minibatches: int) -> list[list[Group]]:
    """Split groups into optimizer updates: whole prompts, in shares that differ by at most one; none is empty."""
    parts = np.array_split(np.arange(len(groups)), min(num_minibatches, len(groups)))
    return [[groups[i] for i in part] for part in parts]


def trained_lengths(groups: Sequence[Group], num_minibatches: int, *, masked: Collection[str]) -> list[list[int]]:
    """Count, for each optimizer update, the trained tokens of each of its trajectories.

    Args:
        groups: of the step.
        num_minibatches: optimizer updates of an epoch.
        masked: ids of trajectories that have none.
    """
    return [
        [
            sum(sum(s.loss_mask) for s in t.sequences)
            for group in part
            for t in group.trajectories
            if t.trajectory_id not in masked
        ]
        for part in mini_batches(groups, num_minibatches)
    ]


def all_turns(trajectory: Trajectory) -> list[Turn]:
    """Return the turns of all sequences of a trajectory."""
    return [turn for sequence in trajectory.sequences for turn in sequence.turns]


def turn_spans(trajectory: Trajectory) -> list[slice]:
    """Return each turn's span in the response: sampled ids, and appended ones if they are trained on."""
    spans, at = [], 0
    for turn in all_turns(trajectory):
        appended = len(turn.appended_ids)
        end = at + len(turn.output.token_ids)
        spans.append(slice(at, end + appended * turn.learn_appended))
        at = end + appended
    return spans


def turn_ends(trajectory: Trajectory) -> list[int]:
    """Return the position of each turn's last sampled id in the response."""
    lengths = [len(turn.output.token_ids) for turn in all_turns(trajectory)]
    return [span.start + length - 1 for span, length in zip(turn_spans(trajectory), lengths, strict=True)]


def turn_rewards(trajectory: Trajectory, source: str) -> np.ndarray:
    """Return one reward per turn, float64; 0 for turns without tool calls. See :data:`TURN_REWARDS` for the sources."""
    rule = TURN_REWARDS[source]
    return np.array([rule(turn.tool_calls) if turn.tool_calls else 0.0 for turn in all_turns(trajectory)], np.float64)


TURN_REWARDS: dict[str, Callable[[Sequence[ToolCallRecord]], float]] = {
    "none": lambda calls: 0.0,
    "tool_reward": lambda calls: sum(call.reward for call in calls),
    "tool_success": lambda calls: sum(call.error is None for call in calls) / len(calls),
}
