"""How different a step's trajectories are: what a group explores before it is compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jax_agent_rl.collect.filters import by_role
from jax_agent_rl.outcomes import accuracy
from jax_agent_rl.types import Group, Trajectory

MAX_TURNS = 16
"""Later turns have no metric of their own."""


def diversity_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return how different the trajectories of a step's groups are.

    ``distinct_first_actions``: of the first turns of a group, the share of different ones; mean
    over the groups. 1: all differ.

    ``duplicate_share``: share of the trajectories that sampled the same ids as another one of their
    group, in all turns.

    ``repeated_failure_share``: share of the trajectories that are not right and sampled the same
    ids as another one of their group: attempts that tell nothing new.

    ``turn_entropy/<n>``: minus the mean log-prob of the ids that were sampled in turn n, in nats:
    an estimate of the entropy per id.

    A role of a group counts as a group. Groups of one member are left out; without any other the
    shares are missing. Turns without ids, and log-probs that are not finite, do not count.
    """
    compared = []
    for group in groups:
        for role_group in by_role(group):
            if len(role_group.trajectories) > 1:
                compared.append(role_group.trajectories)

    metrics = _turn_entropies([t for group in groups for t in group.trajectories])
    if not compared:
        return metrics

    duplicates = _duplicates(compared)
    failures = [trajectory for trajectory in duplicates if accuracy(trajectory) < 1.0]
    total = sum(len(members) for members in compared)
    metrics["distinct_first_actions"] = float(np.mean([_distinct_first(m) for m in compared]))
    metrics["duplicate_share"] = len(duplicates) / total
    metrics["repeated_failure_share"] = len(failures) / total
    return metrics


def _distinct_first(members: Sequence[Trajectory]) -> float:
    """Return the share of different first turns; branches inherit theirs and do not count."""
    actions = []
    for trajectory in members:
        is_branch = trajectory.fork is not None and not trajectory.fork.at_prompt
        if not is_branch:
            actions.append(_first_sequence(trajectory).turns[0].output.token_ids)
    return len(set(actions)) / len(actions) if actions else 1.0


def _first_sequence(trajectory: Trajectory) -> Trajectory:
    """Return the sequence that was sampled first: a segment, if there are some."""
    return trajectory.segments[0] if trajectory.segments else trajectory


def _duplicates(groups: Sequence[Sequence[Trajectory]]) -> list[Trajectory]:
    """Return the trajectories that are not the only ones of their ids in their group."""
    duplicates = []
    for members in groups:
        counts = Counter(_sampled_ids(trajectory) for trajectory in members)
        for trajectory in members:
            if counts[_sampled_ids(trajectory)] > 1:
                duplicates.append(trajectory)
    return duplicates


def _sampled_ids(trajectory: Trajectory) -> tuple[tuple[int, ...], ...]:
    """Return the ids that were sampled in each turn, segment after segment."""
    sampled = []
    for sequence in (*trajectory.segments, trajectory):
        for turn in sequence.turns:
            sampled.append(turn.output.token_ids)
    return tuple(sampled)


def _turn_entropies(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return ``turn_entropy/<n>`` of each turn that a trajectory has; segments count on."""
    logprobs: dict[int, list[float]] = {}
    for trajectory in trajectories:
        number = 0
        for sequence in (*trajectory.segments, trajectory):
            for turn in sequence.turns:
                number += 1
                if number <= MAX_TURNS:
                    finite = [value for value in turn.output.log_probs if math.isfinite(value)]
                    logprobs.setdefault(number, []).extend(finite)

    entropies = {}
    for number, values in sorted(logprobs.items()):
        if values:
            entropies[f"turn_entropy/{number}"] = -float(np.mean(values))
    return entropies
