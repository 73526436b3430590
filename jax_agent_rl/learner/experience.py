"""From scored groups to what each token contributes to the loss. Numpy, whole steps.

::

    groups ─► token rewards ─► minus KL ─► advantages ─► minus KL ─┐
    old, rollout log-probs ─► importance, rejections ──────────────┼─► terms of each mini-batch
    masked trajectories ─► active tokens ──────────────────────────┘

A *term* is one token that a trajectory sampled, as it enters the loss: see :mod:`.batch`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_agent_rl.config.algorithm import AlgorithmConfig
from jax_agent_rl.learner.advantages.registry import compute_advantages
from jax_agent_rl.learner.advantages.scored_batch import scored_batch
from jax_agent_rl.learner.comparison import Comparison, comparable, compare
from jax_agent_rl.learner.correction import behaviour_weights, correct, mismatch
from jax_agent_rl.learner.losses.aggregation import term_weights
from jax_agent_rl.learner.losses.kl import kl_forward
from jax_agent_rl.learner.observations import observation_weights
from jax_agent_rl.learner.packing import segment_lengths
from jax_agent_rl.types import Group, Trajectory

PerTerm = list[np.ndarray]
"""For each trajectory of the step one number per sampled token, [S]."""

Candidates = Sequence[tuple[np.ndarray, np.ndarray]]
"""For each trajectory the reference's k likeliest ids at every sampled token, int32 [S, k], and
their log-probs."""

RefScores = Sequence[np.ndarray] | Candidates


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a step before it is trained on; None where nothing reads them.

    Attributes:
        old: log-probs per sampled token before the update, float64 [S] per trajectory.
        ref: log-probs of the reference, or its likeliest ids with ``algorithm.kl.top_k``.
        values: float64 [L + 1] per trajectory, see
            :class:`~jax_agent_rl.learner.advantages.ScoredBatch`.
    """

    old: PerTerm | None = None
    ref: RefScores | None = None
    values: list[np.ndarray] | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateTerms:
    """What the tokens of one mini-batch contribute to the losses, per trajectory.

    Attributes:
        active: bool [S], tokens to train on.
        policy: arrays by the name under which the policy's loss reads them.
        critic: the same for the critic's; empty without one.
        candidates: the reference's likeliest ids; None unless the KL is over them.
        observation_weights: float64 [N], weight of an observed id of each trajectory; None without
            an observation loss.
    """

    active: list[np.ndarray]
    policy: dict[str, PerTerm]
    critic: dict[str, PerTerm]
    candidates: Candidates | None = None
    observation_weights: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Experience:
    """A step, ready to be trained on. Arrays are per trajectory and sampled token, [S].

    Attributes:
        trajectory_ids: of the step, in order.
        active: bool, tokens to train on.
        advantages: of each token.
        old_logprobs: under the policy before the update; None if nothing computed them.
        updates: the terms of each mini-batch.
        comparison: engine and learner on every comparable token; None if the learner's log-probs
            are not known yet.
        kl: mean distance to the reference over trajectories with a sampled token, nats per token.
            NaN without such a trajectory, or over candidates.
        metrics: named floats for the log.
    """

    trajectory_ids: list[str]
    active: list[np.ndarray]
    advantages: PerTerm
    old_logprobs: PerTerm | None
    updates: list[UpdateTerms]
    comparison: Comparison | None
    kl: float
    metrics: dict[str, float]


def build_experience(
    groups: Sequence[Group],
    config: AlgorithmConfig,
    scores: Scores,
    *,
    kl_coef: float,
    masked: Collection[str],
    since: int = 0,
    mini_batches: Sequence[slice] = (slice(None),),
    observed: Sequence[int] = (),
) -> Experience:
    """Compute what the losses need, as far as it does not depend on the current parameters.

    Args:
        config: estimator, corrections, KL and loss aggregation.
        kl_coef: the controller's current coefficient.
        masked: ids of trajectories whose rewards count in baselines, but whose tokens are not
            trained on.
        since: first policy version of the parameters that score; tokens of older ones cannot be
            compared.
        mini_batches: the trajectories of each optimizer update of an epoch.
        observed: number of observed ids of each trajectory, with an observation loss.
    """
    samples = scored_batch(groups, turn_reward=config.turn_reward)
    trajectories = samples.trajectories
    sampled = [np.flatnonzero(mask) for mask in samples.masks]

    # --- log-probs ---
    is_bypassed = config.rollout_correction.bypass_mode
    rollout_logprobs = _rollout_logprobs(trajectories, sampled, scores.old)
    old_logprobs = rollout_logprobs if is_bypassed else scores.old
    candidates: Any = None
    ref_logprobs: Any = None
    if config.kl.top_k:
        candidates = scores.ref
    else:
        ref_logprobs = scores.ref

    is_taught = np.ones(len(trajectories))
    if config.kl.reads_feedback:
        # Without feedback the reference is the policy itself. Nothing is left of the distance then,
        # not even its rounding, which an optimizer would scale up.
        is_taught = np.array([bool(trajectory.teacher_prompt_ids) for trajectory in trajectories])

    distances = []  # to the reference, per token
    if old_logprobs is not None and ref_logprobs is not None:
        for old, ref, taught in zip(old_logprobs, ref_logprobs, is_taught, strict=True):
            distances.append(kl_forward(config.kl.estimator, old, ref) * taught)

    # --- advantages ---
    if config.kl.where == "reward":
        for rewards, indices, distance in zip(samples.rewards, sampled, distances, strict=True):
            rewards[indices] -= kl_coef * distance
    estimated = compute_advantages(replace(samples, values=scores.values), config)
    advantage = _select(estimated.advantages, sampled)
    if config.kl.where == "advantage":
        pairs = zip(advantage, distances, strict=True)
        advantage = [values - kl_coef * distance for values, distance in pairs]

    # --- terms of the policy's loss ---
    active = []
    for trajectory, indices in zip(trajectories, sampled, strict=True):
        active.append(np.full(len(indices), trajectory.trajectory_id not in masked))
    metrics = _advantage_metrics(advantage, active)
    is_comparable = [comparable(trajectory, since) for trajectory in trajectories]
    terms = {
        "advantage": advantage,
        "rollout_logprob": rollout_logprobs,
        "comparable": [mask.astype(np.float64) for mask in is_comparable],
    }
    comparison = None
    if old_logprobs is not None:
        terms["old_logprob"] = old_logprobs
        if is_bypassed:
            metrics |= mismatch(old_logprobs, rollout_logprobs, active)
        else:
            comparison = compare(old_logprobs, rollout_logprobs, is_comparable)
            correction = correct(config.rollout_correction, old_logprobs, rollout_logprobs, active)
            active = correction.accepted
            metrics |= correction.metrics
            terms["importance"] = correction.importance
        if config.policy_loss.loss_mode == "decoupled":
            cap = config.policy_loss.behav_imp_weight_cap
            metrics |= behaviour_weights(cap, old_logprobs, rollout_logprobs, active)
    if ref_logprobs is not None and config.kl.where == "loss":
        terms["ref_logprob"] = ref_logprobs

    # --- terms of the critic's loss ---
    value_terms = {}
    if estimated.returns is not None and scores.values is not None:
        old_values = [values[:-1] for values in scores.values]
        value_terms["returns"] = _select(estimated.returns, sampled)
        value_terms["old_value"] = _select(old_values, sampled)

    # --- terms of each mini-batch ---
    segments = [segment_lengths(trajectory) for trajectory in trajectories]
    trajectory_ids = [trajectory.trajectory_id for trajectory in trajectories]
    if config.kl.reads_feedback:
        metrics["feedback_share"] = float(np.mean(is_taught))
    if config.observation_loss.coef:
        metrics["observed_tokens"] = float(sum(observed))
    updates = []
    for members in mini_batches:
        policy = {name: values[members] for name, values in terms.items()}
        policy["weight"] = _weights(config, active[members], segments[members])
        if "ref_logprob" in terms or candidates is not None:
            policy["kl_weight"] = [
                kl_coef * taught * weight
                for weight, taught in zip(policy["weight"], is_taught[members], strict=True)
            ]

        critic = {name: values[members] for name, values in value_terms.items()}
        if critic:
            critic["weight"] = term_weights("token-mean", active[members])

        weights_of_observed = None
        if config.observation_loss.coef:
            weights_of_observed = observation_weights(
                trajectory_ids[members], observed[members], masked
            )

        update = UpdateTerms(
            active=active[members],
            policy=policy,
            critic=critic,
            candidates=None if candidates is None else candidates[members],
            observation_weights=weights_of_observed,
        )
        updates.append(update)

    # A trajectory may have no sampled token: a grammar may decide every one.
    mean_distances = [distance.mean() for distance in distances if len(distance)]
    return Experience(
        trajectory_ids=trajectory_ids,
        active=active,
        advantages=advantage,
        old_logprobs=old_logprobs,
        updates=updates,
        comparison=comparison,
        kl=float(np.mean(mean_distances)) if mean_distances else float("nan"),
        metrics=metrics,
    )


def _rollout_logprobs(
    trajectories: Sequence[Trajectory],
    sampled: Sequence[np.ndarray],
    old: PerTerm | None,
) -> PerTerm:
    """Return the engine's log-probs.

    Observations were not sampled. They get the learner's own log-probs (NaN if unknown), so that
    they are never off-policy.
    """
    rollout = []
    for number, (trajectory, indices) in enumerate(zip(trajectories, sampled, strict=True)):
        reported = []
        response_masks = []
        for sequence in trajectory.sequences:
            reported.append(np.asarray(sequence.rollout_logprobs, np.float64))
            response_masks.append(np.asarray(sequence.response_mask, bool))
        is_sampled = np.concatenate(response_masks)[indices]
        unsampled = np.nan if old is None else old[number]
        rollout.append(np.where(is_sampled, np.concatenate(reported)[indices], unsampled))
    return rollout


def _weights(
    config: AlgorithmConfig,
    active: PerTerm,
    segments: Sequence[Sequence[int]],
) -> PerTerm:
    """Return the weights of one update's terms.

    The sequences of the loss are trajectories or, with ``algorithm.segment_weight``, their
    segments.
    """
    if config.segment_weight == "session":
        return term_weights(config.loss_agg_mode, active, config.loss_scale_factor)

    active_segments = []
    for mask, lengths in zip(active, segments, strict=True):
        active_segments += np.split(mask, np.cumsum(lengths)[:-1])
    weights = term_weights(config.loss_agg_mode, active_segments, config.loss_scale_factor)

    by_trajectory = []
    begin = 0
    for lengths in segments:
        end = begin + len(lengths)
        by_trajectory.append(np.concatenate(weights[begin:end]))
        begin = end
    return by_trajectory


def _select(per_token: Sequence[np.ndarray], indices: Sequence[np.ndarray]) -> PerTerm:
    """Select the values at some indices from each trajectory's."""
    return [values[at] for values, at in zip(per_token, indices, strict=True)]


def _advantage_metrics(advantage: PerTerm, active: Sequence[np.ndarray]) -> dict[str, float]:
    selected = [values[mask] for values, mask in zip(advantage, active, strict=True)]
    values = np.concatenate(selected)
    if not len(values):
        return {}
    return {
        "advantage_mean": float(values.mean()),
        "advantage_std": float(values.std()),
        "advantage_abs_max": float(np.abs(values).max()),
    }
