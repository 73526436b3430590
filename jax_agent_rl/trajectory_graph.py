"""The trajectories of a group as one graph with shared prefixes.

A node is a sampled turn: two trajectories share it iff their ids are equal up to its end. Where a
branch left its parent in the middle of a turn (``Fork.tokens``), that turn is two nodes. A worked
example, ids as letters::

    t0 = a b c        t1: fork of t0, turns 1        t2: fork of t0, turns 1, tokens 1 (b = b' b")
    t1 = a d
    t2 = a b' e       nodes   a ─┬─ b' ─┬─ b" ─ c    paths   t0 = [0 1 2 3]
    t3 = f                    0  │  1   ├─ 2 ── 3            t1 = [0 4]
                                 │      └─ e ─ 5             t2 = [0 1 5]
                                 └─ d ─ 4                    t3 = [6]
                              f ─ 6

Credit is assigned along it (``learner/advantages/estimators.py``), ``jax-agent-rl view --tree``
shows it, and the metrics of a step count it.

A trajectory of several contexts is a graph as well: :func:`timeline` has its turns in the order in
which they were sampled, :func:`session_graph` says which context left which, and where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_agent_rl.types import Trajectory, Turn
from jax_agent_rl.types.sequences import common_prefix_length


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
        trajectories: of one group.
        nodes: in the order in which the trajectories, one after another, come to them.
        paths: for each trajectory its nodes, through all its segments, in the order in which they
            were sampled.
        ends: for each trajectory where those nodes end in its response (of all sequences, one after
            another): the position after the node's last id.
    """

    trajectories: tuple[Trajectory, ...]
    nodes: tuple[Node, ...]
    paths: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> TrajectoryGraph:
        """Build the graph of one group's trajectories (possibly none)."""
        fork_contexts = set()
        for trajectory in trajectories:
            fork_context = _fork_context(trajectory)
            if fork_context:
                fork_contexts.add(fork_context)

        # All ids up to a node's end identify it: the first trajectory with them adds the node.
        numbers: dict[tuple[int, ...], int] = {}
        pieces: list[_Piece] = []
        members: list[list[int]] = []
        paths = []
        ends = []
        for index, trajectory in enumerate(trajectories):
            path = []
            path_ends = []
            in_order = sorted(_pieces(trajectory, fork_contexts), key=lambda piece: piece.sort_key)
            for piece in in_order:
                number = numbers.setdefault(piece.context, len(pieces))
                if number == len(pieces):
                    pieces.append(piece)
                    members.append([])
                if index not in members[number][-1:]:
                    members[number].append(index)
                path.append(number)
                path_ends.append(piece.end)
            paths.append(tuple(path))
            ends.append(tuple(path_ends))

        nodes = []
        for piece, piece_members in zip(pieces, members, strict=True):
            node = Node(
                parent=numbers.get(piece.parent_context),
                turn=piece.turn,
                ids=piece.ids,
                members=tuple(piece_members),
            )
            nodes.append(node)
        return cls(
            trajectories=tuple(trajectories),
            nodes=tuple(nodes),
            paths=tuple(paths),
            ends=tuple(ends),
        )

    def parents_first(self) -> list[int]:
        """Return the nodes' numbers, each after its parent's.

        They mostly are in this order; a recorded session may number its turns in another order than
        its contexts.
        """
        children: dict[int | None, list[int]] = {}
        for number, node in enumerate(self.nodes):
            children.setdefault(node.parent, []).append(number)

        # Depth first; the stack is reversed so that children come in their order.
        order: list[int] = []
        stack = children.get(None, [])[::-1]
        while stack:
            number = stack.pop()
            order.append(number)
            stack += children.get(number, [])[::-1]
        return order


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One of the contexts that a session sampled in.

    It is a segment of the session's trajectory or, for the last context, the trajectory itself.

    Attributes:
        sequence: the segment or the trajectory.
        parent: index of the earlier context that begins with most of its ids; None if none begins
            with any.
        shared: how many ids they have in common.
        turns: how many of the parent's turns end within those.
    """

    sequence: Trajectory
    parent: int | None
    shared: int
    turns: int


def session_graph(trajectory: Trajectory) -> tuple[Segment, ...]:
    """Return the contexts of a trajectory, and where each left an earlier one.

    They are in the order of their first turns.
    """
    sequences = (*trajectory.segments, trajectory)
    in_order = sorted(sequences, key=lambda sequence: _sort_key(sequence.turns[0]))

    segments: list[Segment] = []
    for sequence in in_order:
        ids = _all_ids(sequence)
        shared_lengths = []
        for earlier in segments:
            shared_lengths.append(common_prefix_length(ids, _all_ids(earlier.sequence)))
        shared = max(shared_lengths, default=0)

        parent = None
        num_turns = 0
        if shared:
            parent = shared_lengths.index(shared)
            for end in _turn_ends(segments[parent].sequence):
                if end <= shared:
                    num_turns += 1
        segments.append(Segment(sequence=sequence, parent=parent, shared=shared, turns=num_turns))
    return tuple(segments)


def timeline(trajectory: Trajectory) -> list[tuple[int, Turn]]:
    """Return all turns in the order in which they were sampled.

    Each comes with the position where it begins in the response of all
    :attr:`~Trajectory.sequences`, one after another.
    """
    turns = []
    start = 0
    for sequence in trajectory.sequences:
        for turn in sequence.turns:
            turns.append((start, turn))
            start += len(turn.output.token_ids) + len(turn.appended_ids)
    return sorted(turns, key=lambda start_and_turn: _sort_key(start_and_turn[1]))


def inherited(contexts: Sequence[Trajectory]) -> list[int]:
    """Return for each context of a session how many ids of its prompt another one sampled first.

    These are the prompt's ids up to the last end of a turn of another context; 0 if there is none.
    """
    turn_contexts = set()
    for context in contexts:
        ids = _all_ids(context)
        for end in _turn_ends(context):
            turn_contexts.add(ids[:end])
    lengths = sorted({len(ids) for ids in turn_contexts}, reverse=True)

    counts = []
    for context in contexts:
        prompt_ids = context.prompt_ids
        count = 0
        for length in lengths:
            if length < len(prompt_ids) and prompt_ids[:length] in turn_contexts:
                count = length
                break
        counts.append(count)
    return counts


def _all_ids(sequence: Trajectory) -> tuple[int, ...]:
    return sequence.prompt_ids + sequence.response_ids


def _sort_key(turn: Turn) -> int:
    """Return the key of a stable sort by time; turns without a number are in order already."""
    return -1 if turn.number is None else turn.number


def _turn_ends(sequence: Trajectory) -> Iterator[int]:
    """Yield how many ids the sequence has up to the end of each turn."""
    start = len(sequence.prompt_ids)
    for turn in sequence.turns:
        yield start + len(turn.output.token_ids)
        start += len(turn.output.token_ids) + len(turn.appended_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Sampled ids between two cuts: a node as one trajectory comes to it.

    Attributes:
        parent_context: all ids up to the end of the node before it.
        context: all ids up to its end.
        turn: which turn of its sequence.
        ids: its sampled ids.
        end: the position after its last id in the response of all sequences.
        sort_key: orders pieces by time.
    """

    parent_context: tuple[int, ...]
    context: tuple[int, ...]
    turn: int
    ids: tuple[int, ...]
    end: int
    sort_key: int


def _fork_context(trajectory: Trajectory) -> tuple[int, ...]:
    """Return all inherited ids of a branch that left its parent within a turn; else nothing."""
    fork = trajectory.fork
    if fork is None or not fork.tokens:
        return ()

    ids = trajectory.prompt_ids
    for turn in trajectory.turns[: fork.turns]:
        ids += turn.output.token_ids + turn.appended_ids
    return ids + trajectory.turns[fork.turns].output.token_ids[: fork.tokens]


def _pieces(trajectory: Trajectory, fork_contexts: set[tuple[int, ...]]) -> Iterator[_Piece]:
    """Yield the sampled ids of a trajectory, sequence by sequence, cut at its turns and at forks.

    Args:
        fork_contexts: all ids up to each fork within a turn, of the whole group.
    """
    fork_lengths = sorted({len(context) for context in fork_contexts})
    sequences = trajectory.sequences
    if trajectory.segments:
        inherited_counts = inherited(sequences)
    else:
        inherited_counts = [0] * len(sequences)

    offset = 0  # of the sequence, in the response of all sequences
    for sequence, inherited_count in zip(sequences, inherited_counts, strict=True):
        ids = _all_ids(sequence)
        prompt_length = len(sequence.prompt_ids)
        parent_context = sequence.prompt_ids[:inherited_count]
        start = prompt_length
        for number, turn in enumerate(sequence.turns):
            turn_end = start + len(turn.output.token_ids)
            ends = []
            for length in fork_lengths:
                if start < length < turn_end and ids[:length] in fork_contexts:
                    ends.append(length)
            ends.append(turn_end)

            for end in ends:
                context = ids[:end]
                yield _Piece(
                    parent_context=parent_context,
                    context=context,
                    turn=number,
                    ids=ids[start:end],
                    end=offset + end - prompt_length,
                    sort_key=_sort_key(turn),
                )
                parent_context = context
                start = end
            start = turn_end + len(turn.appended_ids)
        offset += len(sequence.response_ids)
