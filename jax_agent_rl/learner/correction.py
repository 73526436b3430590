"""Off-policy correction where the rollout's log-probs differ from the learner's.

The engine may compute in another precision or program, or have sampled from older weights. ``delta`` is always
``old - rollout``, the log of the learner's probability (before the update) over the engine's. Shapes: per trajectory S
sampled tokens. Float64 numpy, over the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jax_agent_rl.config.algorithm import Bounds, RolloutCorrectionConfig

LIMIT = 20.0

PerTerm = list[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """``importance``: factor of each term's policy loss; ``kept``: bool, terms to train on; ``metrics``: floats."""

    importance: PerTerm
    kept: list[np.ndarray]
    metrics: dict[str, float]


def correct(
    config: RolloutCorrectionConfig, old: PerTerm, rollout: PerTerm, active: Sequence[np.ndarray]
) -> Correction:
    """Compute the weights, rejections and metrics of a step.

    Args:
        config: which weights and rejections.
        old: the learner's log-probs, float64 [S] per trajectory.
        rollout: the engine's.
        active: bool [S], terms not masked by a filter; only they count.
    """
    deltas = [np.clip(o - r, -LIMIT, LIMIT) for o, r in zip(old, rollout, strict=True)]
    kept = reject(config.rollout_rs, config.rollout_rs_threshold, deltas, active)
    metrics = mismatch(old, rollout, active)
    if config.rollout_is == "none":
        importance = [np.ones(len(delta)) for delta in deltas]
    else:
        # Of all active terms: a trajectory was sampled as a whole, whatever a rule rejects of it afterwards.
        raw = importance_weights(config.rollout_is, deltas, active)
        importance = truncate(raw, config.rollout_is_threshold)
        metrics |= _weight_metrics(raw, importance, active)
        if config.rollout_is_batch_normalize:
            importance = normalize(config.rollout_is, importance, active)
    if config.rollout_rs:
        before, after = sum(a.sum() for a in active), sum(k.sum() for k in kept)
        metrics["rollout_rs_rejected_fraction"] = 1 - after / max(before, 1)
    return Correction(importance=importance, kept=kept, metrics=metrics)


def importance_weights(level: str, deltas: PerTerm, active: Sequence[np.ndarray]) -> PerTerm:
    """Return ``exp(delta)`` per token, or for all tokens of a trajectory that of its sum (``sequence``).

    References: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training.
    """
    if level == "token":
        return [np.exp(delta) for delta in deltas]
    sums = [np.clip(delta[mask].sum(), -LIMIT, LIMIT) for delta, mask in zip(deltas, active, strict=True)]
    return [np.full(len(delta), np.exp(total)) for delta, total in zip(deltas, sums, strict=True)]


def truncate(weights: PerTerm, threshold: float | Bounds) -> PerTerm:
    """Truncate weights to one threshold (TIS), or zero those outside of two (IcePop)."""
    if isinstance(threshold, tuple):
        low, high = threshold
        return [np.where((w >= low) & (w <= high), w, 0.0) for w in weights]
    return [np.minimum(w, threshold) for w in weights]


def normalize(level: str, weights: PerTerm, active: Sequence[np.ndarray]) -> PerTerm:
    """Divide by the mean over active tokens, or for ``sequence`` over trajectories that have any."""
    inside = [w[mask] for w, mask in zip(weights, active, strict=True)]
    values = np.concatenate(inside) if level == "token" else np.array([w[0] for w in inside if len(w)])
    mean = values.mean() if len(values) else 1.0
    return [w / mean for w in weights] if mean > 0 else weights


def reject(
    rules: Sequence[str], thresholds: Sequence[float | Bounds], deltas: PerTerm, active: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the active terms that pass every rule, bool [S].

    A rule is ``<level>_<estimator>``: the estimator k1 ``-delta``, k2 ``delta^2 / 2`` or k3 ``exp(delta) - 1 - delta``,
    of each token, or its sum, mean or maximum over the trajectory. A k1 threshold bounds the exponential, from both
    sides: ``[low, high]``, or one number h for ``[1/h, h]``; the others have an upper bound.
    """
    kept = [np.array(mask, bool) for mask in active]
    bounds = list(thresholds) * len(rules) if len(thresholds) == 1 else thresholds
    for rule, bound in zip(rules, bounds, strict=True):
        level, _, estimator = rule.rpartition("_")
        low, high = _limits(estimator, bound)
        for i, (delta, mask) in enumerate(zip(deltas, active, strict=True)):
            if mask.any():
                value = _LEVELS[level](_ESTIMATORS[estimator](delta), mask)
                kept[i] &= (value >= low) & (value <= high)
    return kept


_ESTIMATORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda delta: -delta,
    "k2": lambda delta: delta**2 / 2,
    "k3": lambda delta: np.exp(delta) - 1 - delta,
}
_LEVELS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "token": lambda values, mask: values,
    "seq_sum": lambda values, mask: values[mask].sum(),
    "seq_mean": lambda values, mask: values[mask].mean(),
    "seq_max": lambda values, mask: values[mask].max(),
}


def _limits(estimator: str, bound: float | Bounds) -> tuple[float, float]:
    if estimator != "k1":
        assert not isinstance(bound, tuple)  # refused by the configuration
        return -np.inf, bound
    low, high = bound if isinstance(bound, tuple) else (1 / bound, bound)
    return float(np.log(low)), float(np.log(high))


def mismatch(old: PerTerm, rollout: PerTerm, active: Sequence[np.ndarray]) -> dict[str, float]:
    """Measure how far the two policies are apart, over the active tokens.

    Both directions of KL by k1 and k3 (``rollout_kl``: from the rollout's policy, whose samples these are, so the
    other, ``reverse_kl``, is weighted by the ratio), the mean ratio of perplexities, and the largest difference.
    """
    pairs = [(o[m], r[m]) for o, r, m in zip(old, rollout, active, strict=True) if m.any()]
    if not pairs:
        return {}
    delta = np.clip(np.concatenate([o - r for o, r in pairs]), -LIMIT, LIMIT)
    ratio = np.exp(delta)
    return {
        "rollout_kl": float(-delta.mean()),
        "rollout_k3_kl": float((ratio - 1 - delta).mean()),
        "rollout_reverse_kl": float((ratio * delta).mean()),
        "rollout_reverse_k3_kl": float((ratio * delta - ratio + 1).mean()),
        "rollout_ppl_ratio": float(np.mean([np.exp(np.clip((r - o).mean(), -LIMIT, LIMIT)) for o, r in pairs])),
        "rollout_max_logprob_difference": float(max(np.abs(o - r).max() for o, r in pairs)),
    }


def behaviour_weights(cap: float, old: PerTerm, rollout: PerTerm, active: Sequence[np.ndarray]) -> dict[str, float]:
    """Return metrics of the weights within ``policy_loss.loss_mode: decoupled``, named as those of ``rollout_is``.

    Args:
        cap: tokens above it are left out.
        old: the learner's log-probs, float64 [S] per trajectory.
        rollout: the engine's.
        active: bool [S].
    """
    raw = [np.exp(np.clip(o - r, -LIMIT, LIMIT)) for o, r in zip(old, rollout, strict=True)]
    return _weight_metrics(raw, [np.where(weights > cap, 0.0, weights) for weights in raw], active)


def _weight_metrics(raw: PerTerm, truncated: PerTerm, active: Sequence[np.ndarray]) -> dict[str, float]:
    """Return statistics over the active terms.

    Extremes are of the raw weights; mean, deviation and effective sample size (as a share of the terms; 0 if every
    weight is 0) of those that multiply the loss.

    References: Kish 1965, Survey Sampling, for the effective sample size.
    """
    before = np.concatenate([w[m] for w, m in zip(raw, active, strict=True)])
    after = np.concatenate([w[m] for w, m in zip(truncated, active, strict=True)])
    if not len(before):
        return {}
    mean, square = float(after.mean()), float(np.square(after).mean())
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": float(after.std()),
        "rollout_is_max": float(before.max()),
        "rollout_is_min": float(before.min()),
        "rollout_is_eff_sample_size": mean**2 / square if square > 0 else 0.0,
        "rollout_is_clipped_fraction": float(np.mean(before != after)),
    }
