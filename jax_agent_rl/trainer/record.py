"""The bookkeeping of a trainer: progress for resuming, lines for ``metrics.jsonl``, the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from jax_agent_rl.collect.accounting import Accounting
from jax_agent_rl.collect.buffer import versions
from jax_agent_rl.collect.filters import Selection, by_role, has_equal_outcomes
from jax_agent_rl.config import AlgorithmConfig, Config
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.outcomes import accuracy
from jax_agent_rl.rollout.protocol import BackendMetrics
from jax_agent_rl.trajectory_graph import TrajectoryGraph
from jax_agent_rl.types import DropReason, Group, Trajectory

_DEFAULT_ALGORITHM = AlgorithmConfig()


@dataclass(kw_only=True)
class RunRecord:
    """Progress that a checkpoint keeps beside the learner's state.

    Attributes:
        step: training steps finished.
        train_seconds: wall time of training (evaluations before and after excluded), over all restarts.
        accuracy_before: held-out accuracy before the first step.
        accuracy_after: held-out accuracy after the last.
        latest_accuracy: of the last evaluation, until it has been shown.
        evaluated: the step after which the last evaluation was made; -1: none yet.
        lost_batches: batches in a row of which no trajectory survived.
        recompilations: programs compiled after warm-up.
        learner_programs: programs the learner compiled up to its first policy update; more are recompilations.
        max_logprob_gap: largest |rollout log-prob - learner log-prob| of the steps without stale tokens: how far engine
            and learner disagree about the same weights.
        cursor: position in the training rows after ``step``.
        accounting: what became of every trajectory.
        buffer: of asynchronous trainers, what became of every group.
        in_flight: of asynchronous trainers, what the open groups have sampled, by number.
        role_baselines: running means of the rewards, by data source and role (RAE).
        extra_versions: versions published besides one per step: averages that were evaluated, and the weights after.
        identity: what the run is of (``runtime.identity``), as JSON; empty in checkpoints of earlier versions.
        steps_compared: steps before whose update engine and learner were compared.
        steps_not_compared: those that had no token to compare: all were of older weights.
    """

    step: int = 0
    train_seconds: float = 0.0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    latest_accuracy: float | None = None
    evaluated: int = -1
    lost_batches: int = 0
    recompilations: int = 0
    learner_programs: int = 0
    max_logprob_gap: float = 0.0
    cursor: dict[str, Any] = field(default_factory=dict)
    accounting: dict[str, Any] = field(default_factory=dict)
    buffer: dict[str, Any] = field(default_factory=dict)
    in_flight: dict[str, Any] = field(default_factory=dict)
    role_baselines: dict[str, float] = field(default_factory=dict)
    extra_versions: int = 0
    identity: dict[str, Any] = field(default_factory=dict)
    steps_compared: int = 0
    steps_not_compared: int = 0

    def count_comparison(self, was_made: bool) -> None:
        """Count a step in which the policy learned: whether engine and learner were compared before."""
        if was_made:
            self.steps_compared += 1
        else:
            self.steps_not_compared += 1

    def policy_versions(self, config: Config) -> list[int]:
        """Return the versions that the weights of this step had when rollouts sampled from them.

        An evaluation of their average takes two versions: one of the average, and one of the same weights after it.
        """
        version = self.step + self.extra_versions
        every = config.trainer.eval_every
        is_evaluated_later = every and self.step % every == 0 and self.evaluated != self.step
        if self.step and config.learner.ema_decay and is_evaluated_later:
            return [version, version + 2]
        return [version]

    def to_json(self) -> dict[str, Any]:
        """Return a shallow copy: asdict() would copy every sampled id.

        Checkpoints are written in the background, so replace the values of a record, never change them in place.
        """
        return dict(vars(self))

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> RunRecord:
        """Restore a record; the process is new, so its learner compiles again."""
        known = {f.name for f in fields(cls)}
        record = cls(**{k: v for k, v in saved.items() if k in known})
        record.learner_programs = 0
        return record

    def summary(self) -> dict[str, Any]:
        """Return the content of ``summary.json``."""
        dropped = dict(self.accounting.get("dropped", {}))
        return {
            "heldout_accuracy_before": self.accuracy_before,
            "heldout_accuracy_after": self.accuracy_after,
            "train_seconds": round(self.train_seconds, 1),
            "steps": self.step,
            "recompilations_after_warmup": self.recompilations,
            "token_drift": dropped.get(DropReason.TOKEN_DRIFT, 0),
            "max_logprob_gap": self.max_logprob_gap,
            "steps_compared": self.steps_compared,
            "steps_not_compared": self.steps_not_compared,
            "started": self.accounting.get("started", 0),
            "trained": self.accounting.get("trained", 0),
            "dropped": dropped,
        }


def account(accounting: Accounting, selection: Selection, result: UpdateResult) -> None:
    """Count every trajectory that was handed to the learner as trained or dropped.

    Trained are those of mini-batches of which an update was applied; the rest of such a step is dropped.
    """
    for trajectory_id in (t.trajectory_id for group in selection.groups for t in group.trajectories):
        if trajectory_id in selection.masked:
            accounting.drop([trajectory_id], selection.masked[trajectory_id])
        elif trajectory_id in result.rejected:
            accounting.drop([trajectory_id], DropReason.REJECTED)
        elif trajectory_id in result.unapplied:
            accounting.drop([trajectory_id], DropReason.NON_FINITE)
        else:
            accounting.train([trajectory_id])


def step_record(
    step: int,
    groups: Sequence[Group],
    learner: Mapping[str, float],
    engine: BackendMetrics,
    *,
    accounting: Mapping[str, int],
    rollout_seconds: float,
    weight_update_seconds: float,
    step_seconds: float,
    recompilations: int,
    pipeline: Mapping[str, Any],
    algorithm: AlgorithmConfig = _DEFAULT_ALGORITHM,
) -> dict[str, Any]:
    """Return one ``metrics.jsonl`` line of kind ``step``; learner metrics are 0 where no group was worth a gradient.

    Args:
        step: its number.
        groups: of the step.
        learner: metrics of the update.
        engine: what the engines did for the step.
        accounting: summary of all trajectories.
        rollout_seconds: over which ``engine`` counts.
        weight_update_seconds: to publish the weights.
        step_seconds: of the whole step.
        recompilations: programs compiled after warm-up.
        pipeline: overlap of rollout and learner: waiting times, ages of tokens.
        algorithm: what its filters compare.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    contexts = [(*t.segments, t) for t in trajectories]
    calls = [call for parts in contexts for part in parts for call in part.tool_calls]
    errors = Counter(call.error for call in calls if call.error)
    sampled = [sum(part.num_sampled for part in parts) for parts in contexts]
    inherited = sum(t.num_inherited for t in trajectories)  # what branches share was sampled once
    defaults = {name: 0.0 for name in ("learner_tokens_per_second", "logprob_gap_max", "logprob_gap_mean", "loss")}
    occupied = engine.generated_tokens - engine.accepted_tokens
    return {
        "kind": "step",
        "step": step,
        **_statistics("reward", [t.reward for t in trajectories]),
        **_statistics("score", [t.score for t in trajectories]),
        **_part_means(trajectories),
        **_statistics("turns", [sum(part.num_turns for part in parts) for parts in contexts]),
        **_statistics("response_tokens", [sum(len(part.response_ids) for part in parts) for parts in contexts]),
        **_statistics("sampled_tokens", sampled),
        **_session_counts(trajectories),
        **_tree_counts(groups),
        "tool_calls_mean": len(calls) / max(1, len(trajectories)),
        "tool_errors": sum(errors.values()),
        "tool_error_share": sum(errors.values()) / max(1, len(calls)),
        "tool_errors_by_kind": dict(errors),
        "finish_reasons": dict(Counter(str(t.finish_reason) for t in trajectories)),
        "truncated_share": _share(t.finish_reason.truncated for t in trajectories),
        "zero_variance_share": _zero_variance_share(groups, algorithm),
        **_role_metrics(groups),
        "rollout_seconds": rollout_seconds,
        "rollout_tokens_per_second": (sum(sampled) - inherited) / rollout_seconds,
        "engine_busy_share": engine.busy_seconds / rollout_seconds,
        "slot_occupancy": occupied / engine.slot_steps if engine.slot_steps else None,
        "mean_acceptance_length": 1 + engine.accepted_tokens / engine.drafts if engine.drafts else None,
        "prefill_tokens": engine.prefill_tokens,
        "cached_tokens": engine.cached_tokens,
        "weight_update_seconds": weight_update_seconds,
        **defaults,
        **learner,
        "step_seconds": step_seconds,
        **pipeline,
        "recompilations_after_warmup": recompilations,
        "accounting": dict(accounting),
    }


def staleness_record(groups: Sequence[Group], version: int) -> dict[str, Any]:
    """Return the age, in versions, of the sampled tokens that a learner of ``version`` gets.

    ``staleness_histogram`` counts tokens by age; ``mixed_version_share`` are the trajectories whose weights changed
    while they were sampled.
    """
    members = [t for g in groups for t in g.trajectories]
    tokens = Counter(versions(members))
    ages = Counter({version - sampled_by: count for sampled_by, count in tokens.items()})
    mixed = sum(len(set(versions([t]))) > 1 for t in members)
    return {
        "staleness_mean": _mean_age(ages),
        "staleness_max": max(ages, default=0),
        "staleness_histogram": {str(age): count for age, count in sorted(ages.items())},
        "mixed_version_share": mixed / max(1, len(members)),
    }


def overlap_summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how well rollout and learner overlapped in a run's lines of kind ``step``, for ``summary.json``."""
    seconds = sum(line["step_seconds"] for line in lines)
    idle = sum(line["step_seconds"] * line.get("learner_idle_share", 0.0) for line in lines)
    ages: Counter[int] = Counter()
    for line in lines:
        ages.update({int(age): count for age, count in line.get("staleness_histogram", {}).items()})
    return {
        "learner_idle_share": round(idle / seconds, 3) if seconds else 0.0,
        "staleness_mean": round(_mean_age(ages), 3),
        "staleness_max": max(ages, default=0),
    }


def evaluation_record(step: int, groups: Sequence[Group], *, seconds: float) -> dict[str, Any]:
    """Return one ``metrics.jsonl`` line of kind ``evaluation``. A lost trajectory counts as wrong.

    ``accuracy`` is the mean of ``outcomes.accuracy``.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    lost = Counter(str(reason) for g in groups for reason, count in g.dropped.items() for _ in range(count))
    return {
        "kind": "evaluation",
        "step": step,
        "accuracy": sum(map(accuracy, trajectories)) / max(1, len(trajectories) + sum(lost.values())),
        **_role_metrics(groups),
        "rows": len(groups),
        "lost": dict(lost),
        "tool_calls_mean": sum(len(t.tool_calls) for t in trajectories) / max(1, len(trajectories)),
        "seconds": seconds,
    }


def _zero_variance_share(groups: Sequence[Group], algorithm: AlgorithmConfig) -> float:
    """Return the share of groups, each role by itself, whose outcomes are equal, as the filter of groups compares."""
    parts = [part for group in groups for part in by_role(group)]
    return _share(has_equal_outcomes(part, algorithm) for part in parts if len(part.trajectories) > 1)


def _role_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return ``role/<name>/<metric>`` of each role, the frozen ones included; nothing for agents of one role."""
    by_role: dict[str, list[Trajectory]] = {}
    for trajectory in (t for g in groups for t in (*g.trajectories, *g.frozen)):
        if trajectory.role is not None:
            by_role.setdefault(trajectory.role, []).append(trajectory)
    metrics: dict[str, float] = {}
    for role, members in sorted(by_role.items()):
        metrics |= {
            f"role/{role}/reward_mean": float(np.mean([t.reward for t in members])),
            f"role/{role}/turns_mean": float(np.mean([t.num_turns for t in members])),
            f"role/{role}/sampled_tokens_mean": float(np.mean([t.num_sampled for t in members])),
            f"role/{role}/trajectories": float(len(members)),
        }
    return metrics


def _mean_age(ages: Mapping[int, int]) -> float:
    return sum(age * count for age, count in ages.items()) / max(1, sum(ages.values()))


def _session_counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean number of segments, and sums of calls and requests; nothing without recorded sessions.

    ``unmatched_calls`` and ``spliced_calls`` left the recorded history; of ``lost_requests`` nothing is on record.
    """
    recorded = [t.metrics for t in trajectories if "segments" in t.metrics]
    if not recorded:
        return {}
    names = ("unmatched_calls", "spliced_calls", "lost_requests")
    counts = {name: sum(metrics.get(name, 0.0) for metrics in recorded) for name in names}
    return {"segments_mean": 1 + sum(metrics["segments"] for metrics in recorded) / len(recorded), **counts}


def _tree_counts(groups: Sequence[Group]) -> dict[str, float]:
    """Return ``tree/<name>``: how the groups of a strategy that branches came about, summed; nothing for chains.

    ``branches`` continue a tree, if only from its prompt; ``topped_up`` are chains that replace missing branches;
    ``nodes`` those of the groups' graphs; ``inherited_tokens`` sampled ids that branches inherited.
    """
    branched = [group for group in groups if group.metrics]
    if not branched:
        return {}
    counts: Counter[str] = Counter()
    for group in branched:
        counts.update(group.metrics)
        counts["trees"] += len({t.tree_id for t in group.trajectories})
        counts["nodes"] += len(TrajectoryGraph.of(group.trajectories).nodes)
        counts["inherited_tokens"] += sum(t.num_inherited for t in group.trajectories)
    return {f"tree/{name}": float(count) for name, count in sorted(counts.items())}


def _part_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return ``reward/<part>``: the mean of each named part, tool and turn sums included, where it exists."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        sums = {key: trajectory.metrics.get(key, 0.0) for key in ("tool_reward", "turn_score")}
        for name, value in {**sums, **trajectory.reward_parts}.items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: float(np.mean(parts)) for name, parts in sorted(values.items())}


def _share(holds: Iterable[bool]) -> float:
    """Return the share of true values; 0 without any."""
    found = list(holds)
    return sum(found) / max(1, len(found))


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    array = np.asarray(values, np.float64) if values else np.zeros(1)
    return {f"{name}_mean": float(array.mean()), f"{name}_max": float(array.max()), f"{name}_min": float(array.min())}
