"""The trajectories of a group as one graph with shared prefixes.

A node is a sampled turn: two trajectories share it iff their ids are equal up to its end. Where a
branch left its parent in the middle of a turn (``Fork.tokens``), that turn is two nodes. A worked
example, ids as letters::

    t0 = a b c               t1: fork of t0, turns 1          t2: fork of t0, turns 1, tokens 1 (b = b' b")
    t1 = a d
    t2 = a b' e              nodes   a ─┬─ b' ─┬─ b" ─ c      paths   t0 = [0 1 2 3]
    t3 = f                   0       0  │  1   ├─ 2 ── 3              t1 = [0 4]
                                        │      └─ e ─ 5               t2 = [0 1 5]
                                        └─ d ─ 4                      t3 = [6]
                                     f ─ 6

Credit is assigned along it (``learner/advantages/estimators.py``), ``jax-agent-rl view --tree``
shows it, and the metrics of a step count it.

A trajectory of several contexts is a graph, too: :func:`timeline` has its turns in the order in
which they were sampled, :func:`session_graph` says which context left which, and where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from jax_agent_rl.types import Trajectory, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A turn, or the part of one between two forks.

    Attributes:
        parent: number of the node before it; None after a prompt.
        turn: which turn of its trajectories (of the segment, where those have segments).
        ids: its sampled ids.
        members: indices of the trajectories that go through it.
    """

    parent: int | None
    turn: int
    ids: tuple[int, ...]
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryGraph:
    """See the module docstring; build it with :meth:`of`.

    Attributes:
        trajectories: what it was made of.
        nodes: in the order in which the trajectories, one after another, come to them.
        paths: for each trajectory its nodes, through all its segments, in the order in which they
            were sampled.
        ends: for each trajectory where those nodes end in its response (that of all sequences, one
            after another): the position after the node's last id.
    """

    trajectories: tuple[Trajectory, ...]
    nodes: tuple[Node, ...]
    paths: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> TrajectoryGraph:
        """Build the graph of one group's trajectories (possibly none)."""
        cuts = {context for t in trajectories if (context := _fork_context(t))}
        numbers: dict[tuple[int, ...], int] = {}
        found: list[_Piece] = []
        members: list[list[int]] = []
        paths, ends = [], []
        for which, trajectory in enumerate(trajectories):
            path, end = [], []
            for piece in sorted(_laid_out(trajectory, cuts), key=lambda piece: piece.when):
                number = numbers.setdefault(piece.context, len(found))
                if number == len(found):
                    found.append(piece)
                    members.append([])
                if which not in members[number][-1:]:
                    members[number].append(which)
                path.append(number)
                end.append(piece.end)
            paths.append(tuple(path))
            ends.append(tuple(end))
        nodes = tuple(
            Node(
                parent=numbers.get(piece.before),
                turn=piece.turn,
                ids=piece.ids,
                members=tuple(through),
            )
            for piece, through in zip(found, members, strict=True)
        )
        return cls(
            trajectories=tuple(trajectories), nodes=nodes, paths=tuple(paths), ends=tuple(ends)
        )

    def parents_first(self) -> list[int]:
        """Return the nodes' numbers, each after its parent's.

        They mostly stand so; a recorded session may number its turns in another order than that of
        its contexts.
        """
        children: dict[int | None, list[int]] = {}
        for number, node in enumerate(self.nodes):
            children.setdefault(node.parent, []).append(number)
        order: list[int] = []
        waiting = children.get(None, [])[::-1]
        while waiting:
            number = waiting.pop()
            order.append(number)
            waiting += children.get(number, [])[::-1]
        return order


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One of the contexts that a session sampled in: a segment of its trajectory, or the last, the trajectory itself.

    Attributes:
        sequence: its ids.
        parent: place of the earlier context that begins with most of its ids; None if none begins
            with any.
        shared: how many ids they have in common.
        turns: how many of the parent's turns end within those.
    """

    sequence: Trajectory
    parent: int | None
    shared: int
    turns: int


def session_graph(trajectory: Trajectory) -> tuple[Segment, ...]:
    """Return the contexts of a trajectory in the order of their first turns, and where each left an earlier one."""
    found: list[Segment] = []
    for sequence in sorted((*trajectory.segments, trajectory), key=lambda s: _when(s.turns[0])):
        ids = sequence.prompt_ids + sequence.response_ids
        common = [_common(ids, c.sequence.prompt_ids + c.sequence.response_ids) for c in found]
        shared = max(common, default=0)
        parent = common.index(shared) if shared else None
        within = (
            0
            if parent is None
            else sum(end <= shared for end in _turn_ends(found[parent].sequence))
        )
        found.append(Segment(sequence=sequence, parent=parent, shared=shared, turns=within))
    return tuple(found)


def timeline(trajectory: Trajectory) -> list[tuple[int, Turn]]:
    """Return all turns in the order in which they were sampled.

    Each comes with the place where it begins in the response of all :attr:`~Trajectory.sequences`,
    one after another.
    """
    placed, at = [], 0
    for sequence in trajectory.sequences:
        for turn in sequence.turns:
            placed.append((at, turn))
            at += len(turn.output.token_ids) + len(turn.appended_ids)
    return sorted(placed, key=lambda place: _when(place[1]))


def inherited(contexts: Sequence[Trajectory]) -> list[int]:
    """Return for each context of a session how much of its prompt ends with a turn of another: ids, 0 for none."""
    ends = {
        whole[:end]
        for c in contexts
        for whole in (c.prompt_ids + c.response_ids,)
        for end in _turn_ends(c)
    }
    lengths = sorted(set(map(len, ends)), reverse=True)
    return [
        next((n for n in lengths if n < len(c.prompt_ids) and c.prompt_ids[:n] in ends), 0)
        for c in contexts
    ]


def _when(turn: Turn) -> int:
    """Return the key of a stable sort by time; turns without a number stand in order already."""
    return -1 if turn.number is None else turn.number


def _turn_ends(sequence: Trajectory) -> Iterator[int]:
    """Yield how many ids the sequence has up to the end of each turn."""
    at = len(sequence.prompt_ids)
    for turn in sequence.turns:
        yield at + len(turn.output.token_ids)
        at += len(turn.output.token_ids) + len(turn.appended_ids)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Sampled ids between two cuts: ``context`` is all up to their end, ``before`` up to the end of the node before."""

    before: tuple[int, ...]
    context: tuple[int, ...]
    turn: int
    ids: tuple[int, ...]
    end: int
    when: int


def _fork_context(trajectory: Trajectory) -> tuple[int, ...]:
    """Return all inherited ids of a branch that left its parent within a turn; else nothing."""
    fork = trajectory.fork
    if fork is None or not fork.tokens:
        return ()
    ids = trajectory.prompt_ids
    for turn in trajectory.turns[: fork.turns]:
        ids += turn.output.token_ids + turn.appended_ids
    return ids + trajectory.turns[fork.turns].output.token_ids[: fork.tokens]


def _laid_out(trajectory: Trajectory, cuts: set[tuple[int, ...]]) -> Iterator[_Piece]:
    lengths = sorted({len(cut) for cut in cuts})
    sequences, offset = trajectory.sequences, 0
    known = inherited(sequences) if trajectory.segments else [0] * len(sequences)
    for sequence, begun in zip(sequences, known, strict=True):
        whole = sequence.prompt_ids + sequence.response_ids
        prompt, at, before = (
            len(sequence.prompt_ids),
            len(sequence.prompt_ids),
            sequence.prompt_ids[:begun],
        )
        for number, turn in enumerate(sequence.turns):
            end = at + len(turn.output.token_ids)
            inner = [length for length in lengths if at < length < end and whole[:length] in cuts]
            for stop in (*inner, end):
                context = whole[:stop]
                yield _Piece(
                    before=before,
                    context=context,
                    turn=number,
                    ids=whole[at:stop],
                    end=offset + stop - prompt,
                    when=_when(turn),
                )
                before, at = context, stop
            at = end + len(turn.appended_ids)
        offset += len(sequence.response_ids)
