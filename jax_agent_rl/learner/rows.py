"""Which sequences share a row: those with the longest common prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jax_agent_rl.learner.image_packing import ImagePacker


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
        rows[row].append(_member(which, sequence, rows[row], common))
        if packer:
            packer.add(which, row)
        row_of[which] = row
        nodes[row] += rows[row][-1].new
        row_terms[row] += terms[which]
    return rows


def _member(which: int, sequence: np.ndarray, row: list[Member], common: np.ndarray) -> Member:
    """Return the member; ``common`` int64 [which]: prefixes shared with every sequence before it."""
    shared = common[[member.which for member in row]] if row else np.zeros(1, np.int64)
    # The first of those that share most: what it shares with still earlier ones is shorter, so the node is its own.
    owner = int(shared.argmax())
    most = int(shared[owner])
    return Member(which=which, ids=sequence, common=most, owner=owner if most else -1)


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
