"""Off-policy correction where the rollout's log-probs differ from the learner's.

The engine may compute in another precision or program, or have sampled from older weights. The
importance ratio of a token is the learner's probability (before the update) over the engine's;
``log_ratio`` is always ``old - rollout``.

Shapes: S sampled tokens per trajectory. Everything is float64 numpy, over the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jax_agent_rl.config.algorithm import Bounds, RolloutCorrectionConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clipped to it, so that their exponentials stay finite."""

PerTerm = list[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The correction of a step.

    Attributes:
        importance: float64 [S] per trajectory, factor of each token's policy loss.
        accepted: bool [S] per trajectory, tokens to train on.
        metrics: named floats for the log.
    """

    importance: PerTerm
    accepted: list[np.ndarray]
    metrics: dict[str, float]


def correct(
    config: RolloutCorrectionConfig,
    old: PerTerm,
    rollout: PerTerm,
    active: Sequence[np.ndarray],
) -> Correction:
    """Compute the weights, rejections and metrics of a step.

    Args:
        config: which weights and rejections.
        old: the learner's log-probs, float64 [S] per trajectory.
        rollout: the engine's log-probs.
        active: bool [S], tokens not masked by a filter; only they count.
    """
    log_ratios = _log_ratios(old, rollout)
    accepted = reject(config.rollout_rs, config.rollout_rs_threshold, log_ratios, active)
    metrics = mismatch(old, rollout, active)

    if config.rollout_is == "none":
        importance = [np.ones(len(log_ratio)) for log_ratio in log_ratios]
    else:
        # Rejected tokens count: a trajectory was sampled as a whole, whatever a rule rejects later.
        ratios = importance_weights(config.rollout_is, log_ratios, active)
        importance = truncate(ratios, config.rollout_is_threshold)
        metrics |= _weight_metrics(ratios, importance, active)
        if config.rollout_is_batch_normalize:
            importance = normalize(config.rollout_is, importance, active)

    if config.rollout_rs:
        num_active = sum(mask.sum() for mask in active)
        num_accepted = sum(mask.sum() for mask in accepted)
        metrics["rollout_rs_rejected_fraction"] = 1 - num_accepted / max(num_active, 1)
    return Correction(importance=importance, accepted=accepted, metrics=metrics)


def _log_ratios(old: PerTerm, rollout: PerTerm) -> PerTerm:
    log_ratios = []
    for old_logprobs, rollout_logprobs in zip(old, rollout, strict=True):
        log_ratios.append(_clip(old_logprobs - rollout_logprobs))
    return log_ratios


def _clip(log_ratio: np.ndarray) -> np.ndarray:
    return np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_weights(
    level: str,
    log_ratios: PerTerm,
    active: Sequence[np.ndarray],
) -> PerTerm:
    """Return the importance ratio of each token, or of its trajectory.

    Args:
        level: ``token``, or ``sequence``: all tokens get the product of the trajectory's ratios.
        log_ratios: float64 [S] per trajectory.
        active: bool [S]; only these tokens enter the product.

    References: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training.
    """
    if level == "token":
        return [np.exp(log_ratio) for log_ratio in log_ratios]

    weights = []
    for log_ratio, mask in zip(log_ratios, active, strict=True):
        ratio = np.exp(_clip(log_ratio[mask].sum()))
        weights.append(np.full(len(log_ratio), ratio))
    return weights


def truncate(weights: PerTerm, threshold: float | Bounds) -> PerTerm:
    """Truncate weights to one threshold (TIS), or zero those outside of two (IcePop)."""
    if isinstance(threshold, tuple):
        low, high = threshold
        return [np.where((w >= low) & (w <= high), w, 0.0) for w in weights]
    return [np.minimum(w, threshold) for w in weights]


def normalize(level: str, weights: PerTerm, active: Sequence[np.ndarray]) -> PerTerm:
    """Divide by the mean over active tokens, or for ``sequence`` over trajectories with any."""
    active_weights = []
    for trajectory_weights, mask in zip(weights, active, strict=True):
        if mask.any():
            active_weights.append(trajectory_weights[mask])
    if not active_weights:
        return weights

    if level == "token":
        mean = np.concatenate(active_weights).mean()
    else:  # all tokens of a trajectory have the same weight
        mean = np.mean([trajectory_weights[0] for trajectory_weights in active_weights])
    if not mean > 0:  # or NaN
        return weights
    return [trajectory_weights / mean for trajectory_weights in weights]


def reject(
    rules: Sequence[str],
    thresholds: Sequence[float | Bounds],
    log_ratios: PerTerm,
    active: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Return the active tokens that pass every rule, bool [S].

    A rule is ``<level>_<estimator>``. With the log-ratio d, the estimators of the KL divergence are
    k1 ``-d``, k2 ``d^2 / 2`` and k3 ``exp(d) - 1 - d``. The level says whether each token is judged
    by its own value, or all by the sum, mean or maximum over the trajectory.

    Args:
        rules: their order does not matter.
        thresholds: one for each rule, or one for all. For k1 it bounds the exponential from both
            sides: ``[low, high]``, or one number h for ``[1/h, h]``. For k2 and k3 it is an upper
            bound.
        log_ratios: float64 [S] per trajectory.
        active: bool [S].
    """
    if len(thresholds) == 1:
        thresholds = list(thresholds) * len(rules)

    accepted = [np.array(mask, bool) for mask in active]
    for rule, threshold in zip(rules, thresholds, strict=True):
        level, _, estimator = rule.rpartition("_")
        low, high = _limits(estimator, threshold)
        for i, (log_ratio, mask) in enumerate(zip(log_ratios, active, strict=True)):
            if mask.any():
                per_token = _ESTIMATORS[estimator](log_ratio)
                value = _LEVELS[level](per_token, mask)
                accepted[i] &= (value >= low) & (value <= high)
    return accepted


_ESTIMATORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: log_ratio**2 / 2,
    "k3": lambda log_ratio: np.exp(log_ratio) - 1 - log_ratio,
}
_LEVELS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "token": lambda values, mask: values,
    "seq_sum": lambda values, mask: values[mask].sum(),
    "seq_mean": lambda values, mask: values[mask].mean(),
    "seq_max": lambda values, mask: values[mask].max(),
}


def _limits(estimator: str, threshold: float | Bounds) -> tuple[float, float]:
    """Return the smallest and the largest value that passes."""
    if estimator != "k1":
        assert not isinstance(threshold, tuple)  # refused by the configuration
        return -np.inf, threshold

    if isinstance(threshold, tuple):
        low, high = threshold
    else:
        low = 1 / threshold
        high = threshold
    return float(np.log(low)), float(np.log(high))


def mismatch(old: PerTerm, rollout: PerTerm, active: Sequence[np.ndarray]) -> dict[str, float]:
    """Measure how far the two policies are apart, over the active tokens.

    There are both directions of KL, by k1 and k3; the mean ratio of perplexities; and the largest
    difference. ``rollout_kl`` is an expectation under the rollout's policy, which has sampled these
    tokens. ``rollout_reverse_kl`` is one under the learner's, so its tokens are weighted by the
    importance ratio.
    """
    differences = []  # of the trajectories with an active token
    for old_logprobs, rollout_logprobs, mask in zip(old, rollout, active, strict=True):
        if mask.any():
            differences.append(old_logprobs[mask] - rollout_logprobs[mask])
    if not differences:
        return {}

    log_ratio = _clip(np.concatenate(differences))
    ratio = np.exp(log_ratio)
    perplexity_ratios = [np.exp(_clip(-difference.mean())) for difference in differences]
    return {
        "rollout_kl": float(-log_ratio.mean()),
        "rollout_k3_kl": float((ratio - 1 - log_ratio).mean()),
        "rollout_reverse_kl": float((ratio * log_ratio).mean()),
        "rollout_reverse_k3_kl": float((ratio * log_ratio - ratio + 1).mean()),
        "rollout_ppl_ratio": float(np.mean(perplexity_ratios)),
        "rollout_max_logprob_difference": float(max(np.abs(d).max() for d in differences)),
    }


def behaviour_weights(
    cap: float,
    old: PerTerm,
    rollout: PerTerm,
    active: Sequence[np.ndarray],
) -> dict[str, float]:
    """Return metrics of the weights within ``policy_loss.loss_mode: decoupled``.

    They are named like the metrics of ``rollout_is``.

    Args:
        cap: tokens with a larger weight are left out.
        old: the learner's log-probs, float64 [S] per trajectory.
        rollout: the engine's log-probs.
        active: bool [S].
    """
    ratios = [np.exp(log_ratio) for log_ratio in _log_ratios(old, rollout)]
    weights = [np.where(ratio > cap, 0.0, ratio) for ratio in ratios]
    return _weight_metrics(ratios, weights, active)


def _weight_metrics(
    ratios: PerTerm,
    weights: PerTerm,
    active: Sequence[np.ndarray],
) -> dict[str, float]:
    """Return statistics over the active tokens.

    Extremes are those of the importance ratios. Mean, deviation and effective sample size (a share
    of the tokens; 0 if every weight is 0) are those of the weights that multiply the loss.

    References: Kish 1965, Survey Sampling, for the effective sample size.
    """
    ratio = np.concatenate([r[mask] for r, mask in zip(ratios, active, strict=True)])
    weight = np.concatenate([w[mask] for w, mask in zip(weights, active, strict=True)])
    if not len(ratio):
        return {}

    mean = float(weight.mean())
    mean_square = float(np.square(weight).mean())
    effective_sample_size = mean**2 / mean_square if mean_square > 0 else 0.0
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": float(weight.std()),
        "rollout_is_max": float(ratio.max()),
        "rollout_is_min": float(ratio.min()),
        "rollout_is_eff_sample_size": effective_sample_size,
        "rollout_is_clipped_fraction": float(np.mean(ratio != weight)),
    }
