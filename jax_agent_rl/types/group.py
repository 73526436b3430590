"""The trajectories of one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax_agent_rl.errors import DropReason
from jax_agent_rl.types.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The surviving trajectories of one prompt, with the reward statistics advantages need.

    Attributes:
        group_id: id of the group, which its trajectories have as well.
        trajectories: the members that were not lost.
        dropped: number of lost members by reason.
        greedy_reward: reward of the prompt's greedy rollout (ReMax); None without one.
        metrics: how the group was collected, e.g. ``branches``.
        frozen: trajectories of roles that are not trained: on record, but no samples.
        baselines: rewards to expect, by role (RAE).
    """

    group_id: str
    trajectories: tuple[Trajectory, ...]
    dropped: Mapping[DropReason, int] = field(default_factory=dict)
    greedy_reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    frozen: tuple[Trajectory, ...] = ()
    baselines: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        strangers = [t.trajectory_id for t in self.trajectories if t.group_id != self.group_id]
        if strangers:
            raise ValueError(
                f"group {self.group_id!r} was given trajectories of other groups: {strangers}"
            )

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(t.reward for t in self.trajectories)
