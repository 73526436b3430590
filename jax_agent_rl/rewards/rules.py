"""Rewards by rule: exact final answers, and for ``shop/*`` part of the reward for the way there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from jax_agent_rl.errors import RewardError
from jax_agent_rl.rewards.registry import register_reward
from jax_agent_rl.rewards.text import MAX_CHARS
from jax_agent_rl.types import FinishReason, Trajectory

# "1,234.50": commas only where they separate thousands, so "3, 4" is two numbers. A minus right after a word or a
# closing parenthesis is a subtraction or a hyphen ("10-3"), not a sign.
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-−])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\d))?"
)
# What a + follows is never given back: two stretches of white space side by side would share them out in every way.
_MARKED = re.compile(r"####\s*+(-?)\$?\s*+((?:\d[\d,]*)?\.?\d+)")


def last_number(text: str) -> Decimal | None:
    """The last number of a text, thousands separators removed; None if it has none.

    >>> last_number("12 x 100 is 1,200.0")
    Decimal('1200.0')
    """
    found = _NUMBER.findall(text[-MAX_CHARS:])
    return _decimal(found[-1]) if found else None


def marked_number(text: str) -> Decimal | None:
    """The number after the last ``####``, GSM8K's answer marker; None if there is none.

    >>> marked_number("9 + 9 = 18 eggs. #### 18")
    Decimal('18')
    """
    found = _MARKED.findall(text[-MAX_CHARS:])
    return _decimal("".join(found[-1])) if found else None


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("−", "-"))


@register_reward("calculator")
def calculator(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """1 if the last number of the final answer equals the truth; 0 for a trajectory that never answered."""
    if extra_info.get("finish_reason", FinishReason.ANSWER) != FinishReason.ANSWER:
        return 0.0
    return float(last_number(solution_str) == _truth(ground_truth, data_source))


SHOP_CALLS = 0.5
"""Reward of a shop trajectory that made all its calls and then answered wrongly."""


@register_reward("shop/*")
def shop(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    trajectory: Trajectory,
    results: Sequence[str],
) -> dict[str, float]:
    """1 for the right answer; else a share of :data:`SHOP_CALLS` for the calls that led towards it.

    Args:
        results: what the calls that the question takes return, in their order. A call counts if it returned the next
            of them.

    Returns:
        ``score``, and ``accuracy``: whether the answer is right.
    """
    right = calculator(data_source, solution_str, ground_truth, extra_info)
    made = 0
    for call in trajectory.tool_calls:
        made += made < len(results) and call.error is None and call.observation == results[made]
    return {"score": right or SHOP_CALLS * made / len(results), "accuracy": right}


@register_reward("gsm8k", "openai/gsm8k")
def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """1 if the number after ``####`` equals the truth.

    ``extra_info["answer_format"]`` ``"flexible"`` takes the last number of the answer where no ``####`` is written;
    the default ``"strict"`` does not.
    """
    answer = marked_number(solution_str)
    if answer is None and extra_info.get("answer_format", "strict") == "flexible":
        answer = last_number(solution_str)
    return float(answer == _truth(ground_truth, data_source))


def _truth(ground_truth: Any, data_source: str) -> Decimal:
    number = last_number(str(ground_truth))
    if number is None:
        raise RewardError(f"ground_truth of a {data_source!r} row must hold a number, got {ground_truth!r}")
    return number


@register_reward("environment")
def environment(turn_scores: Sequence[float]) -> float:
    """The return of the episode: everything the environment gave, turn by turn."""
    return float(sum(turn_scores))
