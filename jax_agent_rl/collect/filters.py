"""Selects the trajectories to train on, and penalizes their rewards.

The settings are ``algorithm.filters`` and ``algorithm.shaping``.

::

    groups ─► log-probs not finite: drop ─► filters: mask | drop
           ─► each role of a group by itself: too small, no baseline, equal outcomes: drop
           ─► Selection: groups to train on, masked members (in the baseline, without a gradient),
                         dropped members
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import regex

from jax_agent_rl.chat.thinking import answer_of
from jax_agent_rl.config.algorithm import FILTER_NAMES, AlgorithmConfig, ShapingConfig
from jax_agent_rl.outcomes import accuracy, total_reward, unshaped_total
from jax_agent_rl.types import DropReason, FinishReason, Group, Trajectory, Turn

logger = logging.getLogger(__name__)
SEARCH_SECONDS = 1.0
MAX_LOGPROB = 1e-3  # rounding may put a certain token a little above 0


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What to train on.

    Attributes:
        groups: at least one member of each is trained on.
        masked: ids of members whose reward counts in the baseline only, and why.
        dropped: ids of everything else, by reason.
    """

    groups: tuple[Group, ...]
    masked: Mapping[str, DropReason]
    dropped: Mapping[DropReason, tuple[str, ...]]


def select(groups: Sequence[Group], config: AlgorithmConfig) -> Selection:
    """Apply every filter. Groups without members are skipped: their losses were counted before."""
    selected_groups: list[Group] = []
    masked: dict[str, DropReason] = {}
    dropped: dict[DropReason, list[str]] = {}
    for group in groups:
        members = []
        for trajectory in group.trajectories:
            action, reason = _judge(trajectory, config)
            if action == "drop":
                dropped.setdefault(reason, []).append(trajectory.trajectory_id)
                continue
            members.append(trajectory)
            if action == "mask":
                masked[trajectory.trajectory_id] = reason

        selected: list[Trajectory] = []
        for role_group in by_role(replace(group, trajectories=tuple(members))):
            no_gradient = _no_gradient(role_group, config, masked)
            if no_gradient is None:
                selected += role_group.trajectories
                continue
            # A masked member is dropped with the others, for the reason of its own.
            for trajectory in role_group.trajectories:
                reason = masked.pop(trajectory.trajectory_id, no_gradient)
                dropped.setdefault(reason, []).append(trajectory.trajectory_id)
        if selected:
            selected_groups.append(replace(group, trajectories=tuple(selected)))

    return Selection(
        groups=tuple(selected_groups),
        masked=masked,
        dropped={reason: tuple(ids) for reason, ids in dropped.items()},
    )


def by_role(group: Group) -> list[Group]:
    """Return the group once per role, with that role's members: rewards compare among those."""
    members: dict[str | None, list[Trajectory]] = {}
    for trajectory in group.trajectories:
        members.setdefault(trajectory.role, []).append(trajectory)
    return [replace(group, trajectories=tuple(trajectories)) for trajectories in members.values()]


def _judge(trajectory: Trajectory, config: AlgorithmConfig) -> tuple[str, DropReason]:
    """Return the strictest action of the filters that apply, and why.

    Actions are ``keep``, ``mask`` and ``drop``.
    """
    if not all(_logprobs_are_valid(sequence) for sequence in trajectory.sequences):
        return "drop", DropReason.NAN_LOGPROBS

    action = "keep"
    reason = DropReason.VOID_TURN  # not read with ``keep``
    if trajectory.no_loss:
        action = "mask"
        reason = trajectory.no_loss
    elif not any(any(sequence.loss_mask) for sequence in trajectory.sequences):
        action = "mask"
        reason = DropReason.CONSTRAINED

    for name in FILTER_NAMES:
        filter_action = getattr(config.filters, name)
        if filter_action == "off" or (filter_action == "mask" and action == "mask"):
            continue  # it could change nothing
        if FILTERS[name](trajectory, config):
            action = filter_action
            reason = DropReason(name)
            if action == "drop":
                break
    return action, reason


def _logprobs_are_valid(sequence: Trajectory) -> bool:
    log_probs = tuple(compress(sequence.rollout_logprobs, sequence.response_mask))
    return math.isfinite(sum(log_probs)) and max(log_probs, default=0.0) <= MAX_LOGPROB


def _no_gradient(
    group: Group, config: AlgorithmConfig, masked: Mapping[str, DropReason]
) -> DropReason | None:
    """Return why no member of a role, or of a group without roles, would have a gradient, if so."""
    ids = [trajectory.trajectory_id for trajectory in group.trajectories]
    if all(trajectory_id in masked for trajectory_id in ids):
        return masked[ids[0]]
    if config.needs_group and len(group.trajectories) == 1:
        return DropReason.SINGLE_MEMBER
    if config.adv_estimator == "remax" and group.greedy_reward is None:
        return DropReason.NO_BASELINE
    if config.filters_zero_variance and has_equal_outcomes(group, config):
        return DropReason.ZERO_VARIANCE
    return None


def has_equal_outcomes(group: Group, config: AlgorithmConfig) -> bool:
    """Return whether all members of a role did equally well.

    Comparing them then teaches nothing. Penalties of ``algorithm.shaping`` do not count: members
    that are all right, or all wrong, did equally well however long they are. Nor is there anything
    to learn where penalties make what the estimator compares equal.
    """
    outcomes = {outcome(trajectory, config) for trajectory in group.trajectories}
    if len(outcomes) == 1:
        return True
    if not config.compares_totals:
        return False
    totals = {total_reward(trajectory, config.turn_reward) for trajectory in group.trajectories}
    return len(totals) == 1


def outcome(trajectory: Trajectory, config: AlgorithmConfig) -> float:
    """Return what the zero-variance filter and refills compare, see ``algorithm.filter_metric``."""
    if config.filters_by_accuracy:
        return accuracy(trajectory)
    return unshaped_total(trajectory, config.turn_reward)


def void_turn(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """Return whether some turn has neither a tool call that could be decoded nor a final answer.

    References: Xue et al. 2025, SimpleTIR, arXiv 2509.02479.
    """
    return not all(_turns_with_purpose(trajectory, config))


def void_trajectory(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """Return whether no turn has a tool call that could be decoded or a final answer."""
    return not any(_turns_with_purpose(trajectory, config))


def all_tool_calls_failed(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """Return whether there are tool calls, and all ended in errors."""
    calls = trajectory.tool_calls
    return bool(calls) and all(call.error is not None for call in calls)


def overlong(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """Return whether a limit of tokens or turns cut it off (DAPO's overlong filtering)."""
    return trajectory.finish_reason.truncated


def repetitive(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """Return whether the share of repeated n-grams exceeds ``max_repetition``."""
    share = repetition(sampled_ids(trajectory), config.shaping.repetition_ngram)
    return share > config.filters.max_repetition


def _turns_with_purpose(trajectory: Trajectory, config: AlgorithmConfig) -> list[bool]:
    """Return for each turn whether it calls a tool or, as the last one, ends well."""
    purposes = [_calls(turn) for turn in trajectory.turns]
    purposes[-1] = purposes[-1] or _ends_well(trajectory, config.filters.final_answer)
    return purposes


def _calls(turn: Turn) -> bool:
    return any(call.error != "malformed" for call in turn.tool_calls)


def _ends_well(trajectory: Trajectory, pattern: str | None) -> bool:
    """Return whether the last turn is a final answer.

    So is a turn that called a tool which a turn limit kept from running.
    """
    if trajectory.finish_reason is not FinishReason.ANSWER:
        return not trajectory.finish_reason.out_of_tokens
    if pattern is None:
        return True
    text = ""
    for message in reversed(trajectory.messages):
        if message["role"] == "assistant":
            text = message["content"]
            break
    try:
        return regex.search(pattern, answer_of(text), timeout=SEARCH_SECONDS) is not None
    except TimeoutError:  # catastrophic backtracking must not stall the run
        logger.warning(
            "algorithm.filters.final_answer=%s took more than %g s on one answer, which counts as"
            " none; write it without nested repetitions",
            pattern,
            SEARCH_SECONDS,
        )
        return False


FILTERS: dict[str, Callable[[Trajectory, AlgorithmConfig], bool]] = {
    "void_turn": void_turn,
    "void_trajectory": void_trajectory,
    "all_tool_calls_failed": all_tool_calls_failed,
    "overlong": overlong,
    "repetition": repetitive,
}


# --- reward shaping (algorithm.shaping) -----------------------------------------------------------


def shape(group: Group, config: ShapingConfig, *, max_response_length: int) -> Group:
    """Return the group with penalties added to its rewards, in place of earlier penalties.

    ``reward_parts`` shows the penalties; ``score`` stays what it was. ``max_response_length`` is in
    ids.
    """
    if not config.overlong_buffer and not config.repetition_factor:
        return group

    shaped = []
    for trajectory in group.trajectories:
        penalties = {}
        if config.overlong_buffer:
            penalties["overlong_penalty"] = overlong_penalty(
                len(trajectory.response_ids),
                limit=max_response_length,
                buffer=config.overlong_buffer,
                factor=config.overlong_factor,
            )
        if config.repetition_factor:
            share = repetition(sampled_ids(trajectory), config.repetition_ngram)
            penalties["repetition_penalty"] = -config.repetition_factor * share

        score = trajectory.score
        shaped.append(
            replace(
                trajectory,
                reward=score + sum(penalties.values()),
                raw_score=score,
                reward_parts={**trajectory.reward_parts, **penalties},
            )
        )
    return replace(group, trajectories=tuple(shaped))


def overlong_penalty(length: int, *, limit: int, buffer: int, factor: float) -> float:
    """Return 0 up to ``limit - buffer`` ids, then fall linearly to ``-factor`` at ``limit``.

    Args:
        length: of the response, in ids.
        limit: maximum response length, in ids.
        buffer: ids over which the penalty grows.
        factor: the largest penalty.

    References: Yu et al. 2025 (DAPO), arXiv 2503.14476, soft overlong punishment.
    """
    excess = length - (limit - buffer)
    return min(-excess / buffer * factor, 0.0)


def repetition(ids: Sequence[int], ngram: int) -> float:
    """Return the share of n-grams that occur earlier in the text, in [0, 1).

    It is 0 if there is only one n-gram.

    References: Yeo et al. 2025, Demystifying Long Chain-of-Thought Reasoning, arXiv 2502.03373.
    """
    count = len(ids) - ngram + 1
    if count < 2:
        return 0.0
    distinct = {tuple(ids[i : i + ngram]) for i in range(count)}
    return 1 - len(distinct) / count


def sampled_ids(trajectory: Trajectory) -> list[int]:
    """Return the ids the policy sampled, without inserted ones."""
    return list(compress(trajectory.response_ids, trajectory.response_mask))
