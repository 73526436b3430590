"""Trajectories in the terminal: text in which sampled and inserted tokens are distinguished."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from jax_agent_rl.observe.selection import Colour

SAMPLED = "bold green"
INSERTED = "cyan"
PROMPT = "dim"
LEGEND = "legend: [dim]prompt[/] · [bold green]«sampled by the policy»[/] · [cyan]inserted (tool results, template)[/]"

_CONTROLS = (*range(9), *range(11, 32), *range(127, 160))
_INVISIBLE = (0xAD, *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x206A), 0xFEFF)
"""Zero-width and direction characters; the page of ``jax-agent-rl report`` escapes the same ones."""
_SURROGATES = range(0xD800, 0xE000)  # no terminal takes them
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in (*_CONTROLS, *_INVISIBLE, *_SURROGATES)
}

_OUTLINE_WIDTH = 100
"""Characters of a message in :func:`outline`."""

Decode = Callable[[Sequence[int]], str]


COLOURS: dict[Colour, Callable[[Mapping[str, Any], int], str]] = {
    "mask": lambda record, at: SAMPLED,
    "logprob": lambda record, at: _of_logprob(record["rollout_logprobs"][at]),
    "advantage": lambda record, at: _of_advantage((record.get("advantages") or {at: None})[at]),
    "version": lambda record, at: _VERSIONS[record["policy_versions"][at] % len(_VERSIONS)],
    "gap": lambda record, at: _of_gap(record["rollout_logprobs"][at], (record.get("old_logprobs") or {at: None})[at]),
}
"""Styles of a sampled token: functions of the record and of the token's place in the response."""

LEGENDS: dict[Colour, str] = {
    "mask": LEGEND,
    "logprob": "legend: probability of «sampled» tokens  [green]over 0.9[/] · [yellow]over 0.5[/] · "
    "[dark_orange]over 0.1[/] · [bold red]less[/]",
    "advantage": "legend: advantage of «sampled» tokens  [bold blue]above 0, made likelier[/] · "
    "[bold dark_orange]below 0, made less likely[/] · [dim]0, or not trained on[/]",
    "version": "legend: a colour for each version of the weights that sampled «tokens»",
    "gap": "legend: nats between engine and learner on «sampled» tokens  [green]under 0.01[/] · [yellow]under 0.1[/] · "
    "[dark_orange]under 1[/] · [bold red]more[/] · [dim]not scored by the learner[/]",
}

_VERSIONS = ("blue", "dark_orange", "green", "red", "magenta", "cyan", "yellow", "white")


def _of_logprob(value: float) -> str:
    bounds = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"))
    return next((style for least, style in bounds if math.exp(value) > least), "bold red")


def _of_advantage(value: float | None) -> str:
    return "dim" if not value else "bold blue" if value > 0 else "bold dark_orange"


def _of_gap(engine: float, learner: float | None) -> str:
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

    Sampled spans stand in «guillemets» as well as in colour, so that they can be distinguished without colours, too.

    Args:
        record: see :func:`jax_agent_rl.observe.run_dir.trajectory_record`.
        decode: turns ids into text, special tokens included.
        title: heading; empty: the trajectory's id.
        whole_prompt: show the whole prompt instead of its end.
        colour: what the colour of sampled tokens shows, one of :data:`COLOURS`.
    """
    body = Text()
    prompt = visible(decode(record["prompt_ids"]))
    if not whole_prompt and len(prompt) > 240:
        prompt = "… " + prompt[-240:].lstrip()
    body.append(prompt, PROMPT)
    ids, mask, style_of = record["response_ids"], record["response_mask"], COLOURS[colour]
    for sampled, span in groupby(range(len(ids)), key=lambda at: mask[at]):
        if not sampled:
            body.append(visible(decode([ids[at] for at in span])), INSERTED)
            continue
        body.append("«", SAMPLED)
        for style, part in groupby(span, key=lambda at: style_of(record, at)):
            body.append(visible(decode([ids[at] for at in part])), style)
        body.append("»", SAMPLED)
    heading = Text(visible(title or record["trajectory_id"]))
    return Panel(Group(_facts(record), body), title=heading, title_align="left")


def outline(record: Mapping[str, Any], *, title: str) -> str:
    """Return the last request of a trajectory's prompt and what followed, one line per message."""
    messages = record["messages"]
    replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"][-len(record["turns"]) :]
    asked = max(0, replies[0] - 1) if replies else 0
    lines = [f"{title}: step {record['step']}, reward {record['reward']:.2f}, {record['trajectory_id']}"]
    for message in messages[asked:]:
        text = " ".join(visible(str(message.get("content") or "")).split())
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        text = " ".join([text, *(f"{call['name']}({call['arguments']})" for call in calls)]).strip()
        lines.append(
            f"  {message['role']:>9}  {text if len(text) <= _OUTLINE_WIDTH else text[: _OUTLINE_WIDTH - 1] + '…'}"
        )
    return "\n".join(lines)


def visible(text: str) -> str:
    """Escape control characters, direction marks and zero-width characters.

    Text of models, tools and rows must not control the terminal, nor hide or reorder its neighbours.
    """
    return text.translate(_ESCAPES)


def _facts(record: Mapping[str, Any]) -> Text:
    calls = [call for turn in record["turns"] for call in turn["tool_calls"]]
    failed = [call["error"] for call in calls if call["error"]]
    truth = (record["row"].get("reward_model") or {}).get("ground_truth")
    facts = (
        f"step {record['step']} ({record['split']})  reward {record['reward']:.2f}  truth {truth}  "
        f"turns {len(record['turns'])}  tool calls {len(calls)}"
        + (f" ({', '.join(failed)})" if failed else "")
        + f"  end {record['finish_reason']}  sampled {sum(record['response_mask'])} of "
        f"{len(record['response_ids'])} response tokens"
    )
    return Text(visible(facts), style="italic")


def best_and_worst(records: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the records of highest and lowest reward, the latest of each."""
    best = max(reversed(records), key=lambda r: r["reward"])
    worst = min(reversed(records), key=lambda r: r["reward"])
    return best, worst
