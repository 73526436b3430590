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
from jax_agent_rl.trainer.diversity import diversity_metrics
from jax_agent_rl.trainer.step import all_trajectories, recorded
from jax_agent_rl.trajectory_graph import TrajectoryGraph
from jax_agent_rl.types import DropReason, Group, Trajectory

_DEFAULT_ALGORITHM = AlgorithmConfig()

_NO_UPDATE = {
    "learner_tokens_per_second": 0.0,
    "logprob_gap_max": 0.0,
    "logprob_gap_mean": 0.0,
    "loss": 0.0,
}
"""The learner's metrics of a step without an update."""


@dataclass(kw_only=True)
class RunRecord:
    """Progress that a checkpoint keeps beside the learner's state.

    Attributes:
        step: training steps finished.
        train_seconds: wall time of training over all restarts, without the evaluations before and
            after it.
        accuracy_before: held-out accuracy before the first step.
        accuracy_after: held-out accuracy after the last.
        latest_accuracy: held-out accuracy of the last evaluation, until it has been shown.
        evaluated: the step after which the last evaluation was made; -1: none yet.
        lost_batches: batches in a row of which no trajectory survived.
        recompilations: programs compiled after warm-up.
        learner_programs: programs that the learner compiled up to its first policy update. Later
            ones are recompilations.
        max_logprob_gap: largest |rollout log-prob - learner log-prob| of the steps without stale
            tokens: how far engine and learner disagree about the same weights.
        cursor: position in the training rows after ``step``.
        accounting: what became of every trajectory.
        buffer: what became of every group; asynchronous trainers only.
        in_flight: what the open groups have sampled, by number; asynchronous trainers only.
        role_baselines: running means of the rewards, by data source and role (RAE).
        extra_versions: versions published besides one per step: averages that were evaluated, and
            the step's own weights after each of them.
        identity: what the run is of (``runtime.identity``), as JSON; empty in checkpoints of
            earlier versions.
        steps_compared: steps before whose update engine and learner were compared.
        steps_not_compared: steps without a token to compare, since all were sampled from older
            weights.
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

    def count_comparison(self, was_compared: bool) -> None:
        """Count a step in which the policy learned, by whether it was compared with the engine."""
        if was_compared:
            self.steps_compared += 1
        else:
            self.steps_not_compared += 1

    def policy_versions(self, config: Config) -> list[int]:
        """Return the versions under which this step's weights were published to sample from them.

        An evaluation of their average uses up two versions: one for the average, and one for the
        step's weights when they are published again.
        """
        version = self.step + self.extra_versions
        if not self.step or not config.learner.ema_decay:
            return [version]

        every = config.trainer.eval_every
        is_evaluated_later = every and self.step % every == 0 and self.evaluated != self.step
        if is_evaluated_later:
            return [version, version + 2]
        return [version]

    def to_json(self) -> dict[str, Any]:
        """Return a shallow copy: asdict() would copy every sampled id.

        Checkpoints are written in the background. So replace the values of a record, and never
        change them in place.
        """
        return dict(vars(self))

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> RunRecord:
        """Restore a record; fields that only other versions of the package know are ignored."""
        names = {f.name for f in fields(cls)}
        record = cls(**{name: value for name, value in saved.items() if name in names})
        record.learner_programs = 0  # the process is new: its learner compiles again
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

    A trajectory is trained if an update with its mini-batch was applied.
    """
    for trajectory in all_trajectories(selection.groups):
        trajectory_id = trajectory.trajectory_id
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
    """Return one ``metrics.jsonl`` line of kind ``step``.

    The metrics of the learner are 0 if no group was worth a gradient.

    Args:
        learner: metrics of the update.
        engine: what the engines did for the step.
        accounting: summary of all trajectories.
        rollout_seconds: the time that ``engine`` covers.
        weight_update_seconds: time to publish the weights.
        recompilations: programs compiled after warm-up.
        pipeline: overlap of rollout and learner: waiting times, ages of tokens.
        algorithm: its filters say which outcomes are equal.
    """
    trajectories = all_trajectories(groups)
    return {
        "kind": "step",
        "step": step,
        "trajectories": len(recorded(groups)),
        **_statistics("reward", [t.reward for t in trajectories]),
        **_statistics("score", [t.score for t in trajectories]),
        **_part_means(trajectories),
        **_size_metrics(trajectories),
        **_session_counts(trajectories),
        **_program_ends(trajectories),
        **_environment_starts(trajectories),
        **_tree_counts(groups),
        **_tool_metrics(trajectories),
        "finish_reasons": dict(Counter(str(t.finish_reason) for t in trajectories)),
        "truncated_share": _share(t.finish_reason.truncated for t in trajectories),
        "zero_variance_share": _zero_variance_share(groups, algorithm),
        **diversity_metrics(groups),
        **_role_metrics(groups),
        "rollout_seconds": rollout_seconds,
        "rollout_tokens_per_second": _num_sampled_once(trajectories) / rollout_seconds,
        **_engine_metrics(engine, rollout_seconds),
        "weight_update_seconds": weight_update_seconds,
        **_NO_UPDATE,
        **learner,
        "step_seconds": step_seconds,
        **pipeline,
        "recompilations_after_warmup": recompilations,
        "accounting": dict(accounting),
    }


def staleness_record(groups: Sequence[Group], version: int) -> dict[str, Any]:
    """Return the age, in versions, of the sampled tokens that a learner of ``version`` gets.

    ``staleness_histogram`` counts tokens by age. ``mixed_version_share`` is the share of the
    trajectories whose weights changed while they were sampled.
    """
    trajectories = all_trajectories(groups)
    tokens_by_age: Counter[int] = Counter()
    for token_version, count in Counter(versions(trajectories)).items():
        tokens_by_age[version - token_version] = count
    return {
        "staleness_mean": _mean_age(tokens_by_age),
        "staleness_max": max(tokens_by_age, default=0),
        "staleness_histogram": {str(age): n for age, n in sorted(tokens_by_age.items())},
        "mixed_version_share": _share(len(set(versions([t]))) > 1 for t in trajectories),
    }


def overlap_summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return for ``summary.json`` how well rollout and learner overlapped.

    Args:
        lines: of kind ``step``, see :func:`step_record`.
    """
    total_seconds = 0.0
    idle_seconds = 0.0
    tokens_by_age: Counter[int] = Counter()
    for line in lines:
        total_seconds += line["step_seconds"]
        idle_seconds += line["step_seconds"] * line.get("learner_idle_share", 0.0)
        for age, count in line.get("staleness_histogram", {}).items():
            tokens_by_age[int(age)] += count

    return {
        "learner_idle_share": round(idle_seconds / total_seconds, 3) if total_seconds else 0.0,
        "staleness_mean": round(_mean_age(tokens_by_age), 3),
        "staleness_max": max(tokens_by_age, default=0),
    }


def evaluation_record(step: int, groups: Sequence[Group], *, seconds: float) -> dict[str, Any]:
    """Return one ``metrics.jsonl`` line of kind ``evaluation``. A lost trajectory counts as wrong.

    ``accuracy`` is the mean of ``outcomes.accuracy``.
    """
    trajectories = all_trajectories(groups)
    lost: Counter[str] = Counter()
    for group in groups:
        for reason, count in group.dropped.items():
            lost[str(reason)] += count

    correct = sum(accuracy(trajectory) for trajectory in trajectories)
    tool_calls = sum(len(trajectory.tool_calls) for trajectory in trajectories)
    return {
        "kind": "evaluation",
        "step": step,
        "accuracy": correct / max(1, len(trajectories) + lost.total()),
        **_role_metrics(groups),
        "rows": len(groups),
        "lost": dict(lost),
        "tool_calls_mean": tool_calls / max(1, len(trajectories)),
        "seconds": seconds,
    }


def _size_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the statistics of turns and tokens; a trajectory counts with all its segments."""
    turns = []
    response_tokens = []
    sampled_tokens = []
    for trajectory in trajectories:
        sequences = (*trajectory.segments, trajectory)
        turns.append(sum(sequence.num_turns for sequence in sequences))
        response_tokens.append(sum(len(sequence.response_ids) for sequence in sequences))
        sampled_tokens.append(_num_sampled(trajectory))

    return {
        **_statistics("turns", turns),
        **_statistics("response_tokens", response_tokens),
        **_statistics("sampled_tokens", sampled_tokens),
    }


def _num_sampled(trajectory: Trajectory) -> int:
    """Return the number of tokens that were sampled for a trajectory and its segments."""
    return sum(sequence.num_sampled for sequence in (*trajectory.segments, trajectory))


def _num_sampled_once(trajectories: Sequence[Trajectory]) -> int:
    """Return the number of sampled tokens; those that branches share were sampled once."""
    return sum(_num_sampled(t) - t.num_inherited for t in trajectories)


def _tool_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    calls = []
    for trajectory in trajectories:
        for sequence in (*trajectory.segments, trajectory):
            calls += sequence.tool_calls
    errors = Counter(call.error for call in calls if call.error)

    return {
        "tool_calls_mean": len(calls) / max(1, len(trajectories)),
        "tool_errors": errors.total(),
        "tool_error_share": errors.total() / max(1, len(calls)),
        "tool_errors_by_kind": dict(errors),
    }


def _engine_metrics(engine: BackendMetrics, seconds: float) -> dict[str, Any]:
    """Return what the engines did in so many seconds; None where an engine does not report it."""
    # Accepted draft tokens come on top of the one token that a slot yields per step.
    occupied_slot_steps = engine.generated_tokens - engine.accepted_tokens
    slot_occupancy = None
    if engine.slot_steps:
        slot_occupancy = occupied_slot_steps / engine.slot_steps

    mean_acceptance_length = None
    if engine.drafts:
        mean_acceptance_length = 1 + engine.accepted_tokens / engine.drafts

    return {
        "engine_busy_share": engine.busy_seconds / seconds,
        "slot_occupancy": slot_occupancy,
        "mean_acceptance_length": mean_acceptance_length,
        "prefill_tokens": engine.prefill_tokens,
        "cached_tokens": engine.cached_tokens,
        "recomputed_tokens": engine.recomputed_tokens,
    }


def _zero_variance_share(groups: Sequence[Group], algorithm: AlgorithmConfig) -> float:
    """Return the share of groups whose outcomes are equal, as the filter of groups compares them.

    Each role of a group counts by itself; roles with a single trajectory do not count.
    """
    have_equal_outcomes = []
    for group in groups:
        for role_group in by_role(group):
            if len(role_group.trajectories) > 1:
                have_equal_outcomes.append(has_equal_outcomes(role_group, algorithm))
    return _share(have_equal_outcomes)


def _role_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return ``role/<name>/<metric>`` of each role, frozen ones included.

    Trajectories without a role are left out.
    """
    trajectories_by_role: dict[str, list[Trajectory]] = {}
    for trajectory in recorded(groups):
        if trajectory.role is not None:
            trajectories_by_role.setdefault(trajectory.role, []).append(trajectory)

    metrics: dict[str, float] = {}
    for role, trajectories in sorted(trajectories_by_role.items()):
        prefix = f"role/{role}"
        sampled_tokens = [t.num_sampled for t in trajectories]
        metrics[f"{prefix}/reward_mean"] = float(np.mean([t.reward for t in trajectories]))
        metrics[f"{prefix}/turns_mean"] = float(np.mean([t.num_turns for t in trajectories]))
        metrics[f"{prefix}/sampled_tokens_mean"] = float(np.mean(sampled_tokens))
        metrics[f"{prefix}/trajectories"] = float(len(trajectories))
    return metrics


def _mean_age(tokens_by_age: Mapping[int, int]) -> float:
    total = sum(age * count for age, count in tokens_by_age.items())
    return total / max(1, sum(tokens_by_age.values()))


def _session_counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean number of contexts, and sums of calls and requests, over recorded sessions.

    ``unmatched_calls`` and ``spliced_calls`` left the recorded history. Nothing is on record of
    ``lost_requests``. Without recorded sessions there is no metric.
    """
    sessions = [t.metrics for t in trajectories if "segments" in t.metrics]
    if not sessions:
        return {}

    segments = sum(metrics["segments"] for metrics in sessions)
    counts = {"segments_mean": 1 + segments / len(sessions)}
    for name in ("unmatched_calls", "spliced_calls", "lost_requests"):
        counts[name] = sum(metrics.get(name, 0.0) for metrics in sessions)
    return counts


def _program_ends(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the shares of programs (agent ``command``) that ran out of time, and that failed.

    Trajectories of other agents do not count; without programs there is no metric.
    """
    programs = [t.metrics for t in trajectories if "program_timeout" in t.metrics]
    if not programs:
        return {}
    shares = {}
    for name in ("program_timeout", "program_error"):
        shares[f"{name}_share"] = sum(metrics[name] for metrics in programs) / len(programs)
    return shares


def _environment_starts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return ``environment/<name>``: how the trajectories' environments were started.

    ``start_seconds_mean`` is the time that a trajectory waited for the start of its instance,
    ``hit_rate`` the share of the instances that were ready before. ``failed_preparations`` are
    starts that had failed before a trajectory needed the instance. Environments without a
    preparation have no such metric.
    """
    starts = [t.metrics for t in trajectories if "environment_start_seconds" in t.metrics]
    if not starts:
        return {}

    seconds = sum(metrics["environment_start_seconds"] for metrics in starts)
    hits = sum(metrics["environment_was_ready"] for metrics in starts)
    failures = sum(metrics.get("environment_failed_preparations", 0.0) for metrics in starts)
    return {
        "environment/start_seconds_mean": seconds / len(starts),
        "environment/hit_rate": hits / len(starts),
        "environment/failed_preparations": failures,
    }


def _tree_counts(groups: Sequence[Group]) -> dict[str, float]:
    """Return ``tree/<name>``: sums over the groups of a strategy that branches.

    ``branches`` continue a tree, if only from its prompt. ``topped_up`` are chains that replace
    missing branches. ``nodes`` are the nodes of the groups' graphs, ``inherited_tokens`` sampled
    token ids that branches inherited. Groups of chains have no such metric.
    """
    branched_groups = [group for group in groups if group.metrics]
    counts: Counter[str] = Counter()
    for group in branched_groups:
        counts.update(group.metrics)
        counts["trees"] += len({t.tree_id for t in group.trajectories})
        counts["nodes"] += len(TrajectoryGraph.of(group.trajectories).nodes)
        counts["inherited_tokens"] += sum(t.num_inherited for t in group.trajectories)
    return {f"tree/{name}": float(count) for name, count in sorted(counts.items())}


def _part_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return ``reward/<part>``: the mean of each named part over the trajectories that have it.

    The sums of tool rewards and of turn scores count as parts.
    """
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        parts = {
            "tool_reward": trajectory.metrics.get("tool_reward", 0.0),
            "turn_score": trajectory.metrics.get("turn_score", 0.0),
            **trajectory.reward_parts,
        }
        for name, value in parts.items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: float(np.mean(parts)) for name, parts in sorted(values.items())}


def _share(flags: Iterable[bool]) -> float:
    """Return the share of true values; 0 without any."""
    flags = list(flags)
    return sum(flags) / max(1, len(flags))


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean, maximum and minimum; 0 without values."""
    array = np.asarray(values, np.float64) if values else np.zeros(1)
    return {
        f"{name}_mean": float(array.mean()),
        f"{name}_max": float(array.max()),
        f"{name}_min": float(array.min()),
    }
