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
from dataclasses import dataclass, field

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
        rollout_logprob, old_logprob: float32 [R, K].
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


@dataclass
class _Row:
    """One row while it is filled: a trie, and the trajectories in it as paths of node numbers."""

    share: bool
    parent: list[int] = field(default_factory=list)
    token: list[int] = field(default_factory=list)
    child: dict[tuple[int, int], int] = field(default_factory=dict)
    paths: list[tuple[int, list[int]]] = field(default_factory=list)
    terms: int = 0

    def common(self, ids: Sequence[int]) -> list[int]:
        """Nodes of the longest prefix of ``ids`` that is already in the row."""
        nodes: list[int] = []
        at = -1
        while self.share and len(nodes) < len(ids):
            found = self.child.get((at, ids[len(nodes)]))
            if found is None:
                break
            nodes.append(found)
            at = found
        return nodes

    def add(self, which: int, ids: Sequence[int], terms: int) -> None:
        path = self.common(ids)
        for token in ids[len(path) :]:
            at = path[-1] if path else -1
            node = len(self.token)
            self.parent.append(at)
            self.token.append(token)
            if self.share:
                self.child[at, token] = node
            path.append(node)
        self.paths.append((which, path))
        self.terms += terms

    def depth_first(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """New number, depth and subtree end (in new numbers) of every node."""
        count = len(self.token)
        children: list[list[int]] = [[] for _ in range(count)]
        roots = []
        for node, parent in enumerate(self.parent):
            (children[parent] if parent >= 0 else roots).append(node)
        number = np.zeros(count, np.int32)
        depth = np.zeros(count, np.int32)
        size = np.ones(count, np.int32)
        stack = roots[::-1]
        order = []
        while stack:
            node = stack.pop()
            number[node] = len(order)
            order.append(node)
            stack.extend(reversed(children[node]))
        for node in order:
            if self.parent[node] >= 0:
                depth[node] = depth[self.parent[node]] + 1
        for node in reversed(order):
            if self.parent[node] >= 0:
                size[self.parent[node]] += size[node]
        return number, depth, number + size


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
    rows: list[_Row] = []
    for which, trajectory in enumerate(trajectories):
        ids = trajectory.prompt_ids + trajectory.response_ids
        if len(ids) > row_length:
            raise ValueError(
                f"trajectory {trajectory.trajectory_id} has {len(ids)} tokens, a row {row_length}; "
                f"set learner.row_length >= {len(ids)}"
            )
        _choose(rows, ids, trajectory.num_sampled, row_length, share_prefixes).add(which, ids, trajectory.num_sampled)
    arrays = _empty_rows(len(rows), row_length)
    for index, row in enumerate(rows):
        _fill(arrays, index, row, trajectories, advantages, weights)
    tokens = sum(len(t.prompt_ids) + len(t.response_ids) for t in trajectories)
    return Batch(**arrays), Sharing(tokens=tokens, nodes=sum(len(row.token) for row in rows), rows=len(rows))


def _choose(rows: list[_Row], ids: Sequence[int], terms: int, length: int, share: bool) -> _Row:
    """The row with room that shares most with ``ids``; a new one if none has room."""
    best, best_common = None, -1
    for row in rows:
        common = len(row.common(ids))
        fits = len(row.token) + len(ids) - common <= length and row.terms + terms <= length * TERMS_PER_TOKEN
        if fits and common > best_common:
            best, best_common = row, common
    if best is None:
        best = _Row(share=share)
        rows.append(best)
    return best


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


def _fill(
    arrays: dict[str, np.ndarray],
    index: int,
    row: _Row,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    weights: Sequence[float],
) -> None:
    """Writes one finished row into the arrays."""
    number, depth, end = row.depth_first()
    arrays["token_ids"][index, number] = row.token
    arrays["positions"][index, number] = depth
    arrays["subtree_end"][index, number] = end
    target_of: dict[int, int] = {}
    term = 0
    for which, path in row.paths:
        trajectory = trajectories[which]
        begin = len(trajectory.prompt_ids)
        for offset, sampled in enumerate(trajectory.response_mask):
            if not sampled:
                continue
            node = path[begin + offset]
            target = target_of.setdefault(node, len(target_of))
            arrays["target_parent"][index, target] = number[path[begin + offset - 1]]
            arrays["target_id"][index, target] = row.token[node]
            arrays["target_valid"][index, target] = True
            arrays["term_target"][index, term] = target
            arrays["advantage"][index, term] = advantages[which]
            arrays["weight"][index, term] = weights[which]
            arrays["rollout_logprob"][index, term] = trajectory.rollout_logprobs[offset]
            term += 1
