"""The result of a learner step, with metrics from the statistics of its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jax_agent_rl.learner.batch import UNKNOWN_EXPERT, Batch
from jax_agent_rl.learner.optimized_params import Applied


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """The result of one :meth:`Learner.update`.

    Attributes:
        metrics: named floats for the log.
        skipped: an update had a non-finite gradient and changed nothing.
        rejected: ids of trajectories with every token rejected.
        tokens: by id of each trained trajectory, numbers per token with loss over all its sequences: float64
            ``advantages`` and, where computed, ``old_logprobs``.
    """

    metrics: dict[str, float]
    skipped: bool
    rejected: frozenset[str] = frozenset()
    tokens: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UpdateRecord(Applied):
    """One optimizer update with its summed statistics."""

    statistics: dict


def step_metrics(
    policy: Sequence[UpdateRecord], critic: Sequence[UpdateRecord], batches: Sequence[Batch], *, seconds: float
) -> dict[str, float]:
    """Return one flat record over all updates of a step; a model that was not trained has no metrics."""
    tokens, nodes = sum(b.num_tokens for b in batches), sum(b.num_nodes for b in batches)
    shared = {
        "batch_tokens": float(tokens),
        "computed_tokens": float(nodes),
        "sharing_factor": tokens / nodes,
        "rows": float(sum(b.num_rows for b in batches)),
        "learner_seconds": seconds,
        "learner_tokens_per_second": tokens / seconds,
        "computed_tokens_per_second": nodes / seconds,
    }
    return _policy(policy) | _critic(critic) | shared


def replay_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Return ``router_replay_share``: of the computed tokens, those that took the engine's experts."""
    arrays = (batch.routed_experts for batch in batches)
    known = sum(int((array[..., 0, 0] != UNKNOWN_EXPERT).sum()) for array in arrays if array is not None)
    return {"router_replay_share": known / sum(batch.num_nodes for batch in batches)}


def _policy(records: Sequence[UpdateRecord]) -> dict[str, float]:
    if not records:
        return {}
    sums, terms = _sums(records)
    balance = {"router_aux_loss": sums["router_aux"] / len(records)} if "router_aux" in sums else {}
    return balance | {
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


def _critic(records: Sequence[UpdateRecord]) -> dict[str, float]:
    if not records:
        return {}
    sums, terms = _sums(records)
    mean = sums["returns"] / terms
    variance = sums["squared_returns"] / terms - mean**2
    unexplained = sums["squared_error"] / terms / variance if variance > 1e-12 else 1.0
    return {
        "critic_loss": sums["loss"] / len(records),
        "critic_learning_rate": records[-1].rate,
        "critic_grad_norm": float(np.mean([record.norm for record in records])),
        "critic_clip_fraction": sums["clipped"] / terms,
        "value_mean": sums["value"] / terms,
        "return_mean": mean,
        "critic_explained_variance": 1 - unexplained,
    }


def _sums(records: Sequence[UpdateRecord]) -> tuple[dict[str, float], float]:
    """Return sums over the records, and the number of terms."""
    sums = {name: float(sum(r.statistics["sum"][name] for r in records)) for name in records[0].statistics["sum"]}
    return sums, max(sums["terms"], 1.0)
