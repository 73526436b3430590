"""Groups of trajectories as trees of turns: in the terminal (``jax-agent-rl view RUN --tree``) and in the report.

::

    train-3-0  6 trajectories, 2 trees, mean reward 0.50, 96 of 241 sampled tokens shared
    ├── turn 1  34 tokens  mean reward 0.67 of 3  <tool_call> {"name": "calculator" …
    │   ├── turn 2  9 tokens  mean reward 1.00 of 1  train-3-0-0 (tree 1) answer  The answer is 42.
    │   └── …
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.text import Text
from rich.tree import Tree

from jax_agent_rl.observe.trajectories import Decode, visible
from jax_agent_rl.trajectory_graph import TrajectoryGraph
from jax_agent_rl.types import FinishReason, Fork, StopReason, TokenOutput, Trajectory, Turn

_WIDTH = 60
SNIPPET = 160
"""Characters of a turn that a node of the report shows."""


def groups_of(records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Split records of ``trajectories.jsonl`` into groups, in their order; members of a group are adjacent."""
    return [list(group) for _, group in groupby(records, key=lambda r: (r["split"], r["step"], r["group_id"]))]


def render_group(records: Sequence[Mapping[str, Any]], decode: Decode) -> Tree:
    """Return one group as a tree for the terminal.

    Args:
        records: its trajectories, see :func:`jax_agent_rl.observe.run_dir.trajectory_record`.
        decode: turns ids into text.
    """
    trajectories = [trajectory_of(record) for record in records]
    graph = TrajectoryGraph.of(trajectories)
    total = sum(sequence.num_sampled for t in trajectories for sequence in t.sequences)
    shared = total - sum(len(node.ids) for node in graph.nodes)
    trees = {tree_id: number for number, tree_id in enumerate(dict.fromkeys(t.tree_id for t in trajectories), 1)}
    heading = Text(visible(records[0]["group_id"]), "bold")
    heading.append(
        f"  {len(records)} trajectories, {len(trees)} trees, mean reward {_mean(trajectories):.2f}, "
        f"{shared} of {total} sampled tokens shared",
        "not bold",
    )
    tree = Tree(heading, highlight=False)
    ending: dict[int, list[Trajectory]] = {}
    for trajectory, path in zip(trajectories, graph.paths, strict=True):
        ending.setdefault(path[-1], []).append(trajectory)
    branches: dict[int | None, Tree] = {None: tree}
    for number, node in enumerate(graph.nodes):
        members = [trajectories[which] for which in node.members]
        label = Text(f"turn {node.turn + 1}  {len(node.ids)} tokens  ")
        label.append(f"mean reward {_mean(members):.2f} of {len(members)}  ", "bold")
        for trajectory in ending.get(number, ()):
            which = f"{trajectory.trajectory_id} (tree {trees[trajectory.tree_id]})"
            label.append(visible(f"{which} {trajectory.finish_reason}  "), "cyan")
        label.append(_snippet(decode(node.ids)), "green")
        branches[number] = branches[node.parent].add(label)
    return tree


def trajectory_of(record: Mapping[str, Any]) -> Trajectory:
    """Restore a trajectory from its record: ids, rewards and forks."""
    return Trajectory.from_turns(
        prompt_ids=record["prompt_ids"],
        turns=list(_turns(record)),
        trajectory_id=record["trajectory_id"],
        group_id=record["group_id"],
        agent_name=record["agent_name"],
        finish_reason=FinishReason(record["finish_reason"]),
        reward=record["reward"],
        segments=tuple(trajectory_of(segment) for segment in record["segments"]),
        fork=Fork(**record["fork"]) if record["fork"] else None,
        history_window=record["history_window"],
    )


def _turns(record: Mapping[str, Any]) -> Iterator[Turn]:
    at = 0
    for turn in record["turns"]:
        end = at + turn["sampled"]
        output = TokenOutput(
            token_ids=tuple(record["response_ids"][at:end]),
            log_probs=tuple(record["rollout_logprobs"][at:end]),
            policy_versions=tuple(record["policy_versions"][at:end]),
            stop_reason=StopReason(turn["stop_reason"]),
            context_digest="",
        )
        at = end + turn["appended"]
        yield Turn(output=output, appended_ids=tuple(record["response_ids"][end:at]))


def _mean(trajectories: Sequence[Trajectory]) -> float:
    return sum(t.reward for t in trajectories) / len(trajectories)


def _snippet(text: str) -> str:
    line = visible(" ".join(text.split()))
    return line if len(line) <= _WIDTH else line[: _WIDTH - 2] + " …"


def forest(records: Sequence[Mapping[str, Any]], decode: Decode) -> dict[str, list[dict[str, Any]]]:
    """Return trees, by ``"<split>/<step>/<group id>"``, of groups with at least two trajectories, for the report.

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
