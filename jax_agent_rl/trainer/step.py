"""The parts of a training step: its groups, how they are sampled and shaped, and its interruptible learner update."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.filters import shape
from jax_agent_rl.config import Config
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.advantages.estimators import running_baseline
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.outcomes import total_reward
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import BackendMetrics
from jax_agent_rl.types import Group, SamplingParams, Trajectory

UNDO_SECONDS = 2.0  # for an interrupted update to stop and put the state back


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The groups of one step.

    Attributes:
        groups: before any filter.
        engine: what the engines did while they were collected.
        seconds: over which ``engine`` counts.
        metrics: more named values for the step's record.
    """

    groups: list[Group]
    engine: BackendMetrics
    seconds: float
    metrics: Mapping[str, object] = field(default_factory=dict)


@dataclass(kw_only=True)
class Step:
    """A training step in progress. Ctrl-C or SIGTERM undoes its learner update while that is possible.

    Attributes:
        number: from 1.
        began: on the trainer's clock.
        print_line: prints a line for people.
        stop_rollouts: stops what the engines do meanwhile.
        batch: what :meth:`Trainer.rollout` returned.
        publish_seconds: what :meth:`Trainer.publish` returned.
        cancellation: to be given to the learner.
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
        """The update's result, once it has succeeded, even if the caller was cancelled meanwhile."""
        update = self._update
        if update is None or not update.done() or update.cancelled() or update.exception() is not None:
            return None
        return update.result()

    async def learn(self, update: Awaitable[UpdateResult]) -> None:
        """Run the learner's update.

        Raises:
            asyncio.CancelledError: the caller was cancelled. The update is undone, or finished if it has begun for
                good; :attr:`result` tells.
        """
        self._update = asyncio.ensure_future(update)
        try:
            await asyncio.shield(self._update)
        except asyncio.CancelledError:
            if not self.cancellation.cancel():
                self.print_line("  its updates have begun: finishing this learner step before saving")
                await self.stop_rollouts()
                await asyncio.wait((self._update,))
                raise
            if self.cancellation.has_begun:  # the thread goes back by itself, unless it is inside a compiler
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
    return SamplingParams(max_tokens=config.rollout.max_model_len, temperature=config.rollout.eval_temperature)


async def gather(
    collector: RolloutCollector,
    client: LLMServerClient,
    rows: Sequence[dict],
    *,
    group_size: int,
    sampling: SamplingParams,
    step: int,
    label: str,
    arrived: Callable[[Group], None],
) -> list[Group]:
    """Collect one group per row, in the rows' order: groups arrive as they finish, and nothing may depend on that.

    Args:
        collector: runs the rollouts.
        client: of the engines.
        rows: of the dataset.
        group_size: trajectories of each group.
        sampling: of every turn.
        step: see :meth:`RolloutCollector.collect`.
        label: see :meth:`RolloutCollector.collect`.
        arrived: called with each complete group.

    Raises:
        EngineDiedError: no server is left; lost groups would look like failures of the policy.
    """
    groups = []
    async with aclosing(
        collector.collect(rows, group_size=group_size, sampling=sampling, step=step, label=label)
    ) as stream:
        async for group in stream:
            groups.append(group)
            arrived(group)
    client.require_server()
    return sorted(groups, key=lambda group: int(group.group_id.rsplit("-", 1)[1]))


def shaped(group: Group, config: Config, greedy: Group | None = None) -> Group:
    """Return a scored group as filters and learner take it, the same in every trainer.

    Penalties of ``algorithm.shaping`` come off its rewards, and those of the greedy rollout of its prompt, which
    becomes its baseline (ReMax).

    Args:
        group: as it was collected.
        config: of the run.
        greedy: the group of the greedy rollout; None without one.

    Raises:
        ConfigError: there is a greedy rollout, and the agent plays several roles.
    """
    algorithm, limit = config.algorithm, config.agent.max_response_length
    group = shape(group, algorithm.shaping, max_response_length=limit)
    if greedy is None:
        return group
    if any(trajectory.role for trajectory in greedy.trajectories):
        raise ConfigError(
            "algorithm.adv_estimator=remax compares with one reward per prompt, and an agent of several roles has "
            "several; set algorithm.adv_estimator=grpo or rae"
        )
    greedy = shape(greedy, algorithm.shaping, max_response_length=limit)
    if not greedy.trajectories:  # lost
        return group
    return replace(group, greedy_reward=total_reward(greedy.trajectories[0], algorithm.turn_reward))


def with_role_baselines(group: Group, known: Mapping[str, float]) -> Group:
    """Add the total rewards to expect of each role (RAE): those ``known`` before this step, by data source and role."""
    return replace(group, baselines={t.role or "": known.get(_game(t), 0.0) for t in group.trajectories})


def update_role_baselines(
    known: Mapping[str, float], groups: Sequence[Group], *, turn_reward: str = "none"
) -> dict[str, float]:
    """Return the baselines after a step, with the total rewards of all its trajectories.

    Args:
        known: before the step.
        groups: of the step, shaped.
        turn_reward: ``algorithm.turn_reward``, part of the totals.
    """
    rewards: dict[str, list[float]] = {}
    for trajectory in all_trajectories(groups):
        rewards.setdefault(_game(trajectory), []).append(total_reward(trajectory, turn_reward))
    return {**known, **{game: running_baseline(known.get(game, 0.0), new) for game, new in rewards.items()}}


def _game(trajectory: Trajectory) -> str:
    return f"{trajectory.row.get('data_source')}/{trajectory.role or ''}"


def recorded(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the members of each group, and after them the trajectories of its frozen roles."""
    return [t for g in groups for t in (*g.trajectories, *g.frozen)]


def all_trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the members of all groups, in order."""
    return [t for g in groups for t in g.trajectories]
