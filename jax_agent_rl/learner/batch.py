"""Trajectories to packed rows in which every common token is computed once.

A row is a forest of tokens in depth-first order. Trajectories that begin alike (one prompt, one few-shot prefix, one
tree of branches) share nodes; a node's position is its depth, and it attends to its ancestors::

    t1 = [10 11 20 21]      index          0  1  2  3  4
    t2 = [10 11 30]         token_ids     10 11 20 21 30
                            positions      0  1  2  3  2
                            subtree_end    5  5  4  4  5      i sees j  iff  j <= i < subtree_end[j]

With sharing off every trajectory is its own chain, and the same mask is that of a plain packed row.

What is trained on are *targets*, nodes of the loss mask (their log-prob is read at the parent), and *terms*, one per
such token and trajectory: several trajectories may have sampled the same token in the same context, each with its
own advantage.

The layout is made once; numbers about terms (advantages, weights, old log-probs) come and go between it and plain
per-trajectory arrays by :meth:`Batch.with_terms`, :meth:`Batch.gather_terms` and :meth:`Batch.gather_states`. A
trajectory with segments is packed as several sequences; its arrays are theirs, one after another.

For models with vision, placeholders of different images count as different ids until rows are made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jax_agent_rl.learner.image_packing import ImagePacker, ImagePacking, RowImages
from jax_agent_rl.learner.routed_experts import pack_routed
from jax_agent_rl.learner.rows import Member, assign_rows
from jax_agent_rl.learner.support_packing import RowSupports, row_supports
from jax_agent_rl.types import Support, Trajectory

TERMS_PER_TOKEN = 2  # room for terms in a row, per token of its length


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one sequence of a trajectory in the batch.

    Attributes:
        row: its row.
        terms: its terms in the row, in the order in which they were sampled.
        path: int64 [L + 1], nodes of the last prompt id and of every response id: the states before and after each.
    """

    row: int
    terms: slice
    path: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Batch:
    """R packed rows. Padding has term weight 0 and attends to itself only.

    Attributes:
        token_ids, positions, subtree_end: int32 [R, T], see the module docstring.
        copies: int32 [R, T], sequences a node stands for; 0 at padding.
        target_parent: int32 [R, M]: index of the node whose logits score the target.
        target_id: int32 [R, M].
        target_valid: bool [R, M]; valid targets come first.
        term_target: int32 [R, K]: index into the targets.
        term_sequence: int32 [R, K]: which of the row's sequences; terms of one are contiguous.
        terms: float32 [R, K] each, by name, 0 at padding. ``weight`` is what a term weighs in the loss; a term of
            weight 0 is not trained on.
        places: for each trajectory given to :func:`pack`, where its sequences lie.
        images: of the rows; None for a text model.
        routed_experts: int16 [R, T, L, k], experts of nodes by the engine's choice, -1 where unknown; None without any.
        supports: of the targets; None if no draw was restricted.
        candidates: int32 [R, M, k], ids to score at each target beside its own, and float32 [R, M, k], the log-probs
            that a reference gives them; None without any.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    subtree_end: np.ndarray
    copies: np.ndarray
    target_parent: np.ndarray
    target_id: np.ndarray
    target_valid: np.ndarray
    term_target: np.ndarray
    term_sequence: np.ndarray
    terms: Mapping[str, np.ndarray] = field(default_factory=dict)
    places: tuple[tuple[Place, ...], ...]
    images: RowImages | None = None
    routed_experts: np.ndarray | None = None
    supports: RowSupports | None = None
    candidates: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def with_terms(self, **values: Sequence[np.ndarray]) -> Batch:
        """Add named numbers of the terms: for each trajectory one per sampled token, [S], or several, [S, k]."""
        made = {name: self._scatter(per_trajectory) for name, per_trajectory in values.items()}
        return replace(self, terms={**self.terms, **made})

    def with_candidates(self, ids: Sequence[np.ndarray], logprobs: Sequence[np.ndarray]) -> Batch:
        """Add ids to score beside the sampled ones, and a reference's log-probs: [S, k] for each trajectory.

        They belong to a position: trajectories that share a target give it the same.
        """
        shape = (*self.target_id.shape, ids[0].shape[1])
        all_ids, all_logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for places, own_ids, own_logprobs in zip(self.places, ids, logprobs, strict=True):
            begin = 0
            for place in places:
                targets = self.term_target[place.row, place.terms]
                own = slice(begin, begin + len(targets))
                all_ids[place.row, targets], all_logprobs[place.row, targets] = own_ids[own], own_logprobs[own]
                begin = own.stop
        return replace(self, candidates=(all_ids, all_logprobs))

    def gather_terms(self, values: np.ndarray) -> list[np.ndarray]:
        """Gather numbers of terms [R, K, ...] into one float64 array [S, ...] per trajectory."""
        return [
            np.concatenate([values[place.row, place.terms] for place in places]).astype(np.float64)
            for places in self.places
        ]

    def gather_targets(self, values: np.ndarray) -> list[np.ndarray]:
        """Gather numbers of targets [R, M, ...] into one array [S, ...] per trajectory, for each of its terms."""
        return [
            np.concatenate([values[place.row, self.term_target[place.row, place.terms]] for place in places])
            for places in self.places
        ]

    def gather_states(self, values: np.ndarray) -> list[np.ndarray]:
        """Gather numbers of nodes [R, T] into float64 [L + 1] per trajectory: before every id, after the last."""
        return [
            np.concatenate([*(values[p.row, p.path[:-1]] for p in places), values[last.row, last.path[-1:]]]).astype(
                np.float64
            )
            for places in self.places
            for last in places[-1:]
        ]

    def micro_batches(self, rows: int, *, lengths: int = 1) -> Iterator[dict[str, np.ndarray]]:
        """Yield slices of exactly ``rows`` rows as arrays by name (terms: ``term_<name>``); the last is padded.

        Args:
            rows: of a slice.
            lengths: number of row lengths, evenly spaced: each slice has the shortest that holds its rows. Those of a
                vision model have their whole length.
        """
        arrays = {name: getattr(self, name) for name in _LAYOUT} | {f"term_{k}": v for k, v in self.terms.items()}
        if self.routed_experts is not None:
            arrays["routed_experts"] = self.routed_experts
        if self.candidates is not None:
            arrays |= {"target_candidates": self.candidates[0], "target_candidate_logprobs": self.candidates[1]}
        length = self.token_ids.shape[1]
        used = self._used() if lengths > 1 and self.images is None else None
        for begin in range(0, self.num_rows, rows):
            part = {name: value[begin : begin + rows] for name, value in arrays.items()}
            missing = rows - len(part["token_ids"])
            if missing:
                empty = _empty_rows(missing, length)
                nothing = {name: np.zeros((missing, *value.shape[1:]), value.dtype) for name, value in part.items()}
                part = {name: np.concatenate([value, (nothing | empty)[name]]) for name, value in part.items()}
            if used is not None:
                need = max(1, -(-int(used[begin : begin + rows].max()) * lengths // length))
                part = {name: value[:, : value.shape[1] // lengths * need] for name, value in part.items()}
            if self.supports:
                part |= self.supports.micro_batch(begin, rows, part["target_id"].shape[1])
            yield part | (self.images.micro_batch(begin, rows) if self.images else {})

    def _used(self) -> np.ndarray:
        """Return the length that each row's nodes, targets and terms need, int64 [R]."""
        nodes, targets = np.count_nonzero(self.copies, axis=1), np.count_nonzero(self.target_valid, axis=1)
        used = np.maximum(nodes, targets)
        for place in itertools.chain.from_iterable(self.places):
            used[place.row] = max(used[place.row], -(-place.terms.stop // TERMS_PER_TOKEN))
        return used

    def _scatter(self, per_trajectory: Sequence[np.ndarray]) -> np.ndarray:
        values = np.zeros((*self.term_target.shape, *np.shape(per_trajectory[0])[1:]), np.float32)
        for places, own in zip(self.places, per_trajectory, strict=True):
            begin = 0
            for place in places:
                end = begin + place.terms.stop - place.terms.start
                values[place.row, place.terms] = own[begin:end]
                begin = end
        return values


_LAYOUT = (
    "token_ids",
    "positions",
    "subtree_end",
    "copies",
    "target_parent",
    "target_id",
    "target_valid",
    "term_target",
    "term_sequence",
)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Savings of prefix sharing: ``tokens`` without it, ``nodes`` computed, ``rows`` used."""

    tokens: int
    nodes: int
    rows: int


def pack(
    trajectories: Sequence[Trajectory],
    *,
    pack_length: int,
    share_prefixes: bool = True,
    image_packing: ImagePacking | None = None,
    vocab_size: int | None = None,
    targets: Sequence[np.ndarray] | None = None,
) -> tuple[Batch, Sharing]:
    """Pack sequences into rows: each goes where it shares the longest prefix, else into the first row with room.

    Args:
        trajectories: in order.
        pack_length: tokens of a row.
        share_prefixes: compute common prefixes once.
        image_packing: how rows hold images; None for a text model.
        vocab_size: of the model; None if no draw was restricted.
        targets: of each trajectory, ids that are scored in place of its own ones, int32 [S], or, as the batch's
            candidates, [S, k]; none may have segments or supports.

    Raises:
        ValueError: a sequence is longer than a row (nothing is ever truncated), or has images of more patches; or
            there are supports, and no ``vocab_size``.
    """
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    for sequence in sequences:
        length = len(sequence.prompt_ids) + len(sequence.response_ids)
        if length > pack_length:
            raise ValueError(
                f"trajectory {sequence.trajectory_id} has {length} tokens, a row {pack_length}; "
                f"set learner.pack_length >= {length}"
            )
    packer = ImagePacker(image_packing, sequences) if image_packing else None
    ids = packer.keys if packer else [np.asarray(s.prompt_ids + s.response_ids, np.int32) for s in sequences]
    # Terms of one node may have other supports or ids: as many targets as terms then have to fit a row.
    own_targets = targets is not None or any(s.restricted for s in sequences)
    room = pack_length * (1 if own_targets else TERMS_PER_TOKEN)
    rows = assign_rows(ids, [sum(s.loss_mask) for s in sequences], pack_length, room, share_prefixes, packer)
    arrays = _empty_rows(len(rows), pack_length)
    per_token = targets[0].shape[1:] if targets else ()
    scored = np.zeros((len(rows), pack_length, *per_token), np.int32) if per_token else None
    places: dict[int, Place] = {}
    paths, supports = [], []
    for index, row in enumerate(rows):
        paths.append(_fill_nodes(arrays, index, row))
        own = None if scored is None else scored[index]
        placed, of_targets = _fill_terms(arrays, index, row, paths[-1], sequences, targets, own)
        places |= placed
        supports.append(of_targets)
    images = None
    if packer:
        members = [[member.which for member in row] for row in rows]
        images = packer.lay_out(arrays["token_ids"], arrays["positions"], members, paths)
        arrays |= {name: packer.ids(arrays[name]) for name in ("token_ids", "target_id")}
    nodes = sum(member.new for row in rows for member in row)
    in_order = (places[which] for which in range(len(sequences)))
    of_trajectories = tuple(tuple(next(in_order) for _ in trajectory.sequences) for trajectory in trajectories)
    located = [
        (index, m.which, path) for index, row in enumerate(rows) for m, path in zip(row, paths[index], strict=True)
    ]
    routed = pack_routed(sequences, located, arrays["token_ids"].shape)
    kept = row_supports(supports, vocab_size)
    made = None if scored is None else (scored, np.zeros(scored.shape, np.float32))
    batch = Batch(
        **arrays, terms={}, places=of_trajectories, images=images, routed_experts=routed, supports=kept, candidates=made
    )
    return batch, Sharing(tokens=sum(map(len, ids)), nodes=nodes, rows=len(rows))


def _empty_rows(rows: int, length: int) -> dict[str, np.ndarray]:
    """Layout of rows that hold nothing but padding."""
    nodes = ("token_ids", "positions", "copies", "target_parent", "target_id")
    terms = ("term_target", "term_sequence")
    return {
        **{name: np.zeros((rows, length), np.int32) for name in nodes},
        **{name: np.zeros((rows, length * TERMS_PER_TOKEN), np.int32) for name in terms},
        "subtree_end": np.tile(np.arange(1, length + 1, dtype=np.int32), (rows, 1)),
        "target_valid": np.zeros((rows, length), bool),
    }


def _fill_nodes(arrays: dict[str, np.ndarray], index: int, row: Sequence[Member]) -> list[np.ndarray]:
    """Write the nodes of one row, depth first; return each member's path as node numbers, int64 [n]."""
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
        arrays["copies"][index, paths[-1]] += 1
    return paths


def _subtree_sizes(row: Sequence[Member]) -> list[int]:
    """Nodes of each member's chain and of all that branches off it."""
    sizes = [member.new for member in row]
    for m in reversed(range(len(row))):  # an owner stands before those it owns
        if row[m].owner >= 0:
            sizes[row[m].owner] += sizes[m]
    return sizes


def _depth_first(row: Sequence[Member], branches: Sequence[Sequence[int]]) -> list[int]:
    """Return each member's first new node. A chain is followed to its end before its branches, deepest first."""
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
    row: Sequence[Member],
    paths: Sequence[np.ndarray],
    sequences: Sequence[Trajectory],
    targets: Sequence[np.ndarray] | None,
    scored: np.ndarray | None,
) -> tuple[dict[int, Place], tuple[Support | None, ...]]:
    """Write the terms of one row, member by member, and the targets in order of first use; also return their supports.

    Terms of one node that were drawn from different supports, or that score different ids, have a target each. If each
    scores k ids, ``target_id`` is the first of them, and all are written to ``scored`` [M, k].
    """
    places: dict[int, Place] = {}
    nodes, parents, ids, numbers = [], [], [], []
    supports: list[Support | None] = []
    count = 0
    for number, (member, path) in enumerate(zip(row, paths, strict=True)):
        sequence = sequences[member.which]
        at = np.flatnonzero(sequence.loss_mask) + len(sequence.prompt_ids)
        nodes.append(path[at])
        parents.append(path[at - 1])
        ids.append(arrays["token_ids"][index, path[at]] if targets is None else targets[member.which])
        drawn_from = sequence.supports
        supports += [drawn_from[i] for i in at - len(sequence.prompt_ids)]
        numbers.append(np.full(len(at), number))
        places[member.which] = Place(
            row=index,
            terms=slice(count, count + len(at)),
            path=path[len(sequence.prompt_ids) - 1 :],
        )
        count += len(at)
    node, parent, all_ids = np.concatenate(nodes), np.concatenate(parents), np.concatenate(ids)
    if targets is None:
        distinct = {support: number for number, support in enumerate(dict.fromkeys(supports))}
        kind = np.array([distinct[s] for s in supports], np.int64)
    else:
        axis = None if scored is None else 0
        node, kind = parent, np.unique(all_ids, axis=axis, return_inverse=True)[1].reshape(-1)
    first, target = _first_seen(node + arrays["token_ids"].shape[1] * kind)
    arrays["target_parent"][index, : len(first)] = parent[first]
    arrays["target_id"][index, : len(first)] = all_ids[first] if scored is None else all_ids[first, 0]
    if scored is not None:
        scored[: len(first)] = all_ids[first]
    arrays["target_valid"][index, : len(first)] = True
    arrays["term_target"][index, :count] = target
    arrays["term_sequence"][index, :count] = np.concatenate(numbers)
    return places, tuple(supports[i] for i in first)


def _first_seen(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first index of each distinct value, in that order, and every value's number in that order."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return first[order], number[inverse]
