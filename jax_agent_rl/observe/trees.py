"""Groups of trajectories as trees of turns, for people: ``jax-agent-rl view RUN --tree``.

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


def groups_of(records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Records of ``trajectories.jsonl`` by group, in their order; a group stands in one piece."""
    return [list(group) for _, group in groupby(records, key=lambda r: (r["split"], r["step"], r["group_id"]))]


def render_group(records: Sequence[Mapping[str, Any]], decode: Decode) -> Tree:
    """One group as a tree.

    Args:
        records: its trajectories, see :func:`jax_agent_rl.observe.metrics.trajectory_record`.
        decode: ids to text.
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
    """A record read back, as far as its ids, rewards and forks go."""
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
