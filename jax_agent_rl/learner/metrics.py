"""The result of a learner step: metrics of its updates, and the gap to the engine's log-probs.

The log-probs of engine and learner are *comparable* at a token if the learner scores it with the
very weights it was sampled from. So the parameters of its policy version have to be the learner's
current ones, and so have those of all tokens before it in its turn: a generation that went on
through a weight update may have kept keys and values of the old weights. All other tokens are
off-policy: a gap there is the policy's progress and says nothing about the programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jax_agent_rl.errors import JaxAgentRLError
from jax_agent_rl.learner.batch import UNKNOWN_EXPERT, Batch
from jax_agent_rl.learner.cancellation import StepCancellation, StepCancelled
from jax_agent_rl.learner.optimized_params import Applied
from jax_agent_rl.types import Trajectory, Turn


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
        members: the trajectories of its mini-batch, among those of the step.
    """

    statistics: dict
    members: slice


def step_metrics(
    policy: Sequence[UpdateRecord],
    critic: Sequence[UpdateRecord],
    batches: Sequence[Batch],
    *,
    seconds: float,
) -> dict[str, float]:
    """Return one flat record over the updates of a step.

    A model that was not trained has no metrics. Means are over the updates that were applied; if
    none was, over all of them.
    """
    tokens = sum(batch.num_tokens for batch in batches)
    computed_tokens = sum(batch.num_nodes for batch in batches)
    return {
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


def replay_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Return ``router_replay_share``: the share of tokens that took the engine's experts."""
    replayed = 0
    for batch in batches:
        if batch.routed_experts is not None:
            is_known = batch.routed_experts[..., 0, 0] != UNKNOWN_EXPERT
            replayed += int(is_known.sum())
    return {"router_replay_share": replayed / sum(batch.num_nodes for batch in batches)}


def _policy_metrics(updates: Sequence[UpdateRecord]) -> dict[str, float]:
    if not updates:
        return {}

    records = _applied(updates)
    sums, terms = _sums(records)
    metrics = {}
    if "router_aux" in sums:
        metrics["router_aux_loss"] = sums["router_aux"] / len(records)
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


INFINITE = 1e4
"""Nats that stand for an infinite gap, in sums that have to stay finite."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """|engine's log-prob - learner's| over the tokens that can be compared.

    Attributes:
        tokens: how many there are.
        mean: nats; 0 without tokens.
        largest: nats, of a single token.
    """

    tokens: int
    mean: float
    largest: float

    @classmethod
    def of(cls, gaps: np.ndarray) -> Comparison:
        """Return the comparison of signed differences.

        NaN is left out: the update itself deals with it.
        """
        sizes = np.minimum(np.abs(gaps[~np.isnan(gaps)]), INFINITE)
        if not len(sizes):
            return cls(tokens=0, mean=0.0, largest=0.0)
        return cls(tokens=len(sizes), mean=float(sizes.mean()), largest=float(sizes.max()))

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Mapping[str, Any]]) -> Comparison:
        """Return the comparison of a policy update's own pass, see ``objective.policy_loss``."""
        tokens = float(statistics["sum"]["compared"])
        total_gap = float(statistics["sum"]["compared_gap"])
        return cls(
            tokens=round(tokens),
            mean=total_gap / tokens if tokens else 0.0,
            largest=float(statistics["max"]["compared_gap"]),
        )


@dataclass(frozen=True, kw_only=True)
class AgreementCheck:
    """A check of the agreement before a step's first optimizer update.

    Attributes:
        since: the first policy version whose parameters are those that the update begins with.
        inspect: takes the comparison, made by the scoring pass or, without one, by the first
            update. What it raises ends the step before anything has changed.
    """

    since: int
    inspect: Callable[[Comparison], None]


UNCHECKED = AgreementCheck(since=0, inspect=lambda comparison: None)


def comparable(trajectory: Trajectory, since: int, before: int | None = None) -> np.ndarray:
    """Return, for each token with loss, whether it can be compared (see the module), bool [S].

    Args:
        trajectory: of S tokens with loss.
        since: the first policy version of the parameters compared with.
        before: the first policy version of later parameters; None: there are none.
    """
    selections = []
    for sequence in trajectory.sequences:
        for turn in sequence.turns:
            selections += _turn_selection(turn, since, before)
    return np.array(selections, bool)


def compare(
    old: Iterable[np.ndarray],
    rollout: Iterable[np.ndarray],
    is_compared: Iterable[np.ndarray],
) -> Comparison:
    """Compare log-probs [S] per trajectory, of the learner and of the engine.

    Args:
        old: the learner's.
        rollout: the engine's.
        is_compared: bool [S] per trajectory, the tokens to compare.
    """
    gaps = [np.zeros(0)]
    for old_logprobs, rollout_logprobs, mask in zip(old, rollout, is_compared, strict=True):
        gaps.append((old_logprobs - rollout_logprobs)[mask])
    return Comparison.of(np.concatenate(gaps))


def _turn_selection(turn: Turn, since: int, before: int | None) -> list[bool]:
    """Return for each token of a turn with loss whether it can be compared."""
    versions = np.asarray(turn.output.policy_versions, np.int64)
    loss_mask = np.asarray(turn.output.loss_mask, bool)
    selection = np.zeros(len(versions), bool)
    if len(versions):
        first = versions[0]
        is_current = first >= since and (before is None or first < before)
        if is_current:
            # The tokens up to the first weight update within the turn.
            selection = np.logical_and.accumulate(versions == first)

    selected = selection[loss_mask].tolist()
    if turn.learn_appended:
        selected += [False] * len(turn.appended_ids)  # observations: the engine did not sample them
    return selected


@contextlib.contextmanager
def cancel_on_breach(
    check: AgreementCheck,
    cancellation: StepCancellation,
) -> Iterator[AgreementCheck]:
    """Yield a check that cancels the step instead of raising.

    The error is raised once the learner has given up the step. This is for processes that update
    together: the others would wait for a process that raises by itself.
    """
    refusals: list[JaxAgentRLError] = []

    def inspect(comparison: Comparison) -> None:
        try:
            check.inspect(comparison)
        except JaxAgentRLError as error:
            refusals.append(error)
            cancellation.cancel()

    try:
        yield replace(check, inspect=inspect)
    except StepCancelled:
        if refusals:
            raise refusals[0] from None
        raise
