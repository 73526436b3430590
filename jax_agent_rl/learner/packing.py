"""Trajectories to packed rows (:class:`~jax_agent_rl.learner.batch.Batch`).

::

    sequences ─► assign_rows: each joins those with which it shares the longest prefix ─► nodes ─► targets and terms
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jax_agent_rl.learner.batch import TERMS_PER_TOKEN, UNKNOWN_EXPERT, Batch, Place, empty_rows
from jax_agent_rl.learner.image_packing import ImagePacker, ImagePacking
from jax_agent_rl.types import Support, Trajectory


def pack(
    trajectories: Sequence[Trajectory],
    *,
    pack_length: int,
    share_prefixes: bool = True,
    image_packing: ImagePacking | None = None,
    vocab_size: int | None = None,
    targets: Sequence[np.ndarray] | None = None,
) -> Batch:
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
    arrays = empty_rows(len(rows), pack_length)
    per_token = targets[0].shape[1:] if targets else ()
    scored = np.zeros((len(rows), pack_length, *per_token), np.int32) if per_token else None
    places: dict[int, Place] = {}
    located: list[tuple[int, int, np.ndarray]] = []  # row, number and nodes of each sequence
    supports: list[tuple[Support | None, ...]] = []
    for index, row in enumerate(rows):
        paths = _fill_nodes(arrays, index, row)
        located += [(index, member.which, path) for member, path in zip(row, paths, strict=True)]
        own = None if scored is None else scored[index]
        placed, of_targets = _fill_terms(arrays, index, row, paths, sequences, targets, own)
        places |= placed
        supports.append(of_targets)
    images = None
    if packer:
        images = packer.lay_out(arrays["token_ids"], arrays["positions"], located)
        arrays |= {name: packer.ids(arrays[name]) for name in ("token_ids", "target_id")}
    restricted = any(support is not None for row in supports for support in row)
    if restricted and vocab_size is None:
        raise ValueError("trajectories with supports are packed for a vocabulary; give its size")
    in_order = (places[which] for which in range(len(sequences)))
    return Batch(
        **arrays,
        terms={},
        places=tuple(tuple(next(in_order) for _ in trajectory.sequences) for trajectory in trajectories),
        images=images,
        routed_experts=_pack_routed(sequences, located, arrays["token_ids"].shape),
        supports=tuple(supports) if restricted else None,
        vocab_size=vocab_size or 0,
        candidates=None if scored is None else (scored, np.zeros(scored.shape, np.float32)),
    )


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


def _pack_routed(
    sequences: Sequence[Trajectory], paths: Iterable[tuple[int, int, np.ndarray]], rows: tuple[int, int]
) -> np.ndarray | None:
    """Return ``Batch.routed_experts``; None if no engine reported any.

    Sequences that share a node have one choice for it: that of the first sequence that knows one. They differ only
    where the engine computed a prefix more than once, and rounded differently.

    Args:
        sequences: of the batch.
        paths: row, number and nodes int64 [n] of each sequence.
        rows: R rows of T nodes.
    """
    reported = (turn.output.routed_experts for sequence in sequences for turn in sequence.turns)
    sizes = {routed.shape[1:] for routed in reported if routed is not None}
    if not sizes:
        return None
    (size,) = sizes  # one model made them all
    packed = np.full((*rows, *size), UNKNOWN_EXPERT, np.int16)
    for row, number, path in paths:
        for turn in sequences[number].turns:
            routed = turn.output.routed_experts
            if routed is None:
                continue
            nodes = path[routed.start : routed.end]
            fresh = packed[row, nodes, 0, 0] == UNKNOWN_EXPERT
            packed[row, nodes[fresh]] = np.reshape(routed.numbers, routed.shape)[: len(nodes)][fresh]
    return packed


# --- which sequences share a row --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A sequence in a row. Its first ``common`` ids stand there already; the others become a chain of new nodes.

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


def assign_rows(
    ids: Sequence[np.ndarray], terms: Sequence[int], length: int, room: int, share: bool, packer: ImagePacker | None
) -> list[list[Member]]:
    """Assign sequences to rows: each joins the row with room that shares most with it, the first of equals.

    Args:
        ids: of each sequence.
        terms: of each sequence.
        length: nodes of a row.
        room: terms of a row.
        share: share prefixes.
        packer: of images, if any.
    """
    count = len(ids)
    prefixes = Prefixes(ids) if share else None
    rows: list[list[Member]] = []
    row_of = np.zeros(count, np.int64)
    nodes, row_terms = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for which, sequence in enumerate(ids):
        common = prefixes.of(which)[:which] if prefixes else np.zeros(which, np.int64)
        shared = np.zeros(len(rows), np.int64)
        np.maximum.at(shared, row_of[:which], common)
        has_room = nodes[: len(rows)] + len(sequence) - shared <= length
        has_room &= row_terms[: len(rows)] + terms[which] <= room
        if packer:
            has_room &= packer.has_room(which, len(rows))
        if has_room.any():
            row = int(np.where(has_room, shared, -1).argmax())
        else:
            row = len(rows)
            rows.append([])
        with_members = common[[member.which for member in rows[row]]] if rows[row] else np.zeros(1, np.int64)
        # The first of those that share most: what it shares with still earlier ones is shorter, so the node is its own.
        owner = int(with_members.argmax())
        most = int(with_members[owner])
        rows[row].append(Member(which=which, ids=sequence, common=most, owner=owner if most else -1))
        if packer:
            packer.add(which, row)
        row_of[which] = row
        nodes[row] += rows[row][-1].new
        row_terms[row] += terms[which]
    return rows


class Prefixes:
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
