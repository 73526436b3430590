"""One evaluation: n trajectories per held-out row, sampled as in training, and their scores.

::

    rows ──► the evaluator's agents ──► trajectories.jsonl, as they end
             (tools, rewards,       └─► pass@k, rewards, intervals by data source ──► summary.json
              val_ limits)
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy.stats import bootstrap

from jax_agent_rl.collect.accounting import LostBatchGuard
from jax_agent_rl.config import Config
from jax_agent_rl.data.dataset import RowsWithoutPrompts, evaluation_sources
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.runtime.policy import ServedPolicy
from jax_agent_rl.runtime.rollouts import Rollouts, Source, open_rollouts
from jax_agent_rl.trainer.record import evaluation_record
from jax_agent_rl.trainer.step import all_trajectories, evaluation_sampling, recorded
from jax_agent_rl.types import Group, SamplingParams
from jax_agent_rl.utils.text import counted


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The options of an evaluation.

    Attributes:
        samples: trajectories per row.
        ks: values of k for pass@k, ascending.
        pass_reward: minimum reward of a trajectory that passes.
        temperature: None: chosen by :func:`sampling`.
        top_p, top_k, min_p: see :class:`~jax_agent_rl.types.SamplingParams`.
        data: file, glob or Hub dataset of rows; replaces ``data.eval``.
        limit: use only the first rows.
    """

    samples: int = 8
    ks: tuple[int, ...] = (1, 4, 8)
    pass_reward: float = 1.0
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    data: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"-n {self.samples}: at least one sample per prompt is needed")
        if not self.ks or min(self.ks) < 1 or max(self.ks) > self.samples:
            raise ConfigError(
                f"-k {','.join(map(str, self.ks))}: pass@k needs 1 <= k <= {self.samples} samples"
                " (-n)"
            )


def sampling(config: Config, request: EvaluationRequest) -> SamplingParams:
    """Return the sampling parameters of held-out evaluations, with what the request overrides.

    With several samples and ``rollout.eval_temperature`` 0, the training temperature applies:
    greedy samples of a prompt are all equal.

    Raises:
        ConfigError: a value is out of range.
    """
    temperature = request.temperature
    if temperature is None:
        temperature = config.rollout.eval_temperature
        if temperature == 0 and request.samples > 1:
            temperature = config.rollout.temperature
    try:
        return replace(
            evaluation_sampling(config),
            temperature=temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
        )
    except ValueError as error:
        raise ConfigError(f"--temperature, --top-p, --top-k, --min-p: {error}") from None


def select_rows(config: Config, request: EvaluationRequest) -> Source:
    """Return the rows to evaluate: their sources, and how many at most.

    Raises:
        ConfigError: none are named.
    """
    limits = []
    if request.limit:
        limits.append(request.limit)
    if not request.data and config.data.eval_limit:
        limits.append(config.data.eval_limit)
    return evaluation_sources(config, request.data), min(limits, default=None)


async def evaluate(
    subject: ServedPolicy, request: EvaluationRequest, *, out: Path, console: Console
) -> dict[str, Any]:
    """Sample and score; return the summary, which is also ``summary.json`` in ``out``.

    Args:
        out: folder to write, with the layout of a run folder, so that ``view`` shows its
            trajectories.
        console: shows progress.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: the user has to fix something.
        EngineDiedError, NothingToTrainError: no server is left, or every trajectory was lost.
    """
    config = subject.config.model_copy(update={"run_dir": str(out)})
    sampling_params = sampling(config, request)
    source = select_rows(config, request)
    start = time.monotonic()
    fingerprint = subject.fingerprint()
    with Progress(console, total_steps=0) as progress:
        async with open_rollouts(
            config, source, version=subject.step, print_line=progress.phase
        ) as rollouts:
            run_dir = RunDir(out)
            recorded = subject.recorded.model_copy(update={"run_dir": str(out)})
            run_dir.write_json(run_dir.config, recorded.model_dump(mode="json"))
            groups = await _sample(rollouts, subject, request, sampling_params, run_dir, progress)
    seconds = time.monotonic() - start
    run_dir.add_metrics(evaluation_record(subject.step, groups, seconds=seconds))

    versions: set[int] = set()
    for trajectory in all_trajectories(groups):
        # Ids that were not sampled have version -1.
        versions.update(version for version in trajectory.policy_versions if version >= 0)
    sources, _ = source
    group_scores = scores(
        groups,
        [str(row["data_source"]) for row in RowsWithoutPrompts(rollouts.rows)],
        samples=request.samples,
        ks=request.ks,
        pass_reward=request.pass_reward,
        seed=config.seed,
    )
    summary = {
        "policy": subject.name,
        "policy_fingerprint": fingerprint,
        "policy_versions": sorted(versions),
        "data": ", ".join(map(str, sources)),
        "samples_per_prompt": request.samples,
        "temperature": sampling_params.temperature,
        "top_p": sampling_params.top_p,
        "top_k": sampling_params.top_k,
        "min_p": sampling_params.min_p,
        "pass_reward": request.pass_reward,
        "seed": config.seed,
        "seconds": round(seconds, 1),
        "scores": group_scores,
    }
    run_dir.write_json(run_dir.summary, summary)
    return summary


async def _sample(
    rollouts: Rollouts,
    subject: ServedPolicy,
    request: EvaluationRequest,
    sampling_params: SamplingParams,
    run_dir: RunDir,
    progress: Progress,
) -> Sequence[Group]:
    """Sample for every row.

    Seeds are as in the held-out evaluation after this step, so that its samples come first.
    """
    evaluator = rollouts.agents.evaluator
    sampled = 0
    total_reward = 0.0

    def arrived(group: Group) -> None:
        nonlocal sampled, total_reward
        sampled += request.samples
        total_reward += sum(trajectory.score for trajectory in group.trajectories)
        run_dir.add_trajectories(subject.step, "heldout", recorded([group]))

    total = len(rollouts.rows) * request.samples

    def describe() -> str:
        mean_reward = total_reward / max(1, sampled)
        return f"{sampled}/{counted(total, 'trajectory')}, mean reward {mean_reward:.3f}"

    progress.phase("sampling", describe)
    groups = await evaluator.collect(
        rollouts.rows,
        group_size=request.samples,
        sampling=sampling_params,
        step=subject.step,
        label="heldout",
        arrived=arrived,
    )
    rollouts.client.require_server()
    evaluator.accounting.train(trajectory.trajectory_id for trajectory in all_trajectories(groups))
    LostBatchGuard(1).check(groups, evaluator.latest_losses)
    return groups


# --- scores ---------------------------------------------------------------------------------------

ALL = "all"
RESAMPLES = 2000
CONFIDENCE = 0.95
_Z = 1.959964  # normal quantile of 95 %


def scores(
    groups: Sequence[Group],
    sources: Sequence[str],
    *,
    samples: int,
    ks: Sequence[int],
    pass_reward: float,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Return the scores of each data source, and of ``all`` if there are several.

    The scores of agents with several roles are given for each role, as ``<data source>/<role>``; a
    lost episode counts for all of them.

    Args:
        groups: one group per prompt.
        sources: data source of each group.
        samples: trajectories started per prompt. Lost ones count as failures with reward 0: leaving
            them out would flatter a policy that breaks what it uses.
        ks: values of k for pass@k.
        pass_reward: minimum reward of a trajectory that passes.
        seed: seed of the resampling.
    """
    parts: dict[str, list[Group]] = {}
    for name in sorted(set(sources)):
        source_groups = []
        for group, source in zip(groups, sources, strict=True):
            if source == name:
                source_groups.append(group)
        for role in _roles(source_groups):
            part_name = f"{name}/{role}" if role else name
            parts[part_name] = [_of_role(group, role) for group in source_groups]
    if len(parts) > 1:
        parts[ALL] = [group for part in parts.values() for group in part]

    scores_by_part = {}
    for name, part in parts.items():
        scores_by_part[name] = _scores(
            part, samples=samples, ks=ks, pass_reward=pass_reward, seed=seed
        )
    return scores_by_part


def _roles(groups: Sequence[Group]) -> list[str]:
    """Return the roles of all trajectories; an agent without roles has ""."""
    roles = {trajectory.role or "" for trajectory in all_trajectories(groups)}
    if not roles:  # every trajectory was lost
        return [""]
    return sorted(roles)


def _of_role(group: Group, role: str) -> Group:
    trajectories = tuple(
        trajectory for trajectory in group.trajectories if (trajectory.role or "") == role
    )
    return replace(group, trajectories=trajectories)


def _scores(
    groups: Sequence[Group], *, samples: int, ks: Sequence[int], pass_reward: float, seed: int
) -> dict[str, Any]:
    members = all_trajectories(groups)
    calls = [call for trajectory in members for call in trajectory.tool_calls]

    lost: Counter[str] = Counter()
    mean_rewards = []
    passed_counts = []
    for group in groups:
        for reason, count in group.dropped.items():
            lost[str(reason)] += count
        group_scores = [trajectory.score for trajectory in group.trajectories]
        mean_rewards.append(sum(group_scores) / samples)
        passed_counts.append(sum(score >= pass_reward for score in group_scores))

    pass_estimates = {}
    for k in ks:
        pass_rates = [pass_at_k(samples, passed, k) for passed in passed_counts]
        pass_estimates[str(k)] = vars(estimate(pass_rates, seed=seed, share=True))
    return {
        "prompts": len(groups),
        "samples": samples * len(groups),
        "lost": dict(+lost),  # without zero counts
        "reward": vars(estimate(mean_rewards, seed=seed)),
        "pass": pass_estimates,
        "reward_parts": _part_means([trajectory.reward_parts for trajectory in members]),
        "turns_mean": _mean([t.num_turns for t in members]),
        "response_tokens_mean": _mean([len(t.response_ids) for t in members]),
        "tool_calls_mean": _mean([len(t.tool_calls) for t in members]),
        "tool_error_share": _mean([call.error is not None for call in calls]),
        "cut_share": _mean([t.finish_reason.truncated for t in members]),
    }


def _part_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each named part of the reward, over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: _mean(values[name]) for name in sorted(values)}


def _mean(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    return float(np.mean(values))


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its 95 % confidence interval; None where there is none."""

    mean: float
    low: float | None
    high: float | None


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of ``k`` samples passes.

    ``1 - C(samples - passed, k) / C(samples, k)``, as in Chen et al. 2021
    (https://arxiv.org/abs/2107.03374), eq. 1. ``1 - (1 - passed/samples) ** k`` would be too low.

    Args:
        passed: number of samples that passed.
        k: number of samples drawn.

    >>> pass_at_k(4, 2, 1), round(pass_at_k(4, 2, 2), 4), pass_at_k(4, 2, 3)
    (0.5, 0.8333, 1.0)

    Raises:
        ValueError: ``k`` or ``passed`` exceeds ``samples``.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples of which {passed} passed")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def estimate(values: Sequence[float], *, seed: int, share: bool = False) -> Estimate:
    """Return the mean over prompts with its percentile bootstrap interval.

    Prompts are resampled, not samples, because samples of one prompt are not independent. Equal
    values would resample to a false certainty: their interval is Wilson's if they are shares; other
    values have none, because nothing bounds the next one.

    Args:
        values: one per prompt.
        seed: seed of the resampling.
        share: whether the values are in [0, 1].

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no prompts to take a mean of")
    array = np.asarray(values, np.float64)
    if array.min() == array.max():
        value = float(array[0])
        if share:
            return wilson(value, len(array))
        return Estimate(value, None, None)

    result = bootstrap(
        (array,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return Estimate(float(array.mean()), float(low), float(high))


def wilson(share: float, trials: int) -> Estimate:
    """Return a share of independent trials with Wilson's score interval (1927).

    The share may be any mean in [0, 1]; scipy's interval takes whole successes only.

    >>> wilson(0.0, 20)
    Estimate(mean=0.0, low=0.0, high=0.16112515...)
    """
    square = _Z**2 / trials
    centre = (share + square / 2) / (1 + square)
    half = _Z * math.sqrt((share * (1 - share) + square / 4) / trials) / (1 + square)
    low = max(0.0, centre - half)
    high = min(1.0, centre + half)
    # The ends of [0, 1] are exact, despite rounding.
    if share <= 0:
        low = 0.0
    if share >= 1:
        high = 1.0
    return Estimate(share, low, high)
