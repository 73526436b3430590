"""The result of a learner step, and the metrics of its updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jax_agent_rl.learner.batch import UNKNOWN_EXPERT, Batch
from jax_agent_rl.learner.experience import Experience
from jax_agent_rl.learner.optimized_params import Applied


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """The result of one :meth:`Learner.update`.

    Attributes:
        metrics: named floats for the log.
        skipped: every update of the policy had a non-finite gradient, so nothing was learned. While
            only a critic learns, it is the critic's updates that count.
        rejected: ids of trajectories with every token rejected.
        unapplied: ids of trajectories with a token to train on, but without an applied update: the
            gradients of their mini-batch were not finite.
        tokens: by trajectory id, numbers per token with loss, over all sequences of a trajectory:
            float64 ``advantages`` and, where computed, ``old_logprobs``. Trajectories without a
            token to train on are left out.
    """

    metrics: dict[str, float]
    skipped: bool
    rejected: frozenset[str] = frozenset()
    unapplied: frozenset[str] = frozenset()
    tokens: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UpdateRecord(Applied):
    """One optimizer update.

    Attributes:
        statistics: summed over its mini-batch.
        members: the trajectories of its mini-batch, among the step's.
    """

    statistics: dict
    members: slice


def step_result(
    experience: Experience,
    updates: Sequence[UpdateRecord],
    metrics: dict[str, float],
    *,
    masked: Collection[str],
) -> UpdateResult:
    """Return the result of a step.

    Args:
        updates: of the model that the trajectories were to train.
        masked: ids of trajectories that count in baselines only.
    """
    trained: set[int] = set()  # numbers of trajectories in the step
    for update in updates:
        if update.finite:
            trained.update(range(len(experience.active))[update.members])

    rejected = set()
    unapplied = set()
    tokens: dict[str, dict[str, np.ndarray]] = {}
    for number, trajectory_id in enumerate(experience.trajectory_ids):
        if not experience.active[number].any():
            if trajectory_id not in masked:
                rejected.add(trajectory_id)
            continue
        if number not in trained:
            unapplied.add(trajectory_id)
        tokens[trajectory_id] = {"advantages": experience.advantages[number]}
        if experience.old_logprobs is not None:
            tokens[trajectory_id]["old_logprobs"] = experience.old_logprobs[number]

    is_any_finite = any(update.finite for update in updates)
    return UpdateResult(
        metrics=metrics,
        skipped=bool(updates) and not is_any_finite,
        rejected=frozenset(rejected),
        unapplied=frozenset(unapplied),
        tokens=tokens,
    )


def step_metrics(
    policy: Sequence[UpdateRecord],
    critic: Sequence[UpdateRecord],
    batches: Sequence[Batch],
    *,
    seconds: float,
    has_experts: bool,
) -> dict[str, float]:
    """Return one flat record over the updates of a step.

    A model that was not trained has no metrics. Means are over the updates that were applied; if
    none was, over all of them.

    Args:
        seconds: the time that the step took.
        has_experts: the model is a mixture of experts.
    """
    tokens = sum(batch.num_tokens for batch in batches)
    computed_tokens = sum(batch.num_nodes for batch in batches)
    metrics = {
        **_policy_metrics(policy),
        **_critic_metrics(critic),
        "batch_tokens": float(tokens),
        "computed_tokens": float(computed_tokens),
        "sharing_factor": tokens / computed_tokens,
        "rows": float(sum(batch.num_rows for batch in batches)),
        "learner_seconds": seconds,
        "learner_tokens_per_second": tokens / seconds,
        "computed_tokens_per_second": computed_tokens / seconds,
    }
    if has_experts:
        metrics["router_replay_share"] = _replayed_tokens(batches) / computed_tokens
    return metrics


def _replayed_tokens(batches: Sequence[Batch]) -> int:
    """Count the tokens that took the engine's experts."""
    replayed = 0
    for batch in batches:
        if batch.routed_experts is not None:
            is_known = batch.routed_experts[..., 0, 0] != UNKNOWN_EXPERT
            replayed += int(is_known.sum())
    return replayed


def _policy_metrics(updates: Sequence[UpdateRecord]) -> dict[str, float]:
    if not updates:
        return {}

    records = _applied(updates)
    sums, terms = _sums(records)
    metrics = {}
    if "router_aux" in sums:
        metrics["router_aux_loss"] = sums["router_aux"] / len(records)
    if "observation_loss" in sums:
        metrics["observation_loss"] = sums["observation_loss"] / len(records)
    return {
        **metrics,
        "updates": float(len(updates)),
        "nonfinite_updates": _count_nonfinite(updates),
        "loss": sums["loss"] / len(records),
        "learning_rate": records[-1].rate,
        "grad_norm": float(np.mean([record.norm for record in records])),
        "clip_fraction": sums["clipped"] / terms,
        "ratio_mean": sums["ratio"] / terms,
        "kl": sums["kl"] / terms,
        "kl_loss": sums["kl_loss"] / terms,
        "entropy": sums["entropy"] / terms,
        "logprob_gap_mean": sums["gap"] / terms,
        "logprob_gap_max": float(max(record.statistics["max"]["gap"] for record in records)),
        "trained_tokens": terms,
    }


def _critic_metrics(updates: Sequence[UpdateRecord]) -> dict[str, float]:
    if not updates:
        return {}

    records = _applied(updates)
    sums, terms = _sums(records)
    mean = sums["returns"] / terms
    variance = sums["squared_returns"] / terms - mean**2
    unexplained = 1.0
    if variance > 1e-12:  # else all returns are equal
        unexplained = sums["squared_error"] / terms / variance
    return {
        "critic_nonfinite_updates": _count_nonfinite(updates),
        "critic_loss": sums["loss"] / len(records),
        "critic_learning_rate": records[-1].rate,
        "critic_grad_norm": float(np.mean([record.norm for record in records])),
        "critic_clip_fraction": sums["clipped"] / terms,
        "value_mean": sums["value"] / terms,
        "return_mean": mean,
        "critic_explained_variance": 1 - unexplained,
    }


def _count_nonfinite(updates: Sequence[UpdateRecord]) -> float:
    return float(sum(not update.finite for update in updates))


def _applied(updates: Sequence[UpdateRecord]) -> Sequence[UpdateRecord]:
    """Return the updates with finite gradients.

    If there is none, return all: then the log shows what they were.
    """
    applied = [update for update in updates if update.finite]
    return applied or updates


def _sums(records: Sequence[UpdateRecord]) -> tuple[dict[str, float], float]:
    """Return sums over the records, and the number of terms, at least 1."""
    sums = {}
    for name in records[0].statistics["sum"]:
        sums[name] = float(sum(record.statistics["sum"][name] for record in records))
    return sums, max(sums["terms"], 1.0)
