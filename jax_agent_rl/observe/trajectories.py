"""Trajectories for people: text with sampled and inserted tokens told apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

SAMPLED = "bold green"
INSERTED = "cyan"
PROMPT = "dim"
LEGEND = "legend: [dim]prompt[/] · [bold green]«sampled by the policy»[/] · [cyan]inserted (tool results, template)[/]"

Decode = Callable[[Sequence[int]], str]


def render(record: Mapping[str, Any], decode: Decode, *, title: str = "", whole_prompt: bool = False) -> RenderableType:
    """One trajectory record (a line of ``trajectories.jsonl``) as a panel.

    Sampled spans stand in «guillemets» as well as in colour, so that they are told apart on paper too.

    Args:
        record: see :func:`jax_agent_rl.observe.metrics.trajectory_record`.
        decode: ids to text, special tokens kept.
        whole_prompt: show the whole prompt, not only its end.
    """
    body = Text()
    prompt = decode(record["prompt_ids"])
    if not whole_prompt and len(prompt) > 240:
        prompt = "… " + prompt[-240:].lstrip()
    body.append(prompt, PROMPT)
    pairs = zip(record["response_ids"], record["response_mask"], strict=True)
    for sampled, span in groupby(pairs, key=lambda pair: pair[1]):
        text = decode([token for token, _ in span])
        body.append(f"«{text}»" if sampled else text, SAMPLED if sampled else INSERTED)
    return Panel(Group(_facts(record), body), title=title or record["trajectory_id"], title_align="left")


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
    return Text(facts, style="italic")


def best_and_worst(records: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Highest and lowest reward; among equals the latest best and the latest worst."""
    best = max(reversed(records), key=lambda r: r["reward"])
    worst = min(reversed(records), key=lambda r: r["reward"])
    return best, worst
