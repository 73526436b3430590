"""The trajectories of a step as the advantage estimators see them. Shapes: N trajectories, L ids of a response.

The response of a trajectory with segments is that of all its sequences, one after another: it is estimated as a whole,
in one piece or in many. What depends on time (returns, discounts, first turns) follows the order in which its turns
were sampled, which is another where sub-agents answered between two turns of their caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from jax_agent_rl.trajectory_graph import timeline
from jax_agent_rl.types import Group, ToolCallRecord, Trajectory, Turn

PerToken = list[np.ndarray]
"""For each trajectory one number per response id, float64 [L]; 0 where the mask is 0."""


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """A whole step, before it is cut into mini-batches.

    Attributes:
        trajectories: in order of their groups.
        groups: int [N], number of each trajectory's group and role: whose rewards compare.
        masks: bool [L] each, ``loss_mask``: what was sampled, and observations that are trained on.
        rewards: token rewards; a turn's stand at its last sampled token, the final one at the last of all.
        greedy: float64 [N], reward of the greedy rollout of the same prompt (ReMax); NaN where there is none.
        baselines: float64 [N], reward to expect of the same role (RAE); 0 where nothing is known.
        values: float64 [L + 1] each, the critic's value of the state before every id and after the last; or None.
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
        return [np.flatnonzero(self.groups == g) for g in range(int(self.groups.max(initial=-1)) + 1)]

    @property
    def orders(self) -> list[np.ndarray]:
        """For each trajectory the places of its response in the order of time, int64 [L]."""
        return [
            np.concatenate([np.arange(at, at + len(t.output.token_ids) + len(t.appended_ids)) for at, t in turns])
            for turns in map(timeline, self.trajectories)
        ]

    def broadcast(self, per_trajectory: np.ndarray) -> PerToken:
        """Spread one number per trajectory over all its sampled tokens."""
        return [value * mask for value, mask in zip(per_trajectory, self.masks, strict=True)]


def scored_batch(groups: Sequence[Group], *, turn_reward: str) -> ScoredBatch:
    """Lay out scored groups.

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
        rewards[-1][[at + len(turn.output.token_ids) - 1 for at, turn in timeline(trajectory)]] = own
    counts = [len(g.trajectories) for g in groups]
    greedy = [np.nan if g.greedy_reward is None else g.greedy_reward for g in groups]
    parts = [(number, t.role) for number, group in enumerate(groups) for t in group.trajectories]
    numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    return ScoredBatch(
        trajectories=trajectories,
        groups=np.array([numbers[part] for part in parts], np.intp),
        masks=masks,
        rewards=rewards,
        greedy=np.repeat(np.asarray(greedy, np.float64), counts),
        baselines=np.array([g.baselines.get(t.role or "", 0.0) for g in groups for t in g.trajectories], np.float64),
    )


def mini_batches(groups: Sequence[Group], num_minibatches: int) -> list[list[Group]]:
    """Split groups into optimizer updates: whole prompts, in shares that differ by at most one; none is empty."""
    parts = np.array_split(np.arange(len(groups)), min(num_minibatches, len(groups)))
    return [[groups[i] for i in part] for part in parts]


def trained_lengths(
    groups: Sequence[Group], num_minibatches: int, *, masked: Collection[str], segment_weight: str
) -> list[list[int]]:
    """Count, for each optimizer update, the trained tokens of each of its sequences.

    Args:
        groups: of the step.
        num_minibatches: optimizer updates of an epoch.
        masked: ids of trajectories that have none.
        segment_weight: ``algorithm.segment_weight``, what a sequence is.
    """
    updates = []
    for part in mini_batches(groups, num_minibatches):
        trained = [segment_lengths(t) for g in part for t in g.trajectories if t.trajectory_id not in masked]
        updates.append(list(map(sum, trained)) if segment_weight == "session" else list(itertools.chain(*trained)))
    return updates


def segment_lengths(trajectory: Trajectory) -> list[int]:
    """Count the trained tokens of each sequence of a trajectory."""
    return [sum(sequence.loss_mask) for sequence in trajectory.sequences]


def all_turns(trajectory: Trajectory) -> list[Turn]:
    """Return the turns of all sequences of a trajectory in the order of time."""
    return [turn for _, turn in timeline(trajectory)]


def turn_spans(trajectory: Trajectory) -> list[slice]:
    """Return each turn's span in the response: sampled ids, and appended ones if they are trained on."""
    return [
        slice(at, at + len(turn.output.token_ids) + len(turn.appended_ids) * turn.learn_appended)
        for at, turn in timeline(trajectory)
    ]


def turn_rewards(trajectory: Trajectory, source: str) -> np.ndarray:
    """Return one reward per turn, float64; 0 for turns without tool calls. See :data:`TURN_REWARDS` for the sources."""
    rule = TURN_REWARDS[source]
    return np.array([rule(turn.tool_calls) if turn.tool_calls else 0.0 for turn in all_turns(trajectory)], np.float64)


TURN_REWARDS: dict[str, Callable[[Sequence[ToolCallRecord]], float]] = {
    "none": lambda calls: 0.0,
    "tool_reward": lambda calls: sum(call.reward for call in calls),
    "tool_success": lambda calls: sum(call.error is None for call in calls) / len(calls),
}
