"""Trajectories to packed rows (:class:`~jax_agent_rl.learner.batch.Batch`).

The groups of a step are first cut into mini-batches, one for each optimizer update of an epoch.

::

    sequences ─► assign_rows: each joins those that share its longest prefix ─► nodes
                                                                             ─► targets and terms
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.learner.batch import (
    TERMS_PER_TOKEN,
    UNKNOWN_EXPERT,
    Batch,
    PackedSequence,
    empty_rows,
)
from jax_agent_rl.learner.image_packing import ImagePacker, ImagePacking
from jax_agent_rl.types import Group, Support, Trajectory

Observed = Callable[[Trajectory], np.ndarray]
"""Returns the positions of observed ids in the response of one sequence, int64 [O]."""


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """The packed trajectories of one optimizer update.

    Attributes:
        members: their indices in the step.
    """

    batch: Batch
    members: slice


class BatchPacker:
    """Packs trajectories as a learner's configuration says.

    Args:
        images: how rows hold images; None for a text model.
        observed: see :func:`pack`; of mini-batches alone.
    """

    def __init__(
        self,
        config: LearnerConfig,
        images: ImagePacking | None,
        *,
        vocab_size: int,
        observed: Observed | None = None,
    ) -> None:
        self._config = config
        self._images = images
        self._vocab_size = vocab_size
        self._observed = observed

    def pack(
        self,
        trajectories: Sequence[Trajectory],
        *,
        targets: Sequence[np.ndarray] | None = None,
        observed: Observed | None = None,
    ) -> Batch:
        """Pack trajectories; for the arguments see :func:`pack`."""
        return pack(
            trajectories,
            pack_length=self._config.pack_length,
            share_prefixes=self._config.share_prefixes,
            image_packing=self._images,
            vocab_size=self._vocab_size,
            targets=targets,
            observed=observed,
        )

    def mini_batches(self, groups: Sequence[Group]) -> list[MiniBatch]:
        """Pack the trajectories of each optimizer update: whole prompts, in equal shares."""
        packed = []
        begin = 0
        for mini_groups in mini_batches(groups, self._config.num_minibatches):
            trajectories = [t for group in mini_groups for t in group.trajectories]
            end = begin + len(trajectories)
            batch = self.pack(trajectories, observed=self._observed)
            packed.append(MiniBatch(batch=batch, members=slice(begin, end)))
            begin = end
        return packed


def mini_batches(groups: Sequence[Group], num_minibatches: int) -> list[list[Group]]:
    """Split groups into optimizer updates.

    The numbers of groups, and so of prompts, differ by at most one; no update is empty.
    """
    num_updates = min(num_minibatches, len(groups))
    shares = np.array_split(np.arange(len(groups)), num_updates)
    return [[groups[number] for number in share] for share in shares]


def trained_lengths(
    groups: Sequence[Group],
    num_minibatches: int,
    *,
    masked: Collection[str],
    segment_weight: str,
) -> list[list[int]]:
    """Count, for each optimizer update, the trained tokens of each of its sequences.

    Args:
        num_minibatches: optimizer updates of an epoch.
        masked: ids of trajectories that are not trained on.
        segment_weight: ``algorithm.segment_weight``: a sequence is a whole ``session`` or one
            ``segment``.
    """
    updates = []
    for mini_groups in mini_batches(groups, num_minibatches):
        lengths = []
        for trajectory in (t for group in mini_groups for t in group.trajectories):
            if trajectory.trajectory_id in masked:
                continue
            if segment_weight == "session":
                lengths.append(sum(segment_lengths(trajectory)))
            else:
                lengths += segment_lengths(trajectory)
        updates.append(lengths)
    return updates


def segment_lengths(trajectory: Trajectory) -> list[int]:
    """Count the trained tokens of each sequence of a trajectory."""
    return [sum(sequence.loss_mask) for sequence in trajectory.sequences]


def pack(
    trajectories: Sequence[Trajectory],
    *,
    pack_length: int,
    share_prefixes: bool = True,
    image_packing: ImagePacking | None = None,
    vocab_size: int | None = None,
    targets: Sequence[np.ndarray] | None = None,
    observed: Observed | None = None,
) -> Batch:
    """Pack sequences into rows.

    Each goes where it shares the longest prefix, else into the first row with room.

    Args:
        trajectories: in order.
        pack_length: tokens of a row.
        share_prefixes: compute common prefixes once.
        image_packing: how rows hold images; None for a text model.
        vocab_size: of the model; None if no draw was restricted.
        targets: for each trajectory the ids that are scored in place of its own, int32 [S], or the
            candidates, int32 [S, k]. Then no trajectory may have segments or supports.
        observed: selects inserted ids that become targets without terms; None selects none.

    Raises:
        ValueError: a sequence is longer than a row (nothing is ever truncated), or its images have
            more patches; or there are supports, but no ``vocab_size``.
    """
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    for sequence in sequences:
        length = len(sequence.prompt_ids) + len(sequence.response_ids)
        if length > pack_length:
            raise ValueError(
                f"trajectory {sequence.trajectory_id} has {length} tokens, a row {pack_length};"
                f" set learner.pack_length >= {length}"
            )

    packer = ImagePacker(image_packing, sequences) if image_packing else None
    if packer is not None:
        ids = packer.keys
    else:
        ids = [np.asarray(s.prompt_ids + s.response_ids, np.int32) for s in sequences]

    observed_positions = []
    for sequence in sequences:
        positions = np.zeros(0, np.int64)
        if observed is not None:
            positions = observed(sequence)
        observed_positions.append(positions)

    num_terms = [sum(sequence.loss_mask) for sequence in sequences]
    max_terms = pack_length * TERMS_PER_TOKEN
    if targets is not None or any(sequence.restricted for sequence in sequences):
        # Terms of one node may differ in their supports or scored ids, and need a target each. Then
        # a row must have room for as many targets as terms and observed ids.
        max_terms = pack_length
        for number, positions in enumerate(observed_positions):
            num_terms[number] += len(positions)
    rows = assign_rows(ids, num_terms, pack_length, max_terms, share_prefixes, packer)

    arrays = empty_rows(len(rows), pack_length)
    candidate_ids = None
    if targets and targets[0].ndim > 1:
        shape = (len(rows), pack_length, *targets[0].shape[1:])
        candidate_ids = np.zeros(shape, np.int32)
    packed: dict[int, PackedSequence] = {}
    paths: list[tuple[int, int, np.ndarray]] = []  # row, number and nodes of each sequence
    supports: list[tuple[Support | None, ...]] = []
    for index, row in enumerate(rows):
        row_paths = _fill_nodes(arrays, index, row)
        for member, path in zip(row, row_paths, strict=True):
            paths.append((index, member.number, path))

        row_candidates = None if candidate_ids is None else candidate_ids[index]
        packed_in_row, row_supports = _fill_terms(
            arrays, index, row, row_paths, sequences, observed_positions, targets, row_candidates
        )
        packed |= packed_in_row
        supports.append(row_supports)

    images = None
    if packer is not None:
        images = packer.lay_out(arrays["token_ids"], arrays["positions"], paths)
        for name in ("token_ids", "target_id"):
            arrays[name] = packer.ids(arrays[name])

    is_restricted = any(support is not None for row in supports for support in row)
    if is_restricted and vocab_size is None:
        raise ValueError("trajectories with supports are packed for a vocabulary; give its size")

    candidates = None
    if candidate_ids is not None:
        candidates = (candidate_ids, np.zeros(candidate_ids.shape, np.float32))
    return Batch(
        **arrays,
        terms={},
        packed=_by_trajectory(packed, trajectories),
        images=images,
        routed_experts=_pack_routed(sequences, paths, arrays["token_ids"].shape),
        supports=tuple(supports) if is_restricted else None,
        vocab_size=vocab_size or 0,
        candidates=candidates,
    )


def _by_trajectory(
    packed: Mapping[int, PackedSequence],
    trajectories: Sequence[Trajectory],
) -> tuple[tuple[PackedSequence, ...], ...]:
    """Return each trajectory's packed sequences, which are numbered one after another."""
    grouped = []
    begin = 0
    for trajectory in trajectories:
        end = begin + len(trajectory.sequences)
        grouped.append(tuple(packed[number] for number in range(begin, end)))
        begin = end
    return tuple(grouped)


def _fill_nodes(
    arrays: dict[str, np.ndarray],
    index: int,
    row: Sequence[Member],
) -> list[np.ndarray]:
    """Write the nodes of one row, depth first.

    Returns:
        each member's path as node numbers, int64 [n].
    """
    branches: list[list[int]] = [[] for _ in row]  # members that each one owns
    for m, member in enumerate(row):
        if member.owner >= 0:
            branches[member.owner].append(m)
    sizes = _subtree_sizes(row)
    starts = _depth_first(row, branches)

    paths: list[np.ndarray] = []
    for m, member in enumerate(row):
        start = starts[m]
        end = start + member.num_new
        arrays["token_ids"][index, start:end] = member.ids[member.common :]
        arrays["positions"][index, start:end] = np.arange(member.common, len(member.ids))

        # The subtree of a node ends after the chain, and after every branch that leaves below it.
        subtree_end = np.full(member.num_new, end, np.int32)
        for branch in branches[m]:
            ancestors = row[branch].common - member.common
            subtree_end[:ancestors] += sizes[branch]
        arrays["subtree_end"][index, start:end] = subtree_end

        shared_path = np.zeros(0, np.int64)
        if member.common:
            shared_path = paths[member.owner][: member.common]
        path = np.concatenate([shared_path, np.arange(start, end)])
        paths.append(path)
        arrays["copies"][index, path] += 1
    return paths


def _subtree_sizes(row: Sequence[Member]) -> list[int]:
    """Return the number of nodes of each member's chain and of all that branches off it."""
    sizes = [member.num_new for member in row]
    for m in reversed(range(len(row))):  # an owner stands before those it owns
        owner = row[m].owner
        if owner >= 0:
            sizes[owner] += sizes[m]
    return sizes


def _depth_first(row: Sequence[Member], branches: Sequence[Sequence[int]]) -> list[int]:
    """Return each member's first new node.

    A chain is followed to its end before its branches, and the deepest branch comes first.
    """
    starts = [0] * len(row)
    num_nodes = 0
    stack = [m for m, member in enumerate(row) if member.owner < 0]
    stack.reverse()
    while stack:
        m = stack.pop()
        starts[m] = num_nodes
        num_nodes += row[m].num_new
        # The deepest branch, and of equals the first member, has to be on top of the stack.
        stack += sorted(branches[m], key=lambda branch: (row[branch].common, -branch))
    return starts


def _fill_terms(
    arrays: dict[str, np.ndarray],
    index: int,
    row: Sequence[Member],
    paths: Sequence[np.ndarray],
    sequences: Sequence[Trajectory],
    observed_positions: Sequence[np.ndarray],
    targets: Sequence[np.ndarray] | None,
    candidate_ids: np.ndarray | None,
) -> tuple[dict[int, PackedSequence], tuple[Support | None, ...]]:
    """Write the terms of one row, member by member, and its targets in the order of first use.

    Targets of observed ids follow, unless a term has the same.

    Terms of one node have a target each if they were drawn from different supports, or score
    different ids. If each scores k ids, ``target_id`` is the first of them, and all are written to
    ``candidate_ids`` [M, k].

    Returns:
        each packed sequence, by its number, and the support of each target.
    """
    packed: dict[int, PackedSequence] = {}
    node_parts = []
    parent_parts = []
    id_parts = []
    member_parts = []
    term_supports: list[Support | None] = []
    num_terms = 0
    for m, (member, path) in enumerate(zip(row, paths, strict=True)):
        sequence = sequences[member.number]
        prompt_len = len(sequence.prompt_ids)
        in_response = np.flatnonzero(sequence.loss_mask)
        nodes = path[prompt_len + in_response]
        node_parts.append(nodes)
        parent_parts.append(path[prompt_len + in_response - 1])
        if targets is None:
            id_parts.append(arrays["token_ids"][index, nodes])
        else:
            id_parts.append(targets[member.number])
        sequence_supports = sequence.supports
        term_supports += [sequence_supports[i] for i in in_response]
        member_parts.append(np.full(len(nodes), m))

        end = num_terms + len(nodes)
        packed[member.number] = PackedSequence(
            row=index,
            terms=slice(num_terms, end),
            path=path[prompt_len - 1 :],
            observed=np.zeros(0, np.int64),
        )
        num_terms = end

    # Behind the terms: what has a target but no term. Nothing restricted what was observed.
    for member, path in zip(row, paths, strict=True):
        positions = len(sequences[member.number].prompt_ids) + observed_positions[member.number]
        nodes = path[positions]
        node_parts.append(nodes)
        parent_parts.append(path[positions - 1])
        if len(nodes):
            id_parts.append(arrays["token_ids"][index, nodes])
        term_supports += [None] * len(nodes)

    node = np.concatenate(node_parts)
    parent = np.concatenate(parent_parts)
    ids = np.concatenate(id_parts)

    # Terms with equal keys share a target.
    pack_length = arrays["token_ids"].shape[1]
    if targets is None:
        number_of = {support: i for i, support in enumerate(dict.fromkeys(term_supports))}
        support_number = np.array([number_of[s] for s in term_supports], np.int64)
        key = node + pack_length * support_number
    else:
        axis = None if candidate_ids is None else 0
        _, ids_number = np.unique(ids, axis=axis, return_inverse=True)
        key = parent + pack_length * ids_number.reshape(-1)
    first_term, target = _first_seen(key)

    num_targets = len(first_term)
    target_ids = ids[first_term]
    if candidate_ids is not None:
        candidate_ids[:num_targets] = target_ids
        target_ids = target_ids[:, 0]
    arrays["target_parent"][index, :num_targets] = parent[first_term]
    arrays["target_id"][index, :num_targets] = target_ids
    arrays["target_valid"][index, :num_targets] = True
    arrays["term_target"][index, :num_terms] = target[:num_terms]
    arrays["term_sequence"][index, :num_terms] = np.concatenate(member_parts)

    begin = num_terms
    for member in row:
        end = begin + len(observed_positions[member.number])
        packed[member.number] = replace(packed[member.number], observed=target[begin:end])
        begin = end
    return packed, tuple(term_supports[term] for term in first_term)


def _first_seen(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give a number to each distinct value, in the order in which they occur.

    Returns:
        the first index of each distinct value, and the number of every value.
    """
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return first[order], number[inverse]


def _pack_routed(
    sequences: Sequence[Trajectory],
    paths: Iterable[tuple[int, int, np.ndarray]],
    rows: tuple[int, int],
) -> np.ndarray | None:
    """Return ``Batch.routed_experts``; None if no engine reported any.

    A node that several sequences share gets the choice of the first sequence that knows one. The
    choices differ only where the engine computed a prefix more than once, and rounded differently.

    Args:
        paths: row, number and nodes int64 [n] of each sequence.
        rows: R rows of T nodes.
    """
    sizes = set()
    for sequence in sequences:
        for turn in sequence.turns:
            if turn.output.routed_experts is not None:
                sizes.add(turn.output.routed_experts.shape[1:])
    if not sizes:
        return None
    (size,) = sizes  # layers and experts per token: one model made them all

    packed = np.full((*rows, *size), UNKNOWN_EXPERT, np.int16)
    for row, number, path in paths:
        for turn in sequences[number].turns:
            routed = turn.output.routed_experts
            if routed is None:
                continue
            nodes = path[routed.start : routed.end]
            experts = np.reshape(routed.numbers, routed.shape)[: len(nodes)]
            is_unknown = packed[row, nodes, 0, 0] == UNKNOWN_EXPERT
            packed[row, nodes[is_unknown]] = experts[is_unknown]
    return packed


# --- which sequences share a row ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A sequence in a row.

    Its first ``common`` ids are in the row already; the others become a chain of new nodes.

    Attributes:
        number: of the sequence in the batch.
        ids: int32 [n].
        common: length of the longest prefix that it shares with an earlier member.
        owner: index in the row of the member whose chain holds the last shared node; -1 if nothing
            is shared.
    """

    number: int
    ids: np.ndarray
    common: int
    owner: int

    @property
    def num_new(self) -> int:
        """Number of nodes that it adds to the row."""
        return len(self.ids) - self.common


def assign_rows(
    ids: Sequence[np.ndarray],
    num_terms: Sequence[int],
    pack_length: int,
    max_terms: int,
    share_prefixes: bool,
    packer: ImagePacker | None,
) -> list[list[Member]]:
    """Assign sequences to rows.

    Each joins the row that shares the longest prefix with it, the first one of equals, among those
    with room.

    Args:
        ids: of each sequence.
        num_terms: of each sequence.
        pack_length: nodes that a row has room for.
        max_terms: terms that a row has room for.
        share_prefixes: compute common prefixes once.
        packer: None without images.
    """
    prefixes = Prefixes(ids) if share_prefixes else None
    rows: list[list[Member]] = []
    row_of = np.zeros(len(ids), np.int64)
    row_nodes = np.zeros(len(ids), np.int64)  # there are no more rows than sequences
    row_terms = np.zeros(len(ids), np.int64)
    for number, sequence in enumerate(ids):
        # The prefix that it shares with each earlier sequence, and the longest in each row.
        common = np.zeros(number, np.int64)
        if prefixes is not None:
            common = prefixes.of(number)[:number]
        shared = np.zeros(len(rows), np.int64)
        np.maximum.at(shared, row_of[:number], common)

        has_room = row_nodes[: len(rows)] + len(sequence) - shared <= pack_length
        has_room &= row_terms[: len(rows)] + num_terms[number] <= max_terms
        if packer is not None:
            has_room &= packer.has_room(number, len(rows))

        if has_room.any():
            row = int(np.where(has_room, shared, -1).argmax())
        else:
            row = len(rows)
            rows.append([])
        member = _join(rows[row], number, sequence, common)
        rows[row].append(member)

        if packer is not None:
            packer.add(number, row)
        row_of[number] = row
        row_nodes[row] += member.num_new
        row_terms[row] += num_terms[number]
    return rows


def _join(row: Sequence[Member], number: int, ids: np.ndarray, common: np.ndarray) -> Member:
    """Return a sequence as the next member of a row.

    Args:
        row: its earlier members.
        number: of the sequence in the batch.
        common: int64, lengths of the prefixes that it shares with every earlier sequence.
    """
    longest = 0
    owner = -1
    for m, member in enumerate(row):
        # Of equals the first: with still earlier members it shares less, so the node is its own.
        if common[member.number] > longest:
            longest = int(common[member.number])
            owner = m
    return Member(number=number, ids=ids, common=longest, owner=owner)


class Prefixes:
    """Lengths of common prefixes between any sequence and all others.

    In lexicographic order, the common prefix of two sequences is the shortest one of all
    neighbours between them. So one running minimum to each side yields all lengths.
    """

    def __init__(self, ids: Sequence[np.ndarray]) -> None:
        keys = [sequence.astype(">i4").tobytes() for sequence in ids]
        self._order = np.asarray(sorted(range(len(ids)), key=keys.__getitem__), np.int64)
        self._rank = np.argsort(self._order)  # of each sequence in lexicographic order

        with_next = []
        for a, b in itertools.pairwise(self._order):
            with_next.append(_common_length(ids[a], ids[b]))
        self._with_next = np.asarray(with_next, np.int64)

    def of(self, number: int) -> np.ndarray:
        """Return the lengths for one sequence with all, int64 [N]; its own entry means nothing."""
        rank = self._rank[number]
        common = np.zeros(len(self._order), np.int64)
        after_it = self._order[rank + 1 :]
        before_it = self._order[:rank][::-1]
        common[after_it] = np.minimum.accumulate(self._with_next[rank:])
        common[before_it] = np.minimum.accumulate(self._with_next[:rank][::-1])
        return common


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    if not differs.any():
        return shorter
    return int(differs.argmax())
