"""Trajectories for the page: every token with its text and numbers, in few bytes, and groups as trees of turns.

A token is its place in a vocabulary that all trajectories share; masks are lengths of turns;
log-probs are thousandths; versions are run-length encoded. A token takes about 25 bytes;
``observe.selection`` limits their number.
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
    """Ids in order of their first use, each with its text.

    Args:
        decode: turns ids into text, special tokens included.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._places: dict[int, int] = {}
        self.ids: list[int] = []
        self.texts: list[str] = []

    def places(self, ids: Sequence[int]) -> list[int]:
        """Return the places of ids in the vocabulary; add new ones."""
        return [self._place(i) for i in ids]

    def spanning(self, ids: Sequence[int]) -> dict[int, str]:
        """Return, by position, texts of tokens that are part of a character.

        The first of a run of such tokens gets the run's whole text, the others none.
        """
        broken = [_BROKEN in self.texts[self._place(i)] for i in ids]
        texts: dict[int, str] = {}
        for flag, run in groupby(range(len(ids)), key=lambda at: broken[at]):
            places = list(run)
            if flag and len(places) > 1:
                texts |= dict.fromkeys(places, "") | {
                    places[0]: self._decode([ids[at] for at in places])
                }
        return texts

    def _place(self, token: int) -> int:
        if token not in self._places:
            self._places[token] = len(self.ids)
            self.ids.append(token)
            self.texts.append(self._decode([token]))
        return self._places[token]


class Prompts:
    """Distinct prompts; those of a group are equal."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._numbers: dict[tuple[int, ...], int] = {}
        self.rows: list[dict[str, Any]] = []

    def number(self, ids: Sequence[int]) -> int:
        """Return a prompt's number in :attr:`rows`; add it if new."""
        key = tuple(ids)
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(
                {"ids": self._vocabulary.places(ids)} | _optional(x=self._vocabulary.spanning(ids))
            )
        return self._numbers[key]


COLUMNS = (
    *(
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
    ),
    *("parent", "advantage"),
)


def facts(record: Mapping[str, Any]) -> list[Any]:
    """Return what the list of trajectories shows and filters by, in order of :data:`COLUMNS`."""
    sampled = sum(sum(part["response_mask"]) for part in contexts(record))
    trained = [
        a
        for a, mine in zip(record.get("advantages") or (), _loss_mask(record), strict=False)
        if mine
    ]
    fork = record.get("fork")
    return [
        record["trajectory_id"],
        record["group_id"],
        record["split"],
        record["step"],
        round(record["reward"], 6),
        len(turns(record)),
        sampled,
        sum(len(part["response_ids"]) for part in contexts(record)) - sampled,
        sum(len(turn["tool_calls"]) for turn in turns(record)),
        tool_errors(record),
        record["finish_reason"],
        stop_reasons(record),
        fork["parent_id"] if fork else None,
        round(sum(trained) / len(trained), 4) if trained else None,
    ]


def tokens(record: Mapping[str, Any], vocabulary: Vocabulary, prompts: Prompts) -> dict[str, Any]:
    """Return the tokens of one trajectory.

    Args:
        record: see :func:`jax_agent_rl.observe.run_dir.trajectory_record`.
        vocabulary: takes its ids.
        prompts: takes its prompt.

    Returns:
        ``p`` number of the prompt; ``t`` places of the response's ids; ``x`` texts by position, of
        tokens that are part of a character; ``turns`` as in the record; ``l``, ``o`` log-probs of
        sampled tokens by engine and learner, in thousandths of a nat; ``g`` the gap between them,
        in nats; ``v`` versions as ``[version, count]``; ``a`` advantages of trained tokens in
        thousandths, one number if all are equal; ``facts`` for people; ``segments`` the same for
        each segment, and ``session`` their graph, see :func:`session`.
    """
    mine = [at for at, mask in enumerate(record["response_mask"]) if mask]
    known = record.get("advantages")
    advantages = (
        [_milli(known[at]) for at, mask in enumerate(_loss_mask(record)) if mask] if known else []
    )
    old = record.get("old_logprobs")
    versions = [
        [v, len(list(run))] for v, run in groupby(record["policy_versions"][at] for at in mine)
    ]
    return {
        "p": prompts.number(record["prompt_ids"]),
        "t": vocabulary.places(record["response_ids"]),
        "turns": [_turn(turn) for turn in record["turns"]],
        "l": [_milli(record["rollout_logprobs"][at]) for at in mine],
        "v": versions,
        "facts": _facts(record),
    } | _optional(
        x=vocabulary.spanning(record["response_ids"]),
        a=advantages[0] if advantages and len(set(advantages)) == 1 else advantages or None,
        o=[_milli(old[at]) for at in mine] if old else None,
        g=[_gap(record["rollout_logprobs"][at], old[at]) for at in mine] if old else None,
        segments=[tokens(segment, vocabulary, prompts) for segment in record["segments"]],
        session=session(record),
    )


def session(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the graph of a trajectory's segments, in the order of their first turns; empty if there is but one.

    A segment is ``{at: its place in the record's contexts, up: the one that it left, or -1, shared:
    ids that it has in common with that, after: how many of that one's turns end within those,
    calls: which calls of the session sampled its turns, turns: how many, trained: tokens with loss,
    share: of the session's, note: where its first call left the recorded conversations}``.
    """
    if not record["segments"]:
        return []
    trajectory = restore_trajectory(record)
    sequences = (*trajectory.segments, trajectory)
    trained = [sum(_loss_mask(part)) for part in contexts(record)]
    rows = []
    for segment in session_graph(trajectory):
        at = next(n for n, sequence in enumerate(sequences) if sequence is segment.sequence)
        numbers = [turn.number + 1 for turn in segment.sequence.turns if turn.number is not None]
        rows.append(
            {
                "at": at,
                "up": -1 if segment.parent is None else segment.parent,
                "shared": segment.shared,
                "after": segment.turns,
                "calls": number_ranges(numbers),
                "turns": segment.sequence.num_turns,
                "trained": trained[at],
                "share": round(trained[at] / max(1, sum(trained)), 4),
                "note": segment.sequence.turns[0].note,
            }
        )
    return rows


class Forest:
    """Trees of the groups of a page that have at least two trajectories there.

    A node is ``{up: number of its parent or -1, turn, n: sampled tokens, at: its trajectories,
    ends: those that end there, text}``; trajectories are numbers of records, in the order of
    :meth:`add`. One group is in memory at a time.

    Args:
        decode: turns ids into text, special tokens included.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._trees: dict[str, list[dict[str, Any]]] = {}
        self._group: tuple[str, int, str] | None = None
        self._members: list[Trajectory] = []
        self._count = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next record; those of a group follow each other."""
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
    graph = TrajectoryGraph.of(trajectories)
    ends: dict[int, list[int]] = {}
    for number, path in zip(numbers, graph.paths, strict=True):
        ends.setdefault(path[-1], []).append(number)
    order = graph.parents_first()
    places = {number: place for place, number in enumerate(order)}
    rows = []
    for number in order:
        node = graph.nodes[number]
        row = {
            "up": -1 if node.parent is None else places[node.parent],
            "turn": node.turn + 1,
            "n": len(node.ids),
            "at": [numbers[member] for member in node.members],
            "text": decode(node.ids[:_SNIPPET])[:_SNIPPET],
        }
        if number in ends:
            row["ends"] = ends[number]
        rows.append(row)
    return rows


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {"name": call["name"], "seconds": round(call["seconds"], 3)}
        | _optional(error=call["error"])
        for call in turn["tool_calls"]
    ]
    head = {"s": turn["sampled"], "i": turn["appended"], "stop": turn["stop_reason"]}
    return head | _optional(
        note=turn.get("note") or None,
        learn=_learns(turn) or None,
        c=turn.get("constrained"),
        calls=calls,
        score=turn["score"],
        cached=turn["cached_tokens"] or None,
    )


def _loss_mask(record: Mapping[str, Any]) -> list[int]:
    """Return :attr:`Trajectory.loss_mask` of a record."""
    spans = (
        (_sampled_mask(turn), [int(_learns(turn))] * turn["appended"]) for turn in record["turns"]
    )
    return [mask for sampled, appended in spans for mask in (*sampled, *appended)]


def _sampled_mask(turn: Mapping[str, Any]) -> list[int]:
    """Return :attr:`TokenOutput.loss_mask` of a turn; records of earlier versions omit the marks."""
    return [1 - mark for mark in turn.get("constrained", ())] or [1] * turn["sampled"]


def _learns(turn: Mapping[str, Any]) -> bool:
    """Return whether appended tokens were trained on, too; records of earlier versions omit it."""
    return turn.get("learn_appended", False)


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return named values worth showing, as far as recorded."""
    answer = truth(record)
    seconds = {k: round(v, 3) for k, v in record["metrics"].items() if k.endswith("seconds")}
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
    return None if value is None or not math.isfinite(value) else round(1000 * value)


def _gap(one: float | None, other: float | None) -> float | None:
    """Return the gap of values as recorded: rounding to thousandths may make or hide one."""
    if one is None or other is None or not math.isfinite(one - other):
        return None
    return float(f"{abs(one - other):.2g}") or 0


def _optional(**values: Any) -> dict[str, Any]:
    """Return the values that are neither None nor empty."""
    return {
        key: value
        for key, value in values.items()
        if value is not None and value != [] and value != {}
    }
