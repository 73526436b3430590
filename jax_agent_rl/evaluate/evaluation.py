"""One evaluation: n trajectories per held-out row, sampled as in training, and their scores by data source.

::

    rows ──► the evaluator's agents (tools, rewards, val_ limits) ──► trajectories.jsonl, as they end
                                                                  └─► pass@k, rewards, intervals ──► summary.json
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
from jax_agent_rl.runtime.sampling import Rollouts, Source, open_rollouts
from jax_agent_rl.trainer.record import evaluation_record
from jax_agent_rl.trainer.step import all_trajectories, evaluation_sampling, gather, recorded
from jax_agent_rl.types import Group, SamplingParams


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
    """Return the sampling parameters of a run's held-out evaluations, unless the request overrides them.

    With several samples and ``rollout.eval_temperature`` 0, the training temperature applies:
    greedy samples of a prompt are all equal.

    Raises:
        ConfigError: a value is out of range.
    """
    wanted = request.temperature
    if wanted is None:
        greedy_twice = config.rollout.eval_temperature == 0 and request.samples > 1
        wanted = config.rollout.temperature if greedy_twice else config.rollout.eval_temperature
    try:
        cut = {"top_p": request.top_p, "top_k": request.top_k, "min_p": request.min_p}
        return replace(evaluation_sampling(config), temperature=wanted, **cut)
    except ValueError as error:
        raise ConfigError(f"--temperature, --top-p, --top-k, --min-p: {error}") from None


def select_rows(config: Config, request: EvaluationRequest) -> Source:
    """Return the rows to evaluate; raises ConfigError if none are named."""
    limits = [
        limit
        for limit in (request.limit, None if request.data else config.data.eval_limit)
        if limit
    ]
    return evaluation_sources(config, request.data), min(limits, default=None)


async def evaluate(
    subject: ServedPolicy, request: EvaluationRequest, *, out: Path, console: Console
) -> dict[str, Any]:
    """Sample and score; return the summary, which is also ``summary.json`` in ``out``.

    Args:
        subject: the policy.
        request: the options.
        out: folder to write, with the layout of a run folder, so that ``view`` shows its
            trajectories.
        console: shows progress.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: the user has to fix something.
        EngineDiedError, NothingToTrainError: no server is left, or every trajectory was lost.
    """
    config = subject.config.model_copy(update={"run_dir": str(out)})
    chosen, source = sampling(config, request), select_rows(config, request)
    begin = time.monotonic()
    fingerprint = subject.fingerprint()
    with Progress(console, total_steps=0) as progress:
        async with open_rollouts(
            config, source, version=subject.step, print_line=progress.phase
        ) as rollouts:
            run_dir = RunDir(out)
            recorded = subject.recorded.model_copy(update={"run_dir": str(out)})
            run_dir.write_json(run_dir.config, recorded.model_dump(mode="json"))
            groups = await _sample(rollouts, subject, request, chosen, run_dir, progress)
            weights = sorted(
                {v for t in all_trajectories(groups) for v in t.policy_versions if v >= 0}
            )
    seconds = time.monotonic() - begin
    run_dir.add_metrics(evaluation_record(subject.step, groups, seconds=seconds))
    summary = {
        "policy": subject.name,
        "policy_fingerprint": fingerprint,
        "policy_versions": weights,
        "data": ", ".join(map(str, source[0])),
        "samples_per_prompt": request.samples,
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "top_k": chosen.top_k,
        "min_p": chosen.min_p,
        "pass_reward": request.pass_reward,
        "seed": config.seed,
        "seconds": round(seconds, 1),
        "scores": scores(
            groups,
            [str(row["data_source"]) for row in RowsWithoutPrompts(rollouts.rows)],
            samples=request.samples,
            ks=request.ks,
            pass_reward=request.pass_reward,
            seed=config.seed,
        ),
    }
    run_dir.write_json(run_dir.summary, summary)
    return summary


async def _sample(
    rollouts: Rollouts,
    subject: ServedPolicy,
    request: EvaluationRequest,
    chosen: SamplingParams,
    run_dir: RunDir,
    progress: Progress,
) -> Sequence[Group]:
    """Sample for every row, with the seeds of the held-out evaluation after this step, whose samples come first."""
    evaluator, done, rewards = rollouts.agents.evaluator, 0, 0.0

    def arrived(group: Group) -> None:
        nonlocal done, rewards
        done += request.samples
        rewards += sum(t.score for t in group.trajectories)
        run_dir.add_trajectories(subject.step, "heldout", recorded([group]))

    total = len(rollouts.rows) * request.samples
    progress.phase(
        "sampling", lambda: f"{done}/{total} trajectories, mean reward {rewards / max(1, done):.3f}"
    )
    groups = await gather(
        evaluator,
        rollouts.client,
        rollouts.rows,
        group_size=request.samples,
        sampling=chosen,
        step=subject.step,
        label="heldout",
        arrived=arrived,
    )
    evaluator.accounting.train(t.trajectory_id for t in all_trajectories(groups))
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

    With agents of several roles, each role's are ``<data source>/<role>``; a lost episode counts
    for all of them.

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
        of_source = [g for g, source in zip(groups, sources, strict=True) if source == name]
        for role in sorted({t.role or "" for g in of_source for t in g.trajectories} or {""}):
            parts[f"{name}/{role}" if role else name] = [
                replace(g, trajectories=tuple(t for t in g.trajectories if (t.role or "") == role))
                for g in of_source
            ]
    if len(parts) > 1:
        parts[ALL] = [group for part in parts.values() for group in part]
    return {
        name: _scores(part, samples=samples, ks=ks, pass_reward=pass_reward, seed=seed)
        for name, part in parts.items()
    }


def _scores(
    groups: Sequence[Group], *, samples: int, ks: Sequence[int], pass_reward: float, seed: int
) -> dict[str, Any]:
    members = [t for g in groups for t in g.trajectories]
    calls = [call for t in members for call in t.tool_calls]
    lost = sum((Counter({str(r): c for r, c in g.dropped.items()}) for g in groups), Counter())
    scores_by_group = [[trajectory.score for trajectory in group.trajectories] for group in groups]
    passed = [sum(score >= pass_reward for score in found) for found in scores_by_group]
    rewards = estimate([sum(found) / samples for found in scores_by_group], seed=seed)
    return {
        "prompts": len(groups),
        "samples": samples * len(groups),
        "lost": dict(lost),
        "reward": vars(rewards),
        "pass": {
            str(k): vars(
                estimate([pass_at_k(samples, count, k) for count in passed], seed=seed, share=True)
            )
            for k in ks
        },
        "reward_parts": _part_means([t.reward_parts for t in members]),
        "turns_mean": _mean([t.num_turns for t in members]),
        "response_tokens_mean": _mean([len(t.response_ids) for t in members]),
        "tool_calls_mean": _mean([len(t.tool_calls) for t in members]),
        "tool_error_share": _mean([call.error is not None for call in calls]),
        "cut_share": _mean([t.finish_reason.truncated for t in members]),
    }


def _part_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each named part of the reward, over the trajectories that have it."""
    names = sorted({name for part in parts for name in part})
    return {name: _mean([part[name] for part in parts if name in part]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


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
        samples: number of samples.
        passed: number of those that passed.
        k: number drawn.

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
    values would resample to a false certainty: for shares the interval is Wilson's then; other
    values have none, as nothing bounds the next.

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
        return (
            wilson(float(array[0]), len(array)) if share else Estimate(float(array[0]), None, None)
        )
    low, high = bootstrap(
        (array,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
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
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Estimate(
        share, low if share > 0 else 0.0, high if share < 1 else 1.0
    )  # exact despite rounding
