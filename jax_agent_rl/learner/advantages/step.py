"""Estimators that compare over the whole step or use a critic, on plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jax_agent_rl.learner.advantages.within_group import grpo
from jax_agent_rl.learner.scored_batch import PerToken

VARIANCE_EPSILON = 1e-8


def whiten(values: PerToken, masks: Sequence[np.ndarray]) -> PerToken:
    """Zero mean and unit variance (unbiased) over all masked-in tokens; 0 elsewhere, and if there is but one."""
    inside = np.concatenate([v[m] for v, m in zip(values, masks, strict=True)])
    mean = inside.mean() if len(inside) else 0.0
    variance = inside.var(ddof=1) if len(inside) > 1 else 1.0
    return [(v - mean) / np.sqrt(variance + VARIANCE_EPSILON) * m for v, m in zip(values, masks, strict=True)]


def discounted_returns(rewards_L: np.ndarray, mask_L: np.ndarray, gamma: float) -> np.ndarray:
    """``G_t = r_t + gamma G_{t+1}``, where t counts sampled tokens only: a tool result takes no time.

    A reward on a masked token belongs to the sampled token before it. Values at mask 0 are 0.

    >>> discounted_returns(np.array([0, 0, 0, 0, 2.0]), np.array([1, 1, 0, 0, 1], bool), 0.5)
    array([0.5, 1. , 0. , 0. , 2. ])
    """
    returns_L = np.zeros(len(rewards_L))
    after = pending = 0.0
    for t in reversed(range(len(rewards_L))):
        pending += rewards_L[t]
        if mask_L[t]:
            after = returns_L[t] = pending + gamma * after
            pending = 0.0
    return returns_L


def reinforce_plus_plus(rewards: PerToken, masks: Sequence[np.ndarray], gamma: float) -> PerToken:
    """Discounted returns, whitened over the step.

    References: Hu et al. 2025, REINFORCE++, arXiv 2501.03262.
    """
    return whiten([discounted_returns(r, m, gamma) for r, m in zip(rewards, masks, strict=True)], masks)


def reinforce_plus_plus_baseline(
    totals: np.ndarray, members: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> PerToken:
    """``S - mean`` of the group (a group of one keeps S), whitened over the step.

    References: Hu et al. 2025, REINFORCE++, arXiv 2501.03262.
    """
    return whiten([value * mask for value, mask in zip(_centred(totals, members), masks, strict=True)], masks)


def _centred(totals: np.ndarray, members: Sequence[np.ndarray]) -> np.ndarray:
    """Return ``S - mean`` of each group, float64 [N]; a group of one keeps S."""
    centred = totals.astype(np.float64, copy=True)
    for group in members:
        if len(group) > 1:
            centred[group] -= totals[group].mean()
    return centred


def remax(rewards: PerToken, masks: Sequence[np.ndarray], greedy: np.ndarray) -> PerToken:
    """Reward still to come, minus the reward of the greedy rollout of the same prompt.

    Args:
        rewards: float64 [L] each.
        masks: bool [L] each.
        greedy: float64 [N].

    References: Li et al. 2023, ReMax, arXiv 2310.10505.
    """
    returns = [discounted_returns(r, m, 1.0) for r, m in zip(rewards, masks, strict=True)]
    return [(g - baseline) * m for g, baseline, m in zip(returns, greedy, masks, strict=True)]


RAE_DECAY = 0.95


def running_baseline(baseline: float, rewards: Sequence[float]) -> float:
    """Return the exponential moving average of a role's rewards: ``b <- 0.95 b + 0.05 R`` for each, from b = 0.

    RAE's advantage is the reward minus ``b`` as it was before the step.

    References: Liu et al. 2025, SPIRAL, arXiv 2506.24119, role-conditioned advantage estimation.
    """
    for reward in rewards:
        baseline = RAE_DECAY * baseline + (1 - RAE_DECAY) * reward
    return baseline


def gpg(totals: np.ndarray, members: Sequence[np.ndarray]) -> np.ndarray:
    """``N / nonzero * (S - mean)``: scaled up by the share of trajectories that earned something. Float64 [N].

    A group of one keeps S.

    References: Chu et al. 2025, GPG, arXiv 2504.02546.
    """
    return _centred(totals, members) * len(totals) / max(1, np.count_nonzero(totals))


def gdpo(
    parts: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    members: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
) -> PerToken:
    """GRPO on every part of the reward by itself, weighted, summed, whitened over the step.

    Args:
        parts: float64 [N] by name.
        weights: by the same names.
        members: for each group the indices of its trajectories.
        masks: bool [L] each.

    References: Liu et al. 2026, GDPO, arXiv 2601.05242.
    """
    advantages = np.zeros(sum(map(len, members)))
    for name, values in parts.items():
        for group in members:
            advantages[group] += weights[name] * grpo(values[group])
    return whiten([value * mask for value, mask in zip(advantages, masks, strict=True)], masks)


def gae(
    rewards_L: np.ndarray,
    values_L: np.ndarray,
    mask_L: np.ndarray,
    *,
    gamma: float,
    lam: float,
    value_after: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t`` over sampled tokens.

    Inserted ids take no time: the next value and the running advantage are those of the next sampled token, and values
    at mask 0 never matter. A reward on an inserted id belongs to the sampled token before it.

    Args:
        rewards_L: float64 [L].
        values_L: float64 [L]; ``values_L[t]`` is of the state in which id t was sampled.
        mask_L: bool [L].
        gamma: discount factor.
        lam: weight of longer returns.
        value_after: value of the state after the last id: 0 where the trajectory ended by itself.

    Returns:
        advantages and returns (``A + V``), float64 [L]; 0 at mask 0.

    References: Schulman et al. 2015, arXiv 1506.02438.
    """
    advantages_L, returns_L = np.zeros(len(rewards_L)), np.zeros(len(rewards_L))
    next_value, running, pending = value_after, 0.0, 0.0
    for t in reversed(range(len(rewards_L))):
        pending += rewards_L[t]
        if mask_L[t]:
            running = pending + gamma * next_value - values_L[t] + gamma * lam * running
            next_value, pending = values_L[t], 0.0
            advantages_L[t], returns_L[t] = running, running + values_L[t]
    return advantages_L, returns_L
