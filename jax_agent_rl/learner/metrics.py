"""The result of a learner step, with metrics from the statistics of its updates, and the gap to the engine's log-probs.

A token's log-probs of engine and learner can be compared if the learner scores it with the very weights it was sampled
from: its policy version is one whose parameters are the learner's now, and so are those of all tokens before it in its
turn (a generation that went on through a weight update may have kept keys and values of the old weights). Everything
else is off-policy: a gap there is the policy's progress and says nothing about the programs.
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
        skipped: every update of the policy had a non-finite gradient, so that nothing was learned; while only a critic
            learns, every update of that.
        rejected: ids of trajectories with every token rejected.
        unapplied: ids of trajectories with a token to train on of whose mini-batch no update was applied, since its
            gradients were not finite. Of a step of several mini-batches these may be a part.
        tokens: by id of each trajectory with a token to train on, numbers per token with loss over all its sequences:
            float64 ``advantages`` and, where computed, ``old_logprobs``.
    """

    metrics: dict[str, float]
    skipped: bool
    rejected: frozenset[str] = frozenset()
    unapplied: frozenset[str] = frozenset()
    tokens: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UpdateRecord(Applied):
    """One optimizer update: ``statistics`` are summed over its mini-batch, ``members`` its trajectories in the step."""

    statistics: dict
    members: slice


def step_metrics(
    policy: Sequence[UpdateRecord], critic: Sequence[UpdateRecord], batches: Sequence[Batch], *, seconds: float
) -> dict[str, float]:
    """Return one flat record over the updates of a step; a model that was not trained has no metrics.

    Means are over the updates that were applied; if none was, over all of them.
    """
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


def _policy(updates: Sequence[UpdateRecord]) -> dict[str, float]:
    if not updates:
        return {}
    records = _applied(updates)
    sums, terms = _sums(records)
    balance = {"router_aux_loss": sums["router_aux"] / len(records)} if "router_aux" in sums else {}
    return balance | {
        "updates": float(len(updates)),
        "nonfinite_updates": float(sum(not update.finite for update in updates)),
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


def _critic(updates: Sequence[UpdateRecord]) -> dict[str, float]:
    if not updates:
        return {}
    records = _applied(updates)
    sums, terms = _sums(records)
    mean = sums["returns"] / terms
    variance = sums["squared_returns"] / terms - mean**2
    unexplained = sums["squared_error"] / terms / variance if variance > 1e-12 else 1.0
    return {
        "critic_nonfinite_updates": float(sum(not update.finite for update in updates)),
        "critic_loss": sums["loss"] / len(records),
        "critic_learning_rate": records[-1].rate,
        "critic_grad_norm": float(np.mean([record.norm for record in records])),
        "critic_clip_fraction": sums["clipped"] / terms,
        "value_mean": sums["value"] / terms,
        "return_mean": mean,
        "critic_explained_variance": 1 - unexplained,
    }


def _applied(updates: Sequence[UpdateRecord]) -> Sequence[UpdateRecord]:
    """Return the updates with finite gradients; if there is none, all, so that the log shows what they were."""
    return [update for update in updates if update.finite] or updates


def _sums(records: Sequence[UpdateRecord]) -> tuple[dict[str, float], float]:
    """Return sums over the records, and the number of terms."""
    sums = {name: float(sum(r.statistics["sum"][name] for r in records)) for name in records[0].statistics["sum"]}
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
        """Return the comparison of signed differences; NaN is left out, the update itself deals with it."""
        sizes = np.minimum(np.abs(gaps[~np.isnan(gaps)]), INFINITE)
        if not len(sizes):
            return cls(tokens=0, mean=0.0, largest=0.0)
        return cls(tokens=len(sizes), mean=float(sizes.mean()), largest=float(sizes.max()))

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Mapping[str, Any]]) -> Comparison:
        """Return what a policy update's own pass found, see ``learner.objective.policy_loss``."""
        tokens, total = (float(statistics["sum"][name]) for name in ("compared", "compared_gap"))
        mean = total / tokens if tokens else 0.0
        return cls(tokens=round(tokens), mean=mean, largest=float(statistics["max"]["compared_gap"]))


@dataclass(frozen=True, kw_only=True)
class AgreementCheck:
    """A check of the agreement before a step's first optimizer update.

    Attributes:
        since: the first policy version whose parameters are those that the update begins with.
        inspect: takes the comparison, of the scoring pass or, without one, of the first update's; what it
            raises ends the update before anything has changed.
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


def compare(old: Iterable[np.ndarray], rollout: Iterable[np.ndarray], tokens: Iterable[np.ndarray]) -> Comparison:
    """Compare log-probs [S] per trajectory of the learner and of the engine, over the given tokens."""
    gaps = [(o - r)[mine] for o, r, mine in zip(old, rollout, tokens, strict=True)]
    return Comparison.of(np.concatenate(gaps) if gaps else np.zeros(0))


def _turn_selection(turn: Turn, since: int, before: int | None) -> list[bool]:
    versions = turn.output.policy_versions
    first = versions[0] if versions else -1
    is_comparable = first >= since and (before is None or first < before)
    same = np.cumprod([version == first and is_comparable for version in versions]).astype(bool)
    sampled = same[np.asarray(turn.output.loss_mask, bool)].tolist()
    return sampled + [False] * (len(turn.appended_ids) * turn.learn_appended)


@contextlib.contextmanager
def cancel_on_breach(check: AgreementCheck, cancellation: StepCancellation) -> Iterator[AgreementCheck]:
    """Yield a check that cancels the step instead of raising, and raise once the learner has given it up.

    For processes that update together: the others would wait for a process that raises by itself.
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
