"""Scores of an evaluation by data source: pass@k, means, and their confidence intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from jax_agent_rl.types import Group

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

    With agents of several roles, each role's are ``<data source>/<role>``; a lost episode counts for all of them.

    Args:
        groups: one group per prompt.
        sources: data source of each group.
        samples: trajectories started per prompt. Lost ones count as failures with reward 0: leaving them out would
            flatter a policy that breaks what it uses.
        ks: values of k for pass@k.
        pass_reward: minimum reward of a trajectory that passes.
        seed: seed of the resampling.
    """
    parts: dict[str, list[Group]] = {}
    for name in sorted(set(sources)):
        of_source = [g for g, source in zip(groups, sources, strict=True) if source == name]
        for role in sorted({t.role or "" for g in of_source for t in g.trajectories} or {""}):
            parts[f"{name}/{role}" if role else name] = [
                replace(g, trajectories=tuple(t for t in g.trajectories if (t.role or "") == role)) for g in of_source
            ]
    if len(parts) > 1:
        parts[ALL] = [group for part in parts.values() for group in part]
    return {
        name: _scores(part, samples=samples, ks=ks, pass_reward=pass_reward, seed=seed) for name, part in parts.items()
    }


def _scores(
    groups: Sequence[Group], *, samples: int, ks: Sequence[int], pass_reward: float, seed: int
) -> dict[str, Any]:
    members = [t for g in groups for t in g.trajectories]
    calls = [call for t in members for call in t.tool_calls]
    lost = sum((Counter({str(r): c for r, c in g.dropped.items()}) for g in groups), Counter())
    passed = [sum(reward >= pass_reward for reward in g.rewards) for g in groups]
    rewards = estimate([sum(g.rewards) / samples for g in groups], seed=seed)
    return {
        "prompts": len(groups),
        "samples": samples * len(groups),
        "lost": dict(lost),
        "reward": vars(rewards),
        "pass": {
            str(k): vars(estimate([pass_at_k(samples, count, k) for count in passed], seed=seed, share=True))
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

    ``1 - C(samples - passed, k) / C(samples, k)``, as in Chen et al. 2021 (https://arxiv.org/abs/2107.03374), eq. 1.
    ``1 - (1 - passed/samples) ** k`` would be too low.

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

    Prompts are resampled, not samples, because samples of one prompt are not independent. Equal values would resample
    to a false certainty: for shares the interval is Wilson's then; other values have none, as nothing bounds the next.

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
        return wilson(float(array[0]), len(array)) if share else Estimate(float(array[0]), None, None)
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
    return Estimate(share, low if share > 0 else 0.0, high if share < 1 else 1.0)  # exact despite rounding
