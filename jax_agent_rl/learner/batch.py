"""Trajectories to packed rows in which every common token is computed once.

A row is a forest of tokens in depth-first order. Trajectories that begin alike (one prompt, one few-shot prefix, one
tree of branches) share nodes; a node's position is its depth, and it attends to its ancestors::

    t1 = [10 11 20 21]      index          0  1  2  3  4
    t2 = [10 11 30]         token_ids     10 11 20 21 30
                            positions      0  1  2  3  2
                            subtree_end    5  5  4  4  5      i sees j  iff  j <= i < subtree_end[j]

With sharing off every trajectory is its own chain, and the same mask is that of a plain packed row.

What is trained on are *targets*, nodes that were sampled (their log-prob is read at the parent), and *terms*, one per
sampled token and trajectory: several trajectories may have sampled the same token in the same context, each with its
own advantage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jax_agent_rl.types import Trajectory

TERMS_PER_TOKEN = 2  # room for terms in a row, per token of its length


@dataclass(frozen=True, kw_only=True)
class Batch:
    """R packed rows. Padding has weight 0 and attends to itself only.

    Attributes:
        token_ids, positions, subtree_end: int32 [R, T], see the module docstring.
        target_parent: int32 [R, M]: index of the node whose logits score the target.
        target_id: int32 [R, M].
        target_valid: bool [R, M]; valid targets come first.
        term_target: int32 [R, K]: index into the targets.
        advantage, weight: float32 [R, K]; weight 0 is padding.
        rollout_logprob, old_logprob: float32 [R, K]; the former is NaN for a token that was not sampled.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    subtree_end: np.ndarray
    target_parent: np.ndarray
    target_id: np.ndarray
    target_valid: np.ndarray
    term_target: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    rollout_logprob: np.ndarray
    old_logprob: np.ndarray

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def micro_batches(self, rows: int) -> Iterator[dict[str, np.ndarray]]:
        """Slices of exactly ``rows`` rows as dicts of arrays; the last one is padded with empty rows."""
        for begin in range(0, self.num_rows, rows):
            part = {name: value[begin : begin + rows] for name, value in vars(self).items()}
            missing = rows - len(part["token_ids"])
            if missing:
                empty = _empty_rows(missing, self.token_ids.shape[1])
                part = {name: np.concatenate([value, empty[name]]) for name, value in part.items()}
            yield part


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How much was saved: ``tokens`` if each trajectory were computed alone, ``nodes`` computed, ``rows`` used."""

    tokens: int
    nodes: int
    rows: int


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    weights: Sequence[float],
    *,
    row_length: int,
    share_prefixes: bool = True,
) -> tuple[Batch, Sharing]:
    """Packs trajectories into rows: each goes where most of it already stands, else into the first row with room.

    Args:
        advantages, weights: per trajectory; ``weights`` as :func:`jax_agent_rl.learner.losses.term_weights` gives.

    Raises:
        ValueError: a trajectory is longer than a row (nothing is ever truncated).
    """
    for trajectory in trajectories:
        length = len(trajectory.prompt_ids) + len(trajectory.response_ids)
        if length > row_length:
            raise ValueError(
                f"trajectory {trajectory.trajectory_id} has {length} tokens, a row {row_length}; "
                f"set learner.row_length >= {length}"
            )
    ids = [np.asarray(t.prompt_ids + t.response_ids, np.int32) for t in trajectories]
    rows = _assign(ids, [sum(t.loss_mask) for t in trajectories], row_length, share_prefixes)
    arrays = _empty_rows(len(rows), row_length)
    for index, row in enumerate(rows):
        paths = _fill_nodes(arrays, index, row)
        _fill_terms(arrays, index, row, paths, trajectories, advantages, weights)
    nodes = sum(member.new for row in rows for member in row)
    return Batch(**arrays), Sharing(tokens=sum(map(len, ids)), nodes=nodes, rows=len(rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    """A trajectory in a row. Its first ``common`` ids stand there already; the others become a chain of new nodes.

    Attributes:
        which: its number in the batch.
        ids: int32 [n].
        common: length of the longest prefix it shares with an earlier member.
        owner: place in the row of the member whose chain holds the last shared node; -1 if nothing is shared.
    """

    which: int
    ids: np.ndarray
    common: int
    owner: int

    @property
    def new(self) -> int:
        """Nodes it adds to the row."""
        return len(self.ids) - self.common


class _Prefixes:
    """Lengths of common prefixes between any trajectory and all others.

    In lexicographic order, the common prefix of two sequences is the shortest among those of the neighbours between
    them, so one running minimum to each side answers for all.
    """

    def __init__(self, ids: Sequence[np.ndarray]) -> None:
        keys = [sequence.astype(">i4").tobytes() for sequence in ids]
        self._order = np.asarray(sorted(range(len(ids)), key=keys.__getitem__), np.int64)
        self._place = np.argsort(self._order)
        pairs = zip(self._order[:-1], self._order[1:], strict=True)
        self._neighbours = np.asarray([_common(ids[a], ids[b]) for a, b in pairs], np.int64)

    def of(self, which: int) -> np.ndarray:
        """int64 [N]: with every trajectory; the entry of ``which`` itself means nothing."""
        place = self._place[which]
        common = np.zeros(len(self._order), np.int64)
        common[self._order[place + 1 :]] = np.minimum.accumulate(self._neighbours[place:])
        common[self._order[:place][::-1]] = np.minimum.accumulate(self._neighbours[:place][::-1])
        return common


def _common(a: np.ndarray, b: np.ndarray) -> int:
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    first = int(differ.argmax()) if shorter else 0
    return first if shorter and differ[first] else shorter


def _assign(ids: Sequence[np.ndarray], terms: Sequence[int], length: int, share: bool) -> list[list[_Member]]:
    """Rows of members; each trajectory joins the row with room that shares most with it, the first of equals."""
    count = len(ids)
    prefixes = _Prefixes(ids) if share else None
    rows: list[list[_Member]] = []
    row_of = np.zeros(count, np.int64)
    nodes, row_terms = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for which, sequence in enumerate(ids):
        common = prefixes.of(which)[:which] if prefixes else np.zeros(which, np.int64)
        shared = np.zeros(len(rows), np.int64)
        np.maximum.at(shared, row_of[:which], common)
        has_room = nodes[: len(rows)] + len(sequence) - shared <= length
        has_room &= row_terms[: len(rows)] + terms[which] <= length * TERMS_PER_TOKEN
        if has_room.any():
            row = int(np.where(has_room, shared, -1).argmax())
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(_member(which, sequence, rows[row], common))
        row_of[which] = row
        nodes[row] += rows[row][-1].new
        row_terms[row] += terms[which]
    return rows


def _member(which: int, sequence: np.ndarray, row: list[_Member], common: np.ndarray) -> _Member:
    """``common`` int64 [which]: prefixes shared with every trajectory before it."""
    shared = common[[member.which for member in row]] if row else np.zeros(1, np.int64)
    # The first of those that share most: what it shares with still earlier ones is shorter, so the node is its own.
    owner = int(shared.argmax())
    most = int(shared[owner])
    return _Member(which=which, ids=sequence, common=most, owner=owner if most else -1)


def _empty_rows(rows: int, length: int) -> dict[str, np.ndarray]:
    """Arrays of rows that hold nothing but padding."""
    terms = length * TERMS_PER_TOKEN
    ints = {
        name: np.zeros((rows, length), np.int32) for name in ("token_ids", "positions", "target_parent", "target_id")
    }
    floats = {
        name: np.zeros((rows, terms), np.float32) for name in ("advantage", "weight", "rollout_logprob", "old_logprob")
    }
    return {
        **ints,
        **floats,
        "subtree_end": np.tile(np.arange(1, length + 1, dtype=np.int32), (rows, 1)),
        "target_valid": np.zeros((rows, length), bool),
        "term_target": np.zeros((rows, terms), np.int32),
    }


def _fill_nodes(arrays: dict[str, np.ndarray], index: int, row: Sequence[_Member]) -> list[np.ndarray]:
    """Writes the nodes of one row, depth first; returns each member's path as node numbers, int64 [n]."""
    branches: list[list[int]] = [[] for _ in row]
    for k, member in enumerate(row):
        if member.owner >= 0:
            branches[member.owner].append(k)
    sizes = _subtree_sizes(row)
    starts = _depth_first(row, branches)
    paths: list[np.ndarray] = []
    for m, member in enumerate(row):
        own = slice(starts[m], starts[m] + member.new)
        arrays["token_ids"][index, own] = member.ids[member.common :]
        arrays["positions"][index, own] = np.arange(member.common, len(member.ids))
        end = np.full(member.new, own.stop, np.int32)
        for k in branches[m]:
            end[: row[k].common - member.common] += sizes[k]
        arrays["subtree_end"][index, own] = end
        before = paths[member.owner][: member.common] if member.common else np.zeros(0, np.int64)
        paths.append(np.concatenate([before, np.arange(own.start, own.stop)]))
    return paths


def _subtree_sizes(row: Sequence[_Member]) -> list[int]:
    """Nodes of each member's chain and of all that branches off it."""
    sizes = [member.new for member in row]
    for m in reversed(range(len(row))):  # an owner stands before those it owns
        if row[m].owner >= 0:
            sizes[row[m].owner] += sizes[m]
    return sizes


def _depth_first(row: Sequence[_Member], branches: Sequence[Sequence[int]]) -> list[int]:
    """Number of each member's first new node. A chain is followed to its end before its branches, deepest first."""
    starts = [0] * len(row)
    count = 0
    stack = [m for m, member in enumerate(row) if member.owner < 0][::-1]
    while stack:
        m = stack.pop()
        starts[m] = count
        count += row[m].new
        stack += sorted(branches[m], key=lambda k: (-row[k].common, k), reverse=True)
    return starts


def _fill_terms(
    arrays: dict[str, np.ndarray],
    index: int,
    row: Sequence[_Member],
    paths: Sequence[np.ndarray],
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    weights: Sequence[float],
) -> None:
    """Writes the terms of one row, member by member, and the targets in the order in which terms first name them."""
    nodes, parents, logprobs = [], [], []
    for member, path in zip(row, paths, strict=True):
        trajectory = trajectories[member.which]
        learned = np.flatnonzero(trajectory.loss_mask)
        at = learned + len(trajectory.prompt_ids)
        nodes.append(path[at])
        parents.append(path[at - 1])
        sampled = np.asarray(trajectory.response_mask, bool)
        logprobs.append(np.where(sampled, np.asarray(trajectory.rollout_logprobs, np.float32), np.nan)[learned])
    counts = [len(part) for part in nodes]
    which = np.repeat([member.which for member in row], counts)
    terms = slice(0, len(which))
    node, parent = np.concatenate(nodes), np.concatenate(parents)
    first, target = _first_seen(node)
    targets = slice(0, len(first))
    arrays["target_parent"][index, targets] = parent[first]
    arrays["target_id"][index, targets] = arrays["token_ids"][index, node[first]]
    arrays["target_valid"][index, targets] = True
    arrays["term_target"][index, terms] = target
    arrays["advantage"][index, terms] = np.asarray(advantages, np.float32)[which]
    arrays["weight"][index, terms] = np.asarray(weights, np.float32)[which]
    arrays["rollout_logprob"][index, terms] = np.concatenate(logprobs)


def _first_seen(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each distinct value occurs first, in that order; and for every value its number in that order."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return first[order], number[inverse]
