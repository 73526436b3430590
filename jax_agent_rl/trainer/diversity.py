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

    ``unsolved_duplicate_share``: the same over groups in which not every answer is right. There,
    duplicates are attempts that tell nothing new. 0 without such groups.

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

    unsolved = [members for members in compared if not _is_solved(members)]
    metrics["distinct_first_actions"] = float(np.mean([_distinct_first(m) for m in compared]))
    metrics["duplicate_share"] = _duplicate_share(compared)
    metrics["unsolved_duplicate_share"] = _duplicate_share(unsolved)
    return metrics


def _is_solved(members: Sequence[Trajectory]) -> bool:
    return all(accuracy(trajectory) >= 1.0 for trajectory in members)


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


def _duplicate_share(groups: Sequence[Sequence[Trajectory]]) -> float:
    """Return the share of the trajectories that are not the only ones of their ids."""
    duplicates = 0
    total = 0
    for members in groups:
        counts = Counter(_sampled_ids(trajectory) for trajectory in members)
        duplicates += sum(count for count in counts.values() if count > 1)
        total += len(members)
    return duplicates / total if total else 0.0


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
