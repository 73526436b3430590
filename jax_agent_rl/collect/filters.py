"""Which of the collected trajectories are worth a gradient (``algorithm.filters``), each left out with its reason.

::

    groups ─► log-probs not finite: drop ─► filters: mask | drop ─► group too small, no baseline, equal rewards: drop
           ─► Selection: groups to train on, masked members (in the baseline, without a gradient), the dropped
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import regex

from jax_agent_rl.collect.shaping import repetition, sampled_ids
from jax_agent_rl.config.algorithm import FILTER_NAMES, AlgorithmConfig
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
    """Applies every filter. Groups without members are left out silently: those were counted when they were lost."""
    kept: list[Group] = []
    masked: dict[str, DropReason] = {}
    dropped: defaultdict[DropReason, list[str]] = defaultdict(list)
    for group in groups:
        members = []
        for trajectory in group.trajectories:
            action, reason = _judge(trajectory, config)
            if action == "drop":
                dropped[reason].append(trajectory.trajectory_id)
                continue
            members.append(trajectory)
            if action == "mask":
                masked[trajectory.trajectory_id] = reason
        group = replace(group, trajectories=tuple(members))
        if members and (reason := _useless(group, config, masked)):
            dropped[reason] += [t.trajectory_id for t in members if t.trajectory_id not in masked]
            for trajectory in members:
                if why := masked.pop(trajectory.trajectory_id, None):
                    dropped[why].append(trajectory.trajectory_id)
        elif members:
            kept.append(group)
    return Selection(groups=tuple(kept), masked=masked, dropped={k: tuple(v) for k, v in dropped.items() if v})


def _judge(trajectory: Trajectory, config: AlgorithmConfig) -> tuple[str, DropReason]:
    """``keep``, ``mask`` or ``drop``, and why. The strictest of the filters that apply."""
    if not all(map(_logprobs_make_sense, trajectory.sequences)):
        return "drop", DropReason.NAN_LOGPROBS
    verdict = ("mask", trajectory.no_loss) if trajectory.no_loss else ("keep", DropReason.VOID_TURN)
    for name in FILTER_NAMES:
        action = getattr(config.filters, name)
        if action != "off" and verdict[0] != "drop" and FILTERS[name](trajectory, config):
            verdict = (action, DropReason(name)) if action == "drop" or verdict[0] == "keep" else verdict
    return verdict


def _logprobs_make_sense(sequence: Trajectory) -> bool:
    sampled = tuple(compress(sequence.rollout_logprobs, sequence.response_mask))
    return math.isfinite(sum(sampled)) and max(sampled, default=0.0) <= MAX_LOGPROB


def _useless(group: Group, config: AlgorithmConfig, masked: Mapping[str, DropReason]) -> DropReason | None:
    """Why a whole group would have no gradient."""
    trained = [t for t in group.trajectories if t.trajectory_id not in masked]
    if not trained:
        return masked[group.trajectories[0].trajectory_id]
    if config.needs_group and len(group.trajectories) == 1:
        return DropReason.SINGLE_MEMBER
    if config.adv_estimator == "remax" and group.greedy_reward is None:
        return DropReason.NO_BASELINE
    if config.filters_zero_variance and len(set(group.rewards)) == 1:
        return DropReason.ZERO_VARIANCE
    return None


def void_turn(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """Some turn has neither a tool call that could be decoded nor a final answer.

    References: Xue et al. 2025, SimpleTIR, arXiv 2509.02479.
    """
    return not all(_turns_with_purpose(trajectory, config))


def void_trajectory(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """No turn has a tool call that could be decoded or a final answer."""
    return not any(_turns_with_purpose(trajectory, config))


def all_tool_calls_failed(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """There are tool calls, and each ended in an error."""
    calls = trajectory.tool_calls
    return bool(calls) and all(call.error is not None for call in calls)


def overlong(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """A limit of tokens or turns cut it off (DAPO's overlong filtering)."""
    return trajectory.finish_reason.truncated


def repetitive(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """More of its n-grams than ``max_repetition`` stood there before."""
    share = repetition(sampled_ids(trajectory), config.shaping.repetition_ngram)
    return share > config.filters.max_repetition


def _turns_with_purpose(trajectory: Trajectory, config: AlgorithmConfig) -> list[bool]:
    *before, last = trajectory.turns
    return [*(_calls(turn) for turn in before), _calls(last) or _ends_well(trajectory, config.filters.final_answer)]


def _calls(turn: Turn) -> bool:
    return any(call.error != "malformed" for call in turn.tool_calls)


def _ends_well(trajectory: Trajectory, pattern: str | None) -> bool:
    """The last turn called a tool that the turn limits kept from running, or is a final answer."""
    if trajectory.finish_reason is not FinishReason.ANSWER:
        return not trajectory.finish_reason.out_of_tokens
    text = next((m["content"] for m in reversed(trajectory.messages) if m["role"] == "assistant"), "")
    if pattern is None:
        return True
    try:
        return regex.search(pattern, text, timeout=SEARCH_SECONDS) is not None
    except TimeoutError:  # it backtracks; what the model wrote must not hold the run up
        logger.warning(
            "algorithm.filters.final_answer=%s took more than %g s on one answer, which counts as none; write it "
            "without repetitions of repetitions",
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
