"""Trajectories in the terminal: sampled and inserted text, outlines, and groups as trees of turns.

``jax-agent-rl view RUN --tree`` shows::

    train-3-0  6 trajectories, 2 trees, mean reward 0.50, 96 of 241 sampled tokens shared
    ├── turn 1  34 tokens  mean reward 0.67 of 3  <tool_call> {"name": "calculator" …
    │   ├── turn 2  9 tokens  mean reward 1.00 of 1  train-3-0-0 (tree 1) answer  The answer is 42.
    │   └── …
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, get_args

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text
from rich.tree import Tree

from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.observe.report.command import RunData
from jax_agent_rl.observe.report.trajectories import session
from jax_agent_rl.observe.run_dir import Decode, RecordSource, restore_trajectory
from jax_agent_rl.observe.selection import (
    Colour,
    Sort,
    TrajectoryFilter,
    contexts,
    group_of,
    tool_errors,
    truth,
    turns,
)
from jax_agent_rl.trajectory_graph import TrajectoryGraph
from jax_agent_rl.types import Trajectory
from jax_agent_rl.utils.text import counted, printable

SAMPLED = "bold green"
INSERTED = "cyan"
PROMPT = "dim"
LEGEND = (
    "legend: [dim]prompt[/] · [bold green]«sampled by the policy»[/] · [cyan]inserted (tool"
    " results, template)[/]"
)

_PROMPT_CHARS = 240  # of its end
_OUTLINE_WIDTH = 100  # characters of a message
_SNIPPET_WIDTH = 60  # characters of a turn

_VERSIONS = ("blue", "dark_orange", "green", "red", "magenta", "cyan", "yellow", "white")


def _logprob_style(record: Mapping[str, Any], index: int) -> str:
    # Compared as a log-prob: a damaged one may have no exponential.
    logprob = record["rollout_logprobs"][index]
    if logprob > math.log(0.9):
        return "green"
    if logprob > math.log(0.5):
        return "yellow"
    if logprob > math.log(0.1):
        return "dark_orange"
    return "bold red"


def _advantage_style(record: Mapping[str, Any], index: int) -> str:
    advantages = record.get("advantages")
    advantage = advantages[index] if advantages else None
    if not advantage:
        return "dim"
    return "bold blue" if advantage > 0 else "bold dark_orange"


def _version_style(record: Mapping[str, Any], index: int) -> str:
    return _VERSIONS[record["policy_versions"][index] % len(_VERSIONS)]


def _gap_style(record: Mapping[str, Any], index: int) -> str:
    old_logprobs = record.get("old_logprobs")
    learner = old_logprobs[index] if old_logprobs else None
    if learner is None:
        return "dim"
    gap = abs(record["rollout_logprobs"][index] - learner)
    if gap < 0.01:
        return "green"
    if gap < 0.1:
        return "yellow"
    if gap < 1.0:
        return "dark_orange"
    return "bold red"


COLOURS: dict[Colour, Callable[[Mapping[str, Any], int], str]] = {
    "mask": lambda record, index: SAMPLED,
    "logprob": _logprob_style,
    "advantage": _advantage_style,
    "version": _version_style,
    "gap": _gap_style,
}
"""Styles of a sampled token: functions of the record and of the token's index in the response."""

LEGENDS: dict[Colour, str] = {
    "mask": LEGEND,
    "logprob": (
        "legend: probability of «sampled» tokens  [green]over 0.9[/] · [yellow]over 0.5[/] · "
        "[dark_orange]over 0.1[/] · [bold red]less[/]"
    ),
    "advantage": (
        "legend: advantage of «sampled» tokens  [bold blue]above 0, made likelier[/] · "
        "[bold dark_orange]below 0, made less likely[/] · [dim]0, or not trained on[/]"
    ),
    "version": "legend: a colour for each version of the weights that sampled «tokens»",
    "gap": (
        "legend: nats between engine and learner on «sampled» tokens  [green]under 0.01[/] ·"
        " [yellow]under 0.1[/] · [dark_orange]under 1[/] · [bold red]more[/] · [dim]not scored by"
        " the learner[/]"
    ),
}


def render(
    record: Mapping[str, Any],
    decode: Decode,
    *,
    title: str = "",
    whole_prompt: bool = False,
    colour: Colour = "mask",
) -> RenderableType:
    """Return one trajectory record (a line of ``trajectories.jsonl``) as a panel.

    Sampled spans stand in «guillemets» as well as in colour, so that they can be distinguished
    without colours.

    Args:
        record: a record as :func:`jax_agent_rl.observe.run_dir.trajectory_record` returns it.
        decode: turns token ids into text, special tokens included.
        title: heading; the trajectory's id if empty.
        whole_prompt: show the complete prompt instead of its end.
        colour: what the colour of sampled tokens shows, one of :data:`COLOURS`.
    """
    draw = functools.partial(_body, decode=decode, whole_prompt=whole_prompt, colour=colour)
    parts: list[RenderableType] = [_headline(record)]

    for context in contexts(record):
        for index, turn in enumerate(context["turns"]):
            if index == 0 or not turn.get("note"):
                continue
            number = turn.get("number")
            name = f"turn {index + 1}" if number is None else f"call {number + 1}"
            parts.append(Text(printable(f"{name} was spliced: {turn['note']}"), "dim"))

    segments = session(record)
    if segments:
        parts.append(_session_tree(segments))
        for number, row in enumerate(segments, 1):
            parts.append(Rule(f"segment {number}", align="left", style="dim"))
            parts.append(draw(contexts(record)[row["at"]]))
    else:
        parts.append(draw(record))

    heading = Text(printable(title or record["trajectory_id"], one_line=True))
    return Panel(Group(*parts), title=heading, title_align="left")


def _body(record: Mapping[str, Any], decode: Decode, *, whole_prompt: bool, colour: Colour) -> Text:
    """Return the text of a record's prompt and response."""
    body = Text()
    prompt = printable(decode(record["prompt_ids"]))
    if not whole_prompt and len(prompt) > _PROMPT_CHARS:
        prompt = "… " + prompt[-_PROMPT_CHARS:].lstrip()
    body.append(prompt, PROMPT)

    ids = record["response_ids"]
    mask = record["response_mask"]
    style_of = COLOURS[colour]
    for is_sampled, span in groupby(range(len(ids)), key=lambda index: mask[index]):
        if not is_sampled:
            body.append(printable(decode([ids[index] for index in span])), INSERTED)
            continue
        body.append("«", SAMPLED)
        for style, part in groupby(span, key=lambda index: style_of(record, index)):
            body.append(printable(decode([ids[index] for index in part])), style)
        body.append("»", SAMPLED)
    return body


def _session_tree(segments: Sequence[Mapping[str, Any]]) -> Tree:
    """Return the graph of a session as a tree.

    Args:
        segments: rows as :func:`~jax_agent_rl.observe.report.trajectories.session` returns them.
    """
    tree = Tree(Text(counted(len(segments), "segment")), highlight=False)
    branches: list[Tree] = []

    for number, row in enumerate(segments, 1):
        label = Text(f"segment {number}", "bold")
        if row["calls"]:
            label.append(f"  calls {row['calls']}", "not bold")
        else:
            label.append(f"  turns: {row['turns']}", "not bold")
        label.append(
            f"  {counted(row['trained'], 'trained token')} ({row['share']:.0%})", "not bold"
        )

        parent = tree
        if row["up"] >= 0:
            parent = branches[row["up"]]
            position = f"after turn {row['after']}" if row["after"] else "in the prompt"
            label.append(
                f"  leaves segment {row['up'] + 1} {position} (shared ids: {row['shared']})",
                "not bold cyan",
            )

        if row["note"]:
            label.append(printable(f": {row['note']}"), "not bold dim")
        branches.append(parent.add(label))
    return tree


def outline(record: Mapping[str, Any], *, title: str) -> str:
    """Return the last request of a trajectory's prompt and what followed, one line per message."""
    messages = record["messages"]
    replies = []
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            replies.append(index)
    replies = replies[-len(record["turns"]) :]  # earlier ones belong to the prompt
    request = max(0, replies[0] - 1) if replies else 0

    lines = [
        f"{title}: step {record['step']}, reward {record['reward']:.2f}, truth {truth(record)}, "
        f"end {record['finish_reason']}, {record['trajectory_id']}"
    ]
    for message in messages[request:]:
        words = str(message.get("content") or "").split()
        words += _format_calls(message.get("tool_calls"))
        text = printable(" ".join(words), one_line=True)
        if len(text) > _OUTLINE_WIDTH:
            text = text[: _OUTLINE_WIDTH - 1] + "…"
        lines.append(f"  {message.get('role')!s:>9}  {text}")
    return "\n".join(printable(line, one_line=True) for line in lines)


def _format_calls(calls: Any) -> list[str]:
    """Return calls of a message as text; a client may have sent anything in their place."""
    if not isinstance(calls, list | tuple):
        return []
    texts = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            texts.append(f"{function.get('name')}({function.get('arguments')})")
    return texts


def _headline(record: Mapping[str, Any]) -> Text:
    """Return a record's line of facts."""
    call_count = sum(len(turn["tool_calls"]) for turn in turns(record))
    errors = tool_errors(record)
    sampled_tokens = sum(sum(context["response_mask"]) for context in contexts(record))
    response_tokens = sum(len(context["response_ids"]) for context in contexts(record))
    lost_requests = record["metrics"].get("lost_requests", 0.0)

    calls = f"tool calls {call_count}"
    if errors:
        calls += f" ({', '.join(errors)})"
    facts = [
        f"step {record['step']} ({record['split']})",
        f"reward {record['reward']:.2f}",
        f"truth {truth(record)}",
        f"turns {len(turns(record))}",
        calls,
    ]
    if lost_requests:
        facts.append(f"lost requests {lost_requests:g}")
    if record["metrics"].get("program_timeout"):
        facts.append("program ran out of time")
    if record["metrics"].get("program_error"):
        facts.append("program failed")
    facts.append(f"end {record['finish_reason']}")
    facts.append(f"sampled {sampled_tokens} of {counted(response_tokens, 'response token')}")
    return Text(printable("  ".join(facts)), style="italic")


def best_and_worst(records: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the records of highest and lowest reward, by a title.

    The latest one counts where several have the same reward. If all rewards are equal, there is
    one record.
    """
    best: Mapping[str, Any] | None = None
    worst: Mapping[str, Any] | None = None
    for record in records:
        if best is None or record["reward"] >= best["reward"]:
            best = record
        if worst is None or record["reward"] <= worst["reward"]:
            worst = record
    if best is None or worst is None:
        return {}
    if best is worst:
        return {"every reward is the same": best}
    return {"best": best, "worst": worst}


def render_group(records: Sequence[Mapping[str, Any]], decode: Decode) -> Tree:
    """Return one group as a tree of turns for the terminal.

    Args:
        records: records as :func:`~jax_agent_rl.observe.run_dir.trajectory_record` returns them.
        decode: turns token ids into text, special tokens included.
    """
    trajectories = [restore_trajectory(record) for record in records]
    graph = TrajectoryGraph.of(trajectories)

    sampled_tokens = 0
    tree_numbers: dict[str, int] = {}  # from 1, by tree id
    for trajectory in trajectories:
        sampled_tokens += sum(sequence.num_sampled for sequence in trajectory.sequences)
        tree_numbers.setdefault(trajectory.tree_id, len(tree_numbers) + 1)
    shared_tokens = sampled_tokens - sum(len(node.ids) for node in graph.nodes)

    heading = Text(printable(records[0]["group_id"]), "bold")
    heading.append(
        f"  {counted(len(records), 'trajectory')}, {counted(len(tree_numbers), 'tree')},"
        f" mean reward {_mean(trajectories):.2f},"
        f" {shared_tokens} of {counted(sampled_tokens, 'sampled token')} shared",
        "not bold",
    )
    tree = Tree(heading, highlight=False)

    ending: dict[int, list[Trajectory]] = {}  # trajectories by the node of their last turn
    for trajectory, path in zip(trajectories, graph.paths, strict=True):
        ending.setdefault(path[-1], []).append(trajectory)

    branches: dict[int | None, Tree] = {None: tree}
    for number in graph.parents_first():
        node = graph.nodes[number]
        members = [trajectories[index] for index in node.members]
        label = Text(f"turn {node.turn + 1}  {counted(len(node.ids), 'token')}  ")
        label.append(f"mean reward {_mean(members):.2f} of {len(members)}  ", "bold")
        for trajectory in ending.get(number, ()):
            name = f"{trajectory.trajectory_id} (tree {tree_numbers[trajectory.tree_id]})"
            label.append(printable(f"{name} {trajectory.finish_reason}  "), "cyan")
        label.append(_snippet(decode(node.ids)), "green")
        branches[number] = branches[node.parent].add(label)
    return tree


def _mean(trajectories: Sequence[Trajectory]) -> float:
    return sum(trajectory.reward for trajectory in trajectories) / len(trajectories)


def _snippet(text: str) -> str:
    line = printable(" ".join(text.split()), one_line=True)
    if len(line) <= _SNIPPET_WIDTH:
        return line
    return line[: _SNIPPET_WIDTH - 2] + " …"


def view_run(
    data: RunData,
    trajectory_filter: TrajectoryFilter,
    *,
    sort: Sort,
    limit: int,
    whole_prompt: bool,
    trees: bool = False,
    colour: Colour = "mask",
) -> None:
    """Print up to ``limit`` trajectories of a run, or of its groups as trees.

    Unreadable parts of its folder are reported on stderr; without the run's tokenizer, token ids
    are shown. All trajectories are read once, to find those that are shown; these are read again,
    one trajectory at a time, or one group for trees.

    Args:
        data: the run, or a table of ``jax-agent-rl rollout``.
        sort: order of the trajectories.
        limit: largest number of trajectories or groups, at least 1.
        whole_prompt: show complete prompts instead of their ends.
        trees: show groups as trees of turns.
        colour: meaning of the colours, a key of :data:`COLOURS`.

    Raises:
        DataError: the run contains no trajectories, or none that matches.
        ConfigError: an unknown ``sort`` or ``colour``, a tool error that the run does not have, or
            ``trees`` together with options that do not affect trees.
    """
    if colour not in COLOURS:
        raise ConfigError(f"--color {colour!r}: choose one of {', '.join(COLOURS)}")
    if sort not in get_args(Sort):
        raise ConfigError(f"--sort {sort!r}: choose one of {', '.join(get_args(Sort))}")
    if trees:
        options = []
        if sort != "time":
            options.append(f"--sort {sort}")
        if colour != "mask":
            options.append(f"--color {colour}")
        if whole_prompt:
            options.append("--whole-prompt")
        if options:
            raise ConfigError(
                f"{', '.join(options)} has no effect on --tree; leave one of them out"
            )

    notes = list(data.notes)
    decode = data.open_decoder(notes)
    search = _Search(data.trajectories, trajectory_filter, decode)
    if trees:
        groups = search.last_groups(limit)
    else:
        groups = [[number] for number in search.last(limit, sort)]

    for note in (*notes, *data.trajectories.notes):
        print(f"note: {printable(note)}", file=sys.stderr)
    if not search.total:
        raise DataError(
            f"{data.name} contains no trajectories; give a run folder such as runs/quickstart, one"
            " of `eval`, or what `rollout` wrote"
        )
    trajectory_filter.require_tool_error_among(search.tool_errors)
    if not groups:
        raise DataError(f"no trajectory of {data.name} matches {trajectory_filter.describe()}")

    console = Console()
    if not trees:
        console.print(LEGENDS[colour], highlight=False)
    records = data.trajectories.read(itertools.chain.from_iterable(groups))
    for numbers in groups:
        members = list(itertools.islice(records, len(numbers)))
        if trees:
            console.print(render_group(members, decode))
        else:
            console.print(render(members[0], decode, whole_prompt=whole_prompt, colour=colour))
    if not trees and search.matching > len(groups):
        left_out = f"{len(groups)} of {search.matching} trajectories"
        console.print(f"{left_out}; --limit {search.matching} shows all", highlight=False)


class _Match(NamedTuple):
    number: int
    reward: float
    group: tuple[str, int, str]


_RANKS: dict[Sort, Callable[[_Match], Any]] = {
    "time": lambda match: match.number,
    "best": lambda match: (match.reward, match.number),
    "worst": lambda match: (-match.reward, match.number),
}
"""Ranks of matches in an order: the match that is shown last ranks highest."""


class _Search:
    """Finds the trajectories that match; holds numbers of trajectories, and no record.

    Attributes:
        total: number of trajectories that were read.
        tool_errors: kinds of errors that they have.
    """

    def __init__(
        self, records: RecordSource, trajectory_filter: TrajectoryFilter, decode: Decode
    ) -> None:
        self._records = records
        self._filter = trajectory_filter
        self._decode = decode
        self.total = 0
        self.matching = 0
        self.tool_errors: set[str] = set()

    def last(self, limit: int, sort: Sort) -> list[int]:
        """Return the numbers of the last ``limit`` matches in an order.

        Of equal rewards, the later one is last.
        """
        matches = heapq.nlargest(limit, self._matches(), key=_RANKS[sort])
        return [match.number for match in reversed(matches)]

    def last_groups(self, limit: int) -> list[list[int]]:
        """Return the numbers of the matches in the last ``limit`` groups.

        Members of a group are adjacent.
        """
        groups: deque[list[int]] = deque(maxlen=limit)
        for _, members in groupby(self._matches(), key=lambda match: match.group):
            groups.append([match.number for match in members])
        return list(groups)

    def _matches(self) -> Iterator[_Match]:
        for number, record in enumerate(self._records):
            self.total += 1
            for error in tool_errors(record):
                self.tool_errors.add(printable(error))
            if self._filter(record, self._decode):
                self.matching += 1
                yield _Match(number=number, reward=record["reward"], group=group_of(record))
