"""Trajectories for the page: tokens with their texts and numbers, and groups as trees of turns.

A token is its index in a vocabulary that all trajectories share; masks are lengths of turns;
log-probs are thousandths; versions are run-length encoded. So a token takes about 25 bytes.
``observe.selection`` limits the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from jax_agent_rl.observe.progress import number_ranges
from jax_agent_rl.observe.run_dir import Decode, restore_trajectory
from jax_agent_rl.observe.selection import (
    contexts,
    group_of,
    stop_reasons,
    tool_errors,
    truth,
    turns,
)
from jax_agent_rl.trajectory_graph import TrajectoryGraph, session_graph
from jax_agent_rl.types import Trajectory

_BROKEN = "\ufffd"  # decoders' replacement of an incomplete character
_SNIPPET = 160  # characters of a turn in a tree


class Vocabulary:
    """Token ids in order of their first use, each with its text.

    Args:
        decode: turns token ids into text, special tokens included.

    Attributes:
        ids: the token ids.
        texts: their texts.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._indices: dict[int, int] = {}
        self.ids: list[int] = []
        self.texts: list[str] = []

    def indices(self, ids: Sequence[int]) -> list[int]:
        """Return the indices of ids in the vocabulary; add new ids."""
        return [self._index(token_id) for token_id in ids]

    def spanning(self, ids: Sequence[int]) -> dict[int, str]:
        """Return, by position, texts of tokens that are part of a character.

        The first of a run of such tokens gets the run's text, the others none.
        """
        broken = [_BROKEN in self.texts[self._index(token_id)] for token_id in ids]
        texts: dict[int, str] = {}
        for is_broken, run in groupby(range(len(ids)), key=lambda position: broken[position]):
            positions = list(run)
            if not is_broken or len(positions) == 1:
                continue
            for position in positions:
                texts[position] = ""
            texts[positions[0]] = self._decode([ids[position] for position in positions])
        return texts

    def _index(self, token_id: int) -> int:
        if token_id not in self._indices:
            self._indices[token_id] = len(self.ids)
            self.ids.append(token_id)
            self.texts.append(self._decode([token_id]))
        return self._indices[token_id]


class Prompts:
    """Distinct prompts: the members of a group share one.

    Attributes:
        rows: the prompts for the page.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._numbers: dict[tuple[int, ...], int] = {}
        self.rows: list[dict[str, Any]] = []

    def number(self, ids: Sequence[int]) -> int:
        """Return a prompt's number in :attr:`rows`; add it if new."""
        key = tuple(ids)
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            row: dict[str, Any] = {"ids": self._vocabulary.indices(ids)}
            row |= _optional(x=self._vocabulary.spanning(ids))
            self.rows.append(row)
        return self._numbers[key]


COLUMNS = (
    "id",
    "group",
    "split",
    "step",
    "reward",
    "turns",
    "sampled",
    "inserted",
    "calls",
    "errors",
    "finish",
    "stops",
    "parent",
    "advantage",
)


def facts(record: Mapping[str, Any]) -> list[Any]:
    """Return what the list of trajectories shows and filters by, in order of :data:`COLUMNS`."""
    sampled_tokens = sum(sum(context["response_mask"]) for context in contexts(record))
    response_tokens = sum(len(context["response_ids"]) for context in contexts(record))

    advantages = []
    all_advantages = record.get("advantages") or ()
    for advantage, has_loss in zip(all_advantages, _loss_mask(record), strict=False):
        if has_loss:
            advantages.append(advantage)
    mean_advantage = None
    if advantages:
        mean_advantage = round(sum(advantages) / len(advantages), 4)

    fork = record.get("fork")
    return [
        record["trajectory_id"],
        record["group_id"],
        record["split"],
        record["step"],
        round(record["reward"], 6),
        len(turns(record)),
        sampled_tokens,
        response_tokens - sampled_tokens,
        sum(len(turn["tool_calls"]) for turn in turns(record)),
        tool_errors(record),
        record["finish_reason"],
        stop_reasons(record),
        fork["parent_id"] if fork else None,
        mean_advantage,
    ]


def tokens(record: Mapping[str, Any], vocabulary: Vocabulary, prompts: Prompts) -> dict[str, Any]:
    """Return the tokens of one trajectory.

    Args:
        record: a record as :func:`jax_agent_rl.observe.run_dir.trajectory_record` returns it.
        vocabulary: gets the trajectory's ids.
        prompts: gets the trajectory's prompt.

    Returns:
        A JSON object with these keys; keys without a value are left out:

        - ``p``: number of the prompt;
        - ``t``: indices of the response's ids in the vocabulary;
        - ``x``: texts by position, of tokens that are part of a character;
        - ``turns``: as in the record;
        - ``l``, ``o``: log-probs of sampled tokens by engine and learner, in thousandths of a nat;
        - ``g``: gap between them, in nats;
        - ``v``: versions as ``[version, count]``;
        - ``a``: advantages of trained tokens in thousandths, one number if all are equal;
        - ``facts``: named values for people;
        - ``segments``: the same for each segment;
        - ``session``: graph of the segments, see :func:`session`.
    """
    rollout_logprobs = record["rollout_logprobs"]
    old_logprobs = record.get("old_logprobs")
    sampled = [position for position, mask in enumerate(record["response_mask"]) if mask]

    versions = []
    for version, run in groupby(record["policy_versions"][position] for position in sampled):
        versions.append([version, len(list(run))])

    learner_logprobs = None
    gaps = None
    if old_logprobs:
        learner_logprobs = [_milli(old_logprobs[position]) for position in sampled]
        gaps = []
        for position in sampled:
            gaps.append(_gap(rollout_logprobs[position], old_logprobs[position]))

    page_data = {
        "p": prompts.number(record["prompt_ids"]),
        "t": vocabulary.indices(record["response_ids"]),
        "turns": [_turn(turn) for turn in record["turns"]],
        "l": [_milli(rollout_logprobs[position]) for position in sampled],
        "v": versions,
        "facts": _facts(record),
    }
    return page_data | _optional(
        x=vocabulary.spanning(record["response_ids"]),
        a=_advantages(record),
        o=learner_logprobs,
        g=gaps,
        segments=[tokens(segment, vocabulary, prompts) for segment in record["segments"]],
        session=session(record),
    )


def _advantages(record: Mapping[str, Any]) -> list[int | None] | int | None:
    """Return the advantages of trained tokens in thousandths, one number if all are equal."""
    advantages = record.get("advantages")
    if not advantages:
        return None
    trained = []
    for position, has_loss in enumerate(_loss_mask(record)):
        if has_loss:
            trained.append(_milli(advantages[position]))
    if trained and len(set(trained)) == 1:
        return trained[0]
    return trained


def session(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the graph of a trajectory's segments, in the order of their first turns.

    It is empty if there is only one segment. Otherwise each segment is an object:

    - ``at``: its index in the record's contexts;
    - ``up``: number of the segment that it left, or -1;
    - ``shared``: number of ids that it has in common with that segment;
    - ``after``: number of that segment's turns that end within the shared ids;
    - ``calls``: the calls of the session that sampled its turns;
    - ``turns``: number of its turns;
    - ``trained``: number of its tokens with loss;
    - ``share``: their share of the session's tokens with loss;
    - ``note``: where its first call left the recorded conversations.
    """
    if not record["segments"]:
        return []
    trajectory = restore_trajectory(record)
    sequences = (*trajectory.segments, trajectory)
    trained = [sum(_loss_mask(context)) for context in contexts(record)]

    rows = []
    for segment in session_graph(trajectory):
        index = 0
        while sequences[index] is not segment.sequence:  # by identity: segments may be equal
            index += 1
        calls = [turn.number + 1 for turn in segment.sequence.turns if turn.number is not None]
        row = {
            "at": index,
            "up": -1 if segment.parent is None else segment.parent,
            "shared": segment.shared,
            "after": segment.turns,
            "calls": number_ranges(calls),
            "turns": segment.sequence.num_turns,
            "trained": trained[index],
            "share": round(trained[index] / max(1, sum(trained)), 4),
            "note": segment.sequence.turns[0].note,
        }
        rows.append(row)
    return rows


class Forest:
    """Trees of the groups of a page that have at least two trajectories there.

    A node is ``{up: number of its parent or -1, turn, n: sampled tokens, at: its trajectories,
    ends: the trajectories that end there, text}``. Trajectories are numbers of records, in the
    order of :meth:`add`. One group is in memory at a time.

    Args:
        decode: turns token ids into text, special tokens included.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._trees: dict[str, list[dict[str, Any]]] = {}
        self._group: tuple[str, int, str] | None = None
        self._members: list[Trajectory] = []
        self._count = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next record; records of a group follow each other."""
        if group_of(record) != self._group:
            self._end_group()
            self._group = group_of(record)
        self._members.append(restore_trajectory(record))
        self._count += 1

    def trees(self) -> dict[str, list[dict[str, Any]]]:
        """Return the trees of all groups, by ``"<split>/<step>/<group id>"``."""
        self._end_group()
        return self._trees

    def _end_group(self) -> None:
        if self._group is not None and len(self._members) > 1:
            split, step, group = self._group
            numbers = range(self._count - len(self._members), self._count)
            self._trees[f"{split}/{step}/{group}"] = _nodes(self._members, numbers, self._decode)
        self._group = None
        self._members = []


def _nodes(
    trajectories: Sequence[Trajectory], numbers: Sequence[int], decode: Decode
) -> list[dict[str, Any]]:
    """Return the tree of a group as JSON, parents before their children."""
    graph = TrajectoryGraph.of(trajectories)
    ending: dict[int, list[int]] = {}  # trajectories by the node of their last turn
    for number, path in zip(numbers, graph.paths, strict=True):
        ending.setdefault(path[-1], []).append(number)

    rows: list[dict[str, Any]] = []
    row_numbers: dict[int, int] = {}  # by node
    for node_number in graph.parents_first():
        node = graph.nodes[node_number]
        row = {
            "up": -1 if node.parent is None else row_numbers[node.parent],
            "turn": node.turn + 1,
            "n": len(node.ids),
            "at": [numbers[member] for member in node.members],
            "text": decode(node.ids[:_SNIPPET])[:_SNIPPET],
        }
        if node_number in ending:
            row["ends"] = ending[node_number]
        row_numbers[node_number] = len(rows)
        rows.append(row)
    return rows


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn as the page shows it."""
    calls = []
    for call in turn["tool_calls"]:
        page_call = {"name": call["name"], "seconds": round(call["seconds"], 3)}
        calls.append(page_call | _optional(error=call["error"]))

    page_turn = {"s": turn["sampled"], "i": turn["appended"], "stop": turn["stop_reason"]}
    return page_turn | _optional(
        note=turn.get("note") or None,
        learn=_learns(turn) or None,
        c=turn.get("constrained"),
        calls=calls,
        score=turn["score"],
        cached=turn["cached_tokens"] or None,
    )


def _loss_mask(record: Mapping[str, Any]) -> list[int]:
    """Return :attr:`Trajectory.loss_mask` of a record."""
    mask: list[int] = []
    for turn in record["turns"]:
        mask += _sampled_mask(turn)
        mask += [1 if _learns(turn) else 0] * turn["appended"]
    return mask


def _sampled_mask(turn: Mapping[str, Any]) -> list[int]:
    """Return :attr:`TokenOutput.loss_mask` of a turn; earlier versions' records omit the marks."""
    return [1 - mark for mark in turn.get("constrained", ())] or [1] * turn["sampled"]


def _learns(turn: Mapping[str, Any]) -> bool:
    """Return whether appended tokens were trained on; records of earlier versions omit it."""
    return turn.get("learn_appended", False)


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return named values worth showing, as far as recorded."""
    answer = truth(record)
    seconds = {}
    for name, value in record["metrics"].items():
        if name.endswith("seconds"):
            seconds[name] = round(value, 3)
    return _optional(
        agent=record["agent_name"],
        source=record["row"].get("data_source"),
        truth=None if answer is None else str(answer)[:500],
        no_loss=record.get("no_loss"),
        parts=record.get("reward_parts"),
        tool_scores=record.get("tool_scores"),
        seconds=seconds,
    )


def _milli(value: float | None) -> int | None:
    """Return a finite number in thousandths."""
    if value is None or not math.isfinite(value):
        return None
    return round(1000 * value)


def _gap(engine: float | None, learner: float | None) -> float | None:
    """Return the gap of two recorded log-probs: rounding to thousandths may make or hide one."""
    if engine is None or learner is None or not math.isfinite(engine - learner):
        return None
    return float(f"{abs(engine - learner):.2g}") or 0


def _optional(**values: Any) -> dict[str, Any]:
    """Return the values that are neither None nor empty."""
    optional = {}
    for key, value in values.items():
        if value is not None and value != [] and value != {}:
            optional[key] = value
    return optional
