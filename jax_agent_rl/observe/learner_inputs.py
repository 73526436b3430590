"""What a learner reads of a trajectory beside its ids and rewards, as arrays.

A record has no room for them: the experts that an engine chose take hundreds of bytes a position.
They are in a file of the run's attachments, from which a step can be repeated::

    experts_start         int32 [N]                  first position of each turn's report, or -1
    experts.3             uint8 or uint16 [n, M, k]  what the engine chose in the fourth turn
    teacher_logprobs      float64 [S]                of each id with loss, by a served teacher
    teacher_top_ids       int32 [S, K]               the K likeliest ids of the teacher there
    teacher_top_logprobs  float32 [S, K]             their log-probs, as the learner reads them

N turns are those of the segments, then the trajectory's own. The arrays of a kind are absent where
there is nothing of it: only mixtures of experts have ``experts``, and only ``algorithm.kl.top_k``
has the likeliest ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from jax_agent_rl.types import RoutedExperts, TokenScores, Trajectory, Turn

Arrays = Mapping[str, np.ndarray]

_STARTS = "experts_start"
_LOGPROBS = "teacher_logprobs"
_TOP_IDS = "teacher_top_ids"
_TOP_LOGPROBS = "teacher_top_logprobs"


def learner_inputs(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """Return the arrays of a trajectory; empty if the learner read nothing beside its record."""
    arrays = _expert_arrays(trajectory)
    scores = trajectory.teacher_scores
    if scores is not None:
        arrays[_LOGPROBS] = np.asarray(scores.log_probs, np.float64)
        if scores.top_ids:
            arrays[_TOP_IDS] = np.asarray(scores.top_ids, np.int32)
            arrays[_TOP_LOGPROBS] = np.asarray(scores.top_log_probs, np.float32)
    return arrays


def has_learner_inputs(trajectory: Trajectory) -> bool:
    """Return whether the learner reads more of a trajectory than its record holds."""
    if trajectory.teacher_scores is not None:
        return True
    return any(turn.output.routed_experts is not None for turn in _all_turns(trajectory))


def with_learner_inputs(trajectory: Trajectory, arrays: Arrays) -> Trajectory:
    """Return a trajectory, restored from its record, with what :func:`learner_inputs` gave.

    Args:
        arrays: read from a file that somebody else may have written.

    Raises:
        ValueError: they are not of this trajectory.
    """
    if _STARTS in arrays:
        trajectory = _with_experts(trajectory, arrays)
    if _LOGPROBS in arrays:
        trajectory = replace(trajectory, teacher_scores=_teacher_scores(trajectory, arrays))

    unread = sorted(arrays.keys() - learner_inputs(trajectory).keys())
    if unread:
        raise ValueError(f"it has an array {unread[0]!r:.100}, which nothing reads")
    return trajectory


def _all_turns(trajectory: Trajectory) -> Iterator[Turn]:
    for sequence in (*trajectory.segments, trajectory):
        yield from sequence.turns


# --- experts --------------------------------------------------------------------------------------


def _expert_arrays(trajectory: Trajectory) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    starts: list[int] = []
    for number, turn in enumerate(_all_turns(trajectory)):
        routed = turn.output.routed_experts
        if routed is None:
            starts.append(-1)
            continue
        starts.append(routed.start)
        numbers = np.frombuffer(routed.data, "<u2" if routed.wide else "u1")
        arrays[f"experts.{number}"] = numbers.reshape(routed.shape)

    if arrays:
        arrays[_STARTS] = np.asarray(starts, np.int32)
    return arrays


def _with_experts(trajectory: Trajectory, arrays: Arrays) -> Trajectory:
    num_turns = sum(1 for _ in _all_turns(trajectory))
    starts = _array(arrays, _STARTS, "int32", (num_turns,))
    number = 0
    sequences = []
    for sequence in (*trajectory.segments, trajectory):
        length = len(sequence.prompt_ids) + len(sequence.response_ids)
        turns = []
        for turn in sequence.turns:
            start = int(starts[number])
            if start != -1:
                routed = _routed(arrays, f"experts.{number}", start, length)
                turn = replace(turn, output=replace(turn.output, routed_experts=routed))
            turns.append(turn)
            number += 1
        sequences.append(replace(sequence, turns=tuple(turns)))

    *segments, last = sequences
    return replace(last, segments=tuple(segments))


def _routed(arrays: Arrays, name: str, start: int, length: int) -> RoutedExperts:
    """Return the experts of a turn.

    Args:
        length: number of ids of its sequence.
    """
    choices = arrays.get(name)
    if choices is None:
        raise ValueError(f"it lacks {name}")
    if choices.dtype not in (np.uint8, np.uint16) or choices.ndim != 3:
        raise ValueError(
            f"{name} is {choices.dtype} {list(choices.shape)}, not uint8 or uint16 of positions,"
            " layers and experts"
        )
    if start < 0 or start + choices.shape[0] > length:
        raise ValueError(
            f"{name} has {choices.shape[0]} positions from {start} on, of a context of {length} ids"
        )
    return RoutedExperts.of(start, choices)


# --- served teachers ------------------------------------------------------------------------------


def _teacher_scores(trajectory: Trajectory, arrays: Arrays) -> TokenScores:
    count = sum(sum(sequence.loss_mask) for sequence in trajectory.sequences)
    log_probs = _array(arrays, _LOGPROBS, "float64", (count,))
    if _TOP_IDS not in arrays:
        return TokenScores(log_probs=tuple(log_probs.tolist()))

    top_k = arrays[_TOP_IDS].shape[-1] if arrays[_TOP_IDS].ndim == 2 else 1
    top_ids = _array(arrays, _TOP_IDS, "int32", (count, top_k))
    if (top_ids < 0).any():
        raise ValueError(f"{_TOP_IDS} has negative ids")
    top_log_probs = _array(arrays, _TOP_LOGPROBS, "float32", (count, top_k))
    return TokenScores(
        log_probs=tuple(log_probs.tolist()),
        top_ids=tuple(map(tuple, top_ids.tolist())),
        top_log_probs=tuple(map(tuple, top_log_probs.tolist())),
    )


def _array(arrays: Arrays, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array, checked; numbers are finite."""
    array = arrays.get(name)
    if array is None:
        raise ValueError(f"it lacks {name}")
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"{name} is {array.dtype} {list(array.shape)}, where the trajectory has {dtype}"
            f" {list(shape)}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} has numbers that are not finite")
    return array
