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
from jax_agent_rl.observe.report.command import RunData, decoder
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
from jax_agent_rl.utils.text import printable

SAMPLED = "bold green"
INSERTED = "cyan"
PROMPT = "dim"
LEGEND = (
    "legend: [dim]prompt[/] · [bold green]«sampled by the policy»[/] · [cyan]inserted (tool"
    " results, template)[/]"
)

_OUTLINE_WIDTH = 100  # characters of a message
_SNIPPET_WIDTH = 60  # characters of a turn

COLOURS: dict[Colour, Callable[[Mapping[str, Any], int], str]] = {
    "mask": lambda record, at: SAMPLED,
    "logprob": lambda record, at: _logprob_style(record["rollout_logprobs"][at]),
    "advantage": lambda record, at: _advantage_style((record.get("advantages") or {at: None})[at]),
    "version": lambda record, at: _VERSIONS[record["policy_versions"][at] % len(_VERSIONS)],
    "gap": lambda record, at: _gap_style(
        record["rollout_logprobs"][at], (record.get("old_logprobs") or {at: None})[at]
    ),
}
"""Styles of a sampled token: functions of the record and of the token's place in the response."""

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

_VERSIONS = ("blue", "dark_orange", "green", "red", "magenta", "cyan", "yellow", "white")


def _logprob_style(value: float) -> str:
    bounds = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"))
    return next((style for least, style in bounds if math.exp(value) > least), "bold red")


def _advantage_style(value: float | None) -> str:
    return "dim" if not value else "bold blue" if value > 0 else "bold dark_orange"


def _gap_style(engine: float, learner: float | None) -> str:
    if learner is None:
        return "dim"
    bounds = ((0.01, "green"), (0.1, "yellow"), (1.0, "dark_orange"))
    return next((style for most, style in bounds if abs(engine - learner) < most), "bold red")


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
    without colours, too.

    Args:
        record: see :func:`jax_agent_rl.observe.run_dir.trajectory_record`.
        decode: turns ids into text, special tokens included.
        title: heading; empty: the trajectory's id.
        whole_prompt: show the whole prompt instead of its end.
        colour: what the colour of sampled tokens shows, one of :data:`COLOURS`.
    """
    draw = functools.partial(_body, decode=decode, whole_prompt=whole_prompt, colour=colour)
    parts: list[RenderableType] = [_headline(record)]
    for context in contexts(record):
        for place, turn in enumerate(context["turns"]):
            if place and turn.get("note"):
                number = turn.get("number")
                name = f"turn {place + 1}" if number is None else f"call {number + 1}"
                parts.append(Text(printable(f"{name} was spliced: {turn['note']}"), "dim"))
    segments = session(record)
    if segments:
        parts.append(_session_tree(segments))
        for number, row in enumerate(segments, 1):
            parts += [
                Rule(f"segment {number}", align="left", style="dim"),
                draw(contexts(record)[row["at"]]),
            ]
    else:
        parts.append(draw(record))
    heading = Text(printable(title or record["trajectory_id"], one_line=True))
    return Panel(Group(*parts), title=heading, title_align="left")


def _body(record: Mapping[str, Any], decode: Decode, *, whole_prompt: bool, colour: Colour) -> Text:
    body = Text()
    prompt = printable(decode(record["prompt_ids"]))
    if not whole_prompt and len(prompt) > 240:
        prompt = "… " + prompt[-240:].lstrip()
    body.append(prompt, PROMPT)
    ids, mask, style_of = record["response_ids"], record["response_mask"], COLOURS[colour]
    for sampled, span in groupby(range(len(ids)), key=lambda at: mask[at]):
        if not sampled:
            body.append(printable(decode([ids[at] for at in span])), INSERTED)
            continue
        body.append("«", SAMPLED)
        for style, part in groupby(span, key=lambda at: style_of(record, at)):
            body.append(printable(decode([ids[at] for at in part])), style)
        body.append("»", SAMPLED)
    return body


def _session_tree(segments: Sequence[Mapping[str, Any]]) -> Tree:
    """Return the graph of a session, see :func:`~jax_agent_rl.observe.report.trajectories.session`."""
    tree = Tree(Text(f"{len(segments)} segments"), highlight=False)
    branches: list[Tree] = []
    for number, row in enumerate(segments, 1):
        label = Text(f"segment {number}", "bold")
        label.append(
            f"  calls {row['calls']}" if row["calls"] else f"  turns: {row['turns']}", "not bold"
        )
        label.append(f"  {row['trained']} trained tokens ({row['share']:.0%})", "not bold")
        if row["up"] >= 0:
            place = f"after turn {row['after']}" if row["after"] else "in the prompt"
            label.append(
                f"  leaves segment {row['up'] + 1} {place} (shared ids: {row['shared']})",
                "not bold cyan",
            )
        if row["note"]:
            label.append(printable(f": {row['note']}"), "not bold dim")
        branches.append((branches[row["up"]] if row["up"] >= 0 else tree).add(label))
    return tree


def outline(record: Mapping[str, Any], *, title: str) -> str:
    """Return the last request of a trajectory's prompt and what followed, one line per message."""
    messages = record["messages"]
    replies = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    replies = replies[-len(record["turns"]) :]
    asked = max(0, replies[0] - 1) if replies else 0
    lines = [
        f"{title}: step {record['step']}, reward {record['reward']:.2f}, truth {truth(record)}, "
        f"end {record['finish_reason']}, {record['trajectory_id']}"
    ]
    for message in messages[asked:]:
        words = str(message.get("content") or "").split()
        words += _written_calls(message.get("tool_calls"))
        text = printable(" ".join(words), one_line=True)
        if len(text) > _OUTLINE_WIDTH:
            text = text[: _OUTLINE_WIDTH - 1] + "…"
        lines.append(f"  {message.get('role')!s:>9}  {text}")
    return "\n".join(printable(line, one_line=True) for line in lines)


def _written_calls(calls: Any) -> list[str]:
    """Return calls of a message as text; a client may have sent anything in their place."""
    written = []
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            written.append(f"{function.get('name')}({function.get('arguments')})")
    return written


def _headline(record: Mapping[str, Any]) -> Text:
    calls = [call for turn in turns(record) for call in turn["tool_calls"]]
    failed = [call["error"] for call in calls if call["error"]]
    lost_requests = record["metrics"].get("lost_requests", 0.0)
    lost = f"  lost requests {lost_requests:g}" if lost_requests else ""
    facts = (
        f"step {record['step']} ({record['split']})  reward {record['reward']:.2f}  truth"
        f" {truth(record)}  turns {len(turns(record))}  tool calls {len(calls)}"
        + (f" ({', '.join(failed)})" if failed else "")
        + lost
        + f"  end {record['finish_reason']}  sampled"
        f" {sum(sum(part['response_mask']) for part in contexts(record))} of"
        f" {sum(len(part['response_ids']) for part in contexts(record))} response tokens"
    )
    return Text(printable(facts), style="italic")


def best_and_worst(records: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the records of highest and lowest reward, the latest of each, by a title; one where all are equal."""
    best: Mapping[str, Any] | None = None
    worst: Mapping[str, Any] | None = None
    for record in records:
        if best is None or record["reward"] >= best["reward"]:
            best = record
        if worst is None or record["reward"] <= worst["reward"]:
            worst = record
    if best is None or worst is None:
        return {}
    return {"every reward is the same": best} if best is worst else {"best": best, "worst": worst}


def render_group(records: Sequence[Mapping[str, Any]], decode: Decode) -> Tree:
    """Return one group, of :func:`~jax_agent_rl.observe.run_dir.trajectory_record`, as a tree for the terminal."""
    trajectories = [restore_trajectory(record) for record in records]
    graph = TrajectoryGraph.of(trajectories)
    total = sum(sequence.num_sampled for t in trajectories for sequence in t.sequences)
    shared = total - sum(len(node.ids) for node in graph.nodes)
    trees = {
        tree_id: number
        for number, tree_id in enumerate(dict.fromkeys(t.tree_id for t in trajectories), 1)
    }
    heading = Text(printable(records[0]["group_id"]), "bold")
    heading.append(
        f"  {len(records)} trajectories, {len(trees)} trees, mean reward {_mean(trajectories):.2f},"
        f" {shared} of {total} sampled tokens shared",
        "not bold",
    )
    tree = Tree(heading, highlight=False)
    ending: dict[int, list[Trajectory]] = {}
    for trajectory, path in zip(trajectories, graph.paths, strict=True):
        ending.setdefault(path[-1], []).append(trajectory)
    branches: dict[int | None, Tree] = {None: tree}
    for number in graph.parents_first():
        node = graph.nodes[number]
        members = [trajectories[which] for which in node.members]
        label = Text(f"turn {node.turn + 1}  {len(node.ids)} tokens  ")
        label.append(f"mean reward {_mean(members):.2f} of {len(members)}  ", "bold")
        for trajectory in ending.get(number, ()):
            which = f"{trajectory.trajectory_id} (tree {trees[trajectory.tree_id]})"
            label.append(printable(f"{which} {trajectory.finish_reason}  "), "cyan")
        label.append(_snippet(decode(node.ids)), "green")
        branches[number] = branches[node.parent].add(label)
    return tree


def _mean(trajectories: Sequence[Trajectory]) -> float:
    return sum(t.reward for t in trajectories) / len(trajectories)


def _snippet(text: str) -> str:
    line = printable(" ".join(text.split()), one_line=True)
    return line if len(line) <= _SNIPPET_WIDTH else line[: _SNIPPET_WIDTH - 2] + " …"


def view_run(
    data: RunData,
    wanted: TrajectoryFilter,
    *,
    sort: Sort,
    limit: int,
    whole_prompt: bool,
    trees: bool = False,
    colour: Colour = "mask",
) -> None:
    """Print up to ``limit`` trajectories of a run, or of its groups as trees.

    Unreadable parts of its folder are reported on stderr; without the run's tokenizer, ids are
    shown. All trajectories are read once, to find those that are shown; these are read again, one
    (of trees, one group) at a time.

    Args:
        data: the run, or a table of ``jax-agent-rl rollout``.
        wanted: filter of the trajectories.
        sort: their order.
        limit: largest number of trajectories or groups, at least 1.
        whole_prompt: show prompts whole.
        trees: show groups as trees of turns.
        colour: meaning of the colours, a key of :data:`COLOURS`.

    Raises:
        DataError: it contains no trajectories, or none that matches.
        ConfigError: an unknown ``sort`` or ``colour``, a tool error that the run does not have, or
            ``trees`` together with options that do not affect them.
    """
    if colour not in COLOURS:
        raise ConfigError(f"--color {colour!r}: choose one of {', '.join(COLOURS)}")
    if sort not in (sorts := get_args(Sort)):
        raise ConfigError(f"--sort {sort!r}: choose one of {', '.join(sorts)}")
    if trees:
        changed = {
            f"--sort {sort}": sort != "time",
            f"--color {colour}": colour != "mask",
            "--whole-prompt": whole_prompt,
        }
        if given := [option for option, is_changed in changed.items() if is_changed]:
            raise ConfigError(f"{', '.join(given)} has no effect on --tree; leave one of them out")
    notes = list(data.notes)
    decode = decoder(data.config, notes)
    search = _Search(data.trajectories, wanted, decode)
    shown = (
        search.last_groups(limit) if trees else [[number] for number in search.last(limit, sort)]
    )
    for note in (*notes, *data.trajectories.notes):
        print(f"note: {printable(note)}", file=sys.stderr)
    if not search.total:
        raise DataError(
            f"{data.name} contains no trajectories; give a run folder such as runs/quickstart, one"
            " of `eval`, or what `rollout` wrote"
        )
    wanted.require_tool_error_among(search.tool_errors)
    if not shown:
        raise DataError(f"no trajectory of {data.name} matches {wanted.describe()}")
    console = Console()
    if not trees:
        console.print(LEGENDS[colour], highlight=False)
    records = data.trajectories.read(number for numbers in shown for number in numbers)
    for numbers in shown:
        members = list(itertools.islice(records, len(numbers)))
        if trees:
            console.print(render_group(members, decode))
        else:
            console.print(render(members[0], decode, whole_prompt=whole_prompt, colour=colour))


class _Match(NamedTuple):
    number: int
    reward: float
    group: tuple[str, int, str]


_RANKS: dict[Sort, Callable[[_Match], Any]] = {
    "time": lambda match: match.number,
    "best": lambda match: (match.reward, match.number),
    "worst": lambda match: (-match.reward, match.number),
}
"""What is shown last ranks highest."""


class _Search:
    """Finds the trajectories that match; holds the numbers of those that will be shown, and no record.

    Attributes:
        total: how many trajectories were read.
        tool_errors: kinds of errors they have.
    """

    def __init__(self, records: RecordSource, wanted: TrajectoryFilter, decode: Decode) -> None:
        self._records = records
        self._wanted = wanted
        self._decode = decode
        self.total = 0
        self.tool_errors: set[str] = set()

    def last(self, limit: int, sort: Sort) -> list[int]:
        """Return the numbers of the last ``limit`` that match in an order; of equal rewards the later is last."""
        last = heapq.nlargest(limit, self._matches(), key=_RANKS[sort])
        return [match.number for match in reversed(last)]

    def last_groups(self, limit: int) -> list[list[int]]:
        """Return the numbers of those that match in the last ``limit`` groups; members of a group are adjacent."""
        groups: deque[list[int]] = deque(maxlen=limit)
        for _, members in groupby(self._matches(), key=lambda match: match.group):
            groups.append([match.number for match in members])
        return list(groups)

    def _matches(self) -> Iterator[_Match]:
        for number, record in enumerate(self._records):
            self.total += 1
            self.tool_errors.update(map(printable, tool_errors(record)))
            if self._wanted(record, self._decode):
                yield _Match(number=number, reward=record["reward"], group=group_of(record))
