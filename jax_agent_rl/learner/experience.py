"""From scored groups to what each token contributes: rewards, advantages, corrections, weights. Numpy, whole steps.

::

    groups ─► token rewards ─► minus KL ─► advantages ─► minus KL ─┐
    old, rollout log-probs ─► importance, rejections ──────────────┼─► Experience ─► terms of each mini-batch
    masked trajectories ─► active terms ───────────────────────────┘
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_agent_rl.config.algorithm import AlgorithmConfig
from jax_agent_rl.learner import advantages
from jax_agent_rl.learner.advantages import scored_batch
from jax_agent_rl.learner.batch import segment_lengths
from jax_agent_rl.learner.correction import behaviour_weights, correct, mismatch
from jax_agent_rl.learner.losses import kl_forward, term_weights
from jax_agent_rl.learner.metrics import Comparison, UpdateRecord, comparable, compare
from jax_agent_rl.types import Group, Trajectory

PerTerm = list[np.ndarray]
"""For each trajectory of the step one number per sampled token, [S]."""
Candidates = Sequence[tuple[np.ndarray, np.ndarray]]
"""For each trajectory the reference's k likeliest ids at each sampled token, int32 [S, k], and their log-probs."""
RefScores = Sequence[np.ndarray] | Candidates


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a step before it is trained on; None where nothing reads them.

    Attributes:
        old: log-probs per sampled token before the update, float64 [S] per trajectory.
        ref: those of the reference, or its likeliest ids with ``algorithm.kl.top_k``.
        values: float64 [L + 1] per trajectory, see :class:`~jax_agent_rl.learner.advantages.ScoredBatch`.
    """

    old: PerTerm | None = None
    ref: RefScores | None = None
    values: list[np.ndarray] | None = None


@dataclass(frozen=True, kw_only=True)
class Experience:
    """A step, ready to be cut into mini-batches. Everything per trajectory and sampled token, [S].

    Attributes:
        active: bool, tokens to train on.
        segments: how many tokens each of its sequences has, not per token.
        terms: by the name under which the losses read them.
        value_terms: the same for the critic; empty without one.
        candidates: of the reference, not per token; None unless the KL is over them.
        kl: mean distance to the reference over trajectories with a token of their own, nats per token; NaN without
            one, and over candidates.
        metrics: named floats for the log.
    """

    active: list[np.ndarray]
    segments: list[list[int]]
    terms: dict[str, PerTerm]
    value_terms: dict[str, PerTerm]
    candidates: Candidates | None = None
    kl: float
    metrics: dict[str, float]

    def comparison(self, bypass: bool) -> Comparison | None:
        """Compare engine and learner on every comparable token; None if no pass has scored them yet.

        Args:
            bypass: the old log-probs are the rollout's.
        """
        if bypass or "old_logprob" not in self.terms:
            return None
        tokens = [mine > 0 for mine in self.terms["comparable"]]
        return compare(self.terms["old_logprob"], self.terms["rollout_logprob"], tokens)

    def inactive(self, groups: Sequence[Group]) -> frozenset[str]:
        """Return the ids of trajectories without an active token."""
        trajectories = (t for group in groups for t in group.trajectories)
        return frozenset(t.trajectory_id for t, mask in zip(trajectories, self.active, strict=True) if not mask.any())

    def unapplied(self, groups: Sequence[Group], updates: Sequence[UpdateRecord]) -> frozenset[str]:
        """Return the ids of trajectories with an active token of whose mini-batch no update was applied.

        Args:
            groups: of the step.
            updates: of the model that the trajectories were to train.
        """
        trajectories = [t for group in groups for t in group.trajectories]
        applied: set[int] = set()
        for update in updates:
            if update.finite:
                applied.update(range(len(trajectories))[update.members])
        return frozenset(
            trajectory.trajectory_id
            for at, trajectory in enumerate(trajectories)
            if self.active[at].any() and at not in applied
        )

    def by_trajectory(self, groups: Sequence[Group]) -> dict[str, dict[str, np.ndarray]]:
        """Return numbers per token of each active trajectory, for the log; see ``UpdateResult.tokens``."""
        named = {"advantages": "advantage", "old_logprobs": "old_logprob"}
        trajectories = (t for group in groups for t in group.trajectories)
        return {
            trajectory.trajectory_id: {name: self.terms[term][at] for name, term in named.items() if term in self.terms}
            for at, trajectory in enumerate(trajectories)
            if self.active[at].any()
        }


def build_experience(
    groups: Sequence[Group],
    config: AlgorithmConfig,
    scores: Scores,
    *,
    kl_coef: float,
    masked: Collection[str],
    since: int = 0,
) -> Experience:
    """Compute what the losses need and what does not depend on the current parameters.

    Args:
        groups: of the step.
        config: estimator, corrections and KL.
        scores: of the learner's models.
        kl_coef: the controller's current coefficient, for KL in the reward and the advantage.
        masked: ids of trajectories whose rewards count in baselines and whose tokens are not trained on.
        since: first policy version of the parameters that score; tokens of older ones cannot be compared.
    """
    samples = scored_batch(groups, turn_reward=config.turn_reward)
    sampled = [np.flatnonzero(mask) for mask in samples.masks]
    rollout = _rollout_logprobs(samples.trajectories, sampled, scores.old)
    active = [
        np.full(len(at), t.trajectory_id not in masked) for t, at in zip(samples.trajectories, sampled, strict=True)
    ]
    old = rollout if config.rollout_correction.bypass_mode else scores.old
    candidates: Any = scores.ref if config.kl.top_k else None
    ref: Any = None if config.kl.top_k else scores.ref
    distances = []
    if old is not None and ref is not None:
        distances = [kl_forward(config.kl.estimator, o, r) for o, r in zip(old, ref, strict=True)]
    if config.kl.where == "reward":
        for rewards, at, distance in zip(samples.rewards, sampled, distances, strict=True):
            rewards[at] -= kl_coef * distance
    estimated = advantages.compute(replace(samples, values=scores.values), config)
    advantage = _at(estimated.advantages, sampled)
    if config.kl.where == "advantage":
        advantage = [own - kl_coef * distance for own, distance in zip(advantage, distances, strict=True)]
    terms = {"advantage": advantage, "rollout_logprob": rollout}
    terms["comparable"] = [comparable(t, since).astype(np.float64) for t in samples.trajectories]
    metrics = _advantage_metrics(terms["advantage"], active)
    if old is not None:
        terms["old_logprob"] = old
        if config.rollout_correction.bypass_mode:
            metrics |= mismatch(old, rollout, active)
        else:
            corrected = correct(config.rollout_correction, old, rollout, active)
            active, metrics = corrected.kept, metrics | corrected.metrics
            terms["importance"] = corrected.importance
        if config.policy_loss.loss_mode == "decoupled":
            metrics |= behaviour_weights(config.policy_loss.behav_imp_weight_cap, old, rollout, active)
    if ref is not None and config.kl.where == "loss":
        terms["ref_logprob"] = ref
    value_terms = {}
    if estimated.returns is not None and scores.values is not None:
        old_values = [values[:-1] for values in scores.values]
        value_terms = {"returns": _at(estimated.returns, sampled), "old_value": _at(old_values, sampled)}
    measured = [distance.mean() for distance in distances if len(distance)]  # a grammar may decide every token
    kl = float(np.mean(measured)) if measured else float("nan")
    segments = [segment_lengths(t) for t in samples.trajectories]
    return Experience(
        active=active,
        segments=segments,
        terms=terms,
        value_terms=value_terms,
        candidates=candidates,
        kl=kl,
        metrics=metrics,
    )


def score_contexts(groups: Sequence[Group], score: Callable[[Sequence[Sequence[int]]], list[np.ndarray]]) -> PerTerm:
    """Return the log-probs of every trajectory's trained tokens, from a function of whole contexts."""
    trajectories = [t for g in groups for t in g.trajectories]
    sequences = [s for t in trajectories for s in t.sequences]
    scored = iter(score([s.prompt_ids + s.response_ids for s in sequences]))
    return [
        np.concatenate(
            [next(scored)[len(s.prompt_ids) - 1 :][np.asarray(s.loss_mask, bool)] for s in t.sequences]
        ).astype(np.float64)
        for t in trajectories
    ]


def _rollout_logprobs(
    trajectories: Sequence[Trajectory], sampled: Sequence[np.ndarray], old: PerTerm | None
) -> PerTerm:
    """Return the engine's log-probs.

    Observations were not sampled: they get the learner's own (NaN if unknown), so that they are never off-policy.
    """
    rollout = []
    for number, (trajectory, at) in enumerate(zip(trajectories, sampled, strict=True)):
        reported = np.concatenate([np.asarray(s.rollout_logprobs, np.float64) for s in trajectory.sequences])[at]
        mine = np.concatenate([np.asarray(s.response_mask, bool) for s in trajectory.sequences])[at]
        rollout.append(np.where(mine, reported, np.nan if old is None else old[number]))
    return rollout


def mini_batch_terms(
    experience: Experience, members: slice, config: AlgorithmConfig, *, kl_coef: float
) -> tuple[dict[str, PerTerm], dict[str, PerTerm]]:
    """Return the terms of the policy's and the critic's batch of one optimizer update, over some trajectories."""
    active = experience.active[members]
    weights = _weights(config, active, experience.segments[members])
    policy = {name: values[members] for name, values in experience.terms.items()} | {"weight": weights}
    if "ref_logprob" in policy or experience.candidates is not None:
        policy["kl_weight"] = [kl_coef * weight for weight in weights]
    critic = {name: values[members] for name, values in experience.value_terms.items()}
    if critic:
        critic["weight"] = term_weights("token-mean", active)
    return policy, critic


def _weights(config: AlgorithmConfig, active: PerTerm, segments: Sequence[Sequence[int]]) -> PerTerm:
    """Return the weights of one update's terms, with trajectories or their segments as the sequences of the loss."""
    if config.segment_weight == "session":
        return term_weights(config.loss_agg_mode, active, config.loss_scale_factor)
    cuts = (np.split(mask, np.cumsum(lengths)[:-1]) for mask, lengths in zip(active, segments, strict=True))
    weights = iter(term_weights(config.loss_agg_mode, list(itertools.chain(*cuts)), config.loss_scale_factor))
    return [np.concatenate(list(itertools.islice(weights, len(lengths)))) for lengths in segments]


def _at(per_token: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> PerTerm:
    return [values[at] for values, at in zip(per_token, sampled, strict=True)]


def _advantage_metrics(per_term: PerTerm, active: Sequence[np.ndarray]) -> dict[str, float]:
    values = np.concatenate([a[m] for a, m in zip(per_term, active, strict=True)])
    if not len(values):
        return {}
    return {
        "advantage_mean": float(values.mean()),
        "advantage_std": float(values.std()),
        "advantage_abs_max": float(np.abs(values).max()),
    }
