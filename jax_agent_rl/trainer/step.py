"""The parts of a training step: how its groups are sampled and shaped, and its learner update."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jax_agent_rl.collect.filters import Selection, select, shape
from jax_agent_rl.config import AlgorithmConfig, Config
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.advantages.estimators import running_baseline
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.outcomes import total_reward
from jax_agent_rl.rollout.protocol import BackendMetrics
from jax_agent_rl.types import Group, SamplingParams, Trajectory

UNDO_SECONDS = 2.0
"""Time for an interrupted update to stop and to restore the learner's state."""


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The groups of one step.

    Attributes:
        groups: before any filter.
        engine: what the engines did while they were collected.
        seconds: the time that ``engine`` covers.
        metrics: more named values for the step's record.
    """

    groups: list[Group]
    engine: BackendMetrics
    seconds: float
    metrics: Mapping[str, object] = field(default_factory=dict)

    def with_members(self, groups: Sequence[Group]) -> RolloutBatch:
        """Return the batch with other versions of some trajectories, told by their ids."""
        members = {t.trajectory_id: t for t in all_trajectories(groups)}
        changed_groups = []
        for group in self.groups:
            trajectories = [members.get(t.trajectory_id, t) for t in group.trajectories]
            changed_groups.append(replace(group, trajectories=tuple(trajectories)))
        return replace(self, groups=changed_groups)


@dataclass(kw_only=True)
class Step:
    """A training step in progress. Ctrl-C or SIGTERM undoes its update while that is possible.

    Attributes:
        number: from 1.
        began: on the trainer's clock.
        print_line: prints a line for people.
        stop_rollouts: stops the rollouts that run beside the update.
        batch: the result of :meth:`Trainer.rollout`.
        publish_seconds: the result of :meth:`Trainer.publish`.
        cancellation: for the learner's update.
    """

    number: int
    began: float
    print_line: Callable[[str], None]
    stop_rollouts: Callable[[], Awaitable[None]]
    batch: RolloutBatch | None = None
    publish_seconds: float = 0.0
    cancellation: StepCancellation = field(default_factory=StepCancellation)
    _update: asyncio.Future[UpdateResult] | None = None

    @property
    def result(self) -> UpdateResult | None:
        """The result of a successful update, even if the caller was cancelled meanwhile."""
        update = self._update
        if update is None or not update.done() or update.cancelled():
            return None
        if update.exception() is not None:
            return None
        return update.result()

    async def learn(self, update: Awaitable[UpdateResult]) -> None:
        """Run the learner's update.

        Raises:
            asyncio.CancelledError: the caller was cancelled. The update is undone, or finished if
                it can no longer be undone; :attr:`result` tells.
        """
        self._update = asyncio.ensure_future(update)
        try:
            await asyncio.shield(self._update)
        except asyncio.CancelledError:
            is_undone = self.cancellation.cancel()
            if not is_undone:
                self.print_line(
                    "  its updates have begun: finishing this learner step before saving"
                )
                await self.stop_rollouts()
                await asyncio.wait((self._update,))
                raise

            if self.cancellation.has_begun:
                # The learner's thread stops by itself, unless it is inside the compiler.
                await asyncio.wait((self._update,), timeout=UNDO_SECONDS)
            self._update.cancel()
            await asyncio.gather(self._update, return_exceptions=True)
            raise


def training_sampling(config: Config) -> SamplingParams:
    """Return the sampling of every turn of a training rollout."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_model_len,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
    )


def evaluation_sampling(config: Config) -> SamplingParams:
    """Return the sampling of every turn of a held-out rollout."""
    rollout = config.rollout
    return SamplingParams(max_tokens=rollout.max_model_len, temperature=rollout.eval_temperature)


def shaped(group: Group, config: Config, greedy: Group | None = None) -> Group:
    """Return a scored group as filters and learner expect it, the same in every trainer.

    Penalties of ``algorithm.shaping`` are subtracted from its rewards. The greedy rollout of its
    prompt is penalized in the same way; its reward becomes the baseline (ReMax).

    Args:
        group: as it was collected.
        greedy: the group of the greedy rollout; None without one.

    Raises:
        ConfigError: there is a greedy rollout, and the agent plays several roles.
    """
    algorithm = config.algorithm
    max_response_length = config.agent.max_response_length
    group = shape(group, algorithm.shaping, max_response_length=max_response_length)
    if greedy is None:
        return group

    if any(trajectory.role for trajectory in greedy.trajectories):
        raise ConfigError(
            "algorithm.adv_estimator=remax compares with one reward per prompt,"
            " and an agent of several roles has several;"
            " set algorithm.adv_estimator=grpo or rae"
        )
    greedy = shape(greedy, algorithm.shaping, max_response_length=max_response_length)
    if not greedy.trajectories:  # the greedy rollout was lost
        return group
    greedy_reward = total_reward(greedy.trajectories[0], algorithm.turn_reward)
    return replace(group, greedy_reward=greedy_reward)


def select_step(
    groups: Sequence[Group], algorithm: AlgorithmConfig, role_baselines: Mapping[str, float]
) -> Selection:
    """Select what is worth a gradient; with RAE, each group gets its roles' baselines.

    Args:
        groups: of the step, shaped.
        role_baselines: from the steps before, by data source and role.
    """
    selection = select(groups, algorithm)
    if algorithm.adv_estimator != "rae":
        return selection
    with_baselines = [with_role_baselines(group, role_baselines) for group in selection.groups]
    return replace(selection, groups=tuple(with_baselines))


def with_role_baselines(group: Group, role_baselines: Mapping[str, float]) -> Group:
    """Add the baseline of each role (RAE), the total reward that is expected of it.

    Args:
        role_baselines: from the steps before, by data source and role.
    """
    baselines = {}
    for trajectory in group.trajectories:
        baseline = role_baselines.get(_baseline_key(trajectory), 0.0)
        baselines[trajectory.role or ""] = baseline
    return replace(group, baselines=baselines)


def update_role_baselines(
    role_baselines: Mapping[str, float],
    groups: Sequence[Group],
    *,
    turn_reward: str = "none",
) -> dict[str, float]:
    """Return the role baselines after a step, with the total rewards of all its trajectories.

    Args:
        role_baselines: from the steps before, by data source and role.
        groups: of the step, shaped.
        turn_reward: ``algorithm.turn_reward``, part of the totals.
    """
    step_rewards: dict[str, list[float]] = {}
    for trajectory in all_trajectories(groups):
        reward = total_reward(trajectory, turn_reward)
        step_rewards.setdefault(_baseline_key(trajectory), []).append(reward)

    updated = dict(role_baselines)
    for key, rewards in step_rewards.items():
        updated[key] = running_baseline(role_baselines.get(key, 0.0), rewards)
    return updated


def role_baselines_after(
    role_baselines: dict[str, float], groups: Sequence[Group], algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Return the role baselines after a step; estimators other than RAE have none to update.

    For the arguments see :func:`update_role_baselines`.
    """
    if algorithm.adv_estimator != "rae":
        return role_baselines
    return update_role_baselines(role_baselines, groups, turn_reward=algorithm.turn_reward)


def _baseline_key(trajectory: Trajectory) -> str:
    """Return the data source and the role of a trajectory: what shares a running baseline."""
    return f"{trajectory.row.get('data_source')}/{trajectory.role or ''}"


def recorded(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the members of each group, and after them the trajectories of its frozen roles."""
    trajectories: list[Trajectory] = []
    for group in groups:
        trajectories += group.trajectories
        trajectories += group.frozen
    return trajectories


def all_trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the members of all groups, in order."""
    return [trajectory for group in groups for trajectory in group.trajectories]
