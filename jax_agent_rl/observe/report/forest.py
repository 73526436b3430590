"""Groups as trees of turns, for the page; see :mod:`jax_agent_rl.trajectory_graph`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax_agent_rl.observe.trajectories import Decode
from jax_agent_rl.observe.trees import trajectory_of
from jax_agent_rl.trajectory_graph import TrajectoryGraph

SNIPPET = 160
"""Characters of a turn that a node shows."""


def forest(records: Sequence[Mapping[str, Any]], decode: Decode) -> dict[str, list[dict[str, Any]]]:
    """Trees by group, ``"<split>/<step>/<group id>"``, of groups with at least two trajectories.

    A node is ``{up: number of its parent or -1, turn, n: sampled tokens, at: its trajectories, ends: those that end
    there, text}``; trajectories are numbers of records.
    """
    groups: dict[str, list[int]] = {}
    for number, record in enumerate(records):
        groups.setdefault(f"{record['split']}/{record['step']}/{record['group_id']}", []).append(number)
    return {
        name: _nodes([records[n] for n in numbers], numbers, decode)
        for name, numbers in groups.items()
        if len(numbers) > 1
    }


def _nodes(records: Sequence[Mapping[str, Any]], numbers: Sequence[int], decode: Decode) -> list[dict[str, Any]]:
    graph = TrajectoryGraph.of([trajectory_of(record) for record in records])
    ends: dict[int, list[int]] = {}
    for number, path in zip(numbers, graph.paths, strict=True):
        ends.setdefault(path[-1], []).append(number)
    return [
        {
            "up": -1 if node.parent is None else node.parent,
            "turn": node.turn + 1,
            "n": len(node.ids),
            "at": [numbers[member] for member in node.members],
            "text": decode(node.ids[:SNIPPET])[:SNIPPET],
        }
        | ({"ends": ends[place]} if place in ends else {})
        for place, node in enumerate(graph.nodes)
    ]
