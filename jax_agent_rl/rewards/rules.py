r"""Rule-based rewards: extracted answers, compared as numbers, mathematics or words.

What an environment or a task's tests gave is a reward by rule as well. What the policy only thought
is not an answer: every extraction reads the text outside think blocks
(:func:`jax_agent_rl.chat.thinking.answer_of`).

Mathematical answers are compared by value with math-verify (extra ``math``): ``0.5``, ``1/2`` and
``\frac12`` are equal. That runs in worker processes (:mod:`jax_agent_rl.rewards.workers`), with a
time limit.

Answers of open-domain question answering are the content of the last ``<answer>…</answer>``,
compared by exact match and F1 with SQuAD's normalization. Their truth is a string, a list of
accepted strings, or ``{"target": …}`` with one of these, as in search-agent data sets.
"""

from __future__ import annotations

import os
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from jax_agent_rl.chat.thinking import answer_of, began_inside
from jax_agent_rl.errors import RewardError
from jax_agent_rl.rewards.registry import register_reward
from jax_agent_rl.rewards.workers import PROGRAM, WorkerPool
from jax_agent_rl.trajectory_graph import timeline
from jax_agent_rl.types import FinishReason, Trajectory

MAX_CHARS = 1 << 18
"""Number of characters, from the end of a solution, that a rule reads; bounds its time."""

_BRACE = re.compile(r"[{}]")
# "1,234.50": commas only where they separate thousands, so "3, 4" is two numbers. A minus right
# after a word or a closing parenthesis is a subtraction or a hyphen ("10-3"), not a sign.
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-−])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\d))?"
)
# Possessive quantifiers: adjacent runs of white space would otherwise backtrack in quadratic time.
_MARKED = re.compile(r"####\s*+(-?)\$?\s*+((?:\d[\d,]*)?\.?\d+)")


def tagged(text: str, tag: str = "answer") -> str | None:
    """Return the stripped content of the last ``<tag>…</tag>`` of an answer, or None.

    ``think`` is looked for in the whole text, other tags outside think blocks.

    >>> tagged("<answer> 3 </answer> no: <answer>4</answer>")
    '4'
    """
    if tag != "think":
        text = answer_of(text)
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    if start < 0:
        return None
    return text[start + len(f"<{tag}>") : end].strip()


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{…}``, or None if there is none.

    Braces within it are balanced; a box that does not close counts as none.

    >>> boxed(r"so \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    text = answer_of(text)
    box = text.rfind("\\boxed{")
    if box < 0:
        return None

    start = box + len("\\boxed{")
    depth = 1
    for brace in _BRACE.finditer(text, start, start + MAX_CHARS):
        if brace[0] == "{":
            depth += 1
        else:
            depth -= 1
        if depth == 0:
            return text[start : brace.start()]
    return None


def has_format(text: str, tags: Sequence[str] = ("think", "answer")) -> bool:
    """Return whether the text is one block of each tag, in this order.

    Only white space may stand around them. A first block of ``think`` may lack its opening tag:
    many prompts end with it.

    >>> has_format("<think>2 + 2</think> <answer>4</answer>"), has_format("4 <answer>4</answer>")
    (True, False)
    """
    if tags[0] == "think" and began_inside(text):
        text = f"<think>{text}"

    patterns = []
    for tag in tags:
        if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return False
        patterns.append(f"<{re.escape(tag)}>.*</{re.escape(tag)}>")
    blocks = r"\s*".join(patterns)
    return re.fullmatch(rf"\s*{blocks}\s*", text, re.DOTALL) is not None


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, without thousands separators, or None.

    >>> last_number("12 x 100 is 1,200.0")
    Decimal('1200.0')
    """
    numbers = _NUMBER.findall(answer_of(text)[-MAX_CHARS:])
    if not numbers:
        return None
    return _decimal(numbers[-1])


def marked_number(text: str) -> Decimal | None:
    """Return the number after the last ``####``, GSM8K's answer marker, or None.

    >>> marked_number("9 + 9 = 18 eggs. #### 18")
    Decimal('18')
    """
    numbers = _MARKED.findall(answer_of(text)[-MAX_CHARS:])
    if not numbers:
        return None
    sign, digits = numbers[-1]
    return _decimal(sign + digits)


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("−", "-"))


@register_reward("calculator")
def calculator(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """Score 1 if the last number of the final answer equals the truth, else 0.

    A trajectory that ended without a final answer scores 0.
    """
    if extra_info.get("finish_reason", FinishReason.ANSWER) != FinishReason.ANSWER:
        return 0.0
    return float(last_number(solution_str) == _truth(ground_truth, data_source))


SHOP_CALLS = 0.5
"""Reward of a shop trajectory that made all its calls but answered wrongly."""
REPEATED_CALL = 0.1
"""Cost of a call that repeats an earlier one and its result."""


@register_reward("shop/*")
def shop(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    trajectory: Trajectory,
    results: Sequence[str],
) -> dict[str, float | list[float]]:
    """Score 1 for the right answer, else a share of :data:`SHOP_CALLS` for the calls towards it.

    ``results`` are the expected results of the question's calls, in order; a call counts if it
    returned the next one. Each repeated call costs :data:`REPEATED_CALL`, down to a score of 0.

    Returns:
        ``score``; ``accuracy``: whether the answer is right; ``progress``: the score of the calls
        up to the end of every turn.
    """
    accuracy = calculator(data_source, solution_str, ground_truth, extra_info)

    next_result = 0
    calls = []
    penalty = 0.0
    progress = []
    for _, turn in timeline(trajectory):
        for call in turn.tool_calls:
            if call.error is not None:
                continue
            calls.append((call.name, str(call.arguments), call.observation))
            if next_result < len(results) and call.observation == results[next_result]:
                next_result += 1
        penalty = REPEATED_CALL * (len(calls) - len(set(calls)))
        earned = SHOP_CALLS * next_result / len(results)
        progress.append(max(0.0, earned - penalty))

    score = progress[-1]
    if accuracy:
        score = max(0.0, accuracy - penalty)
    return {"score": score, "accuracy": accuracy, "progress": progress}


@register_reward("gsm8k", "openai/gsm8k")
def gsm8k(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """Score 1 if the number after ``####`` equals the truth, else 0.

    Without ``####``, ``extra_info["answer_format"] = "flexible"`` takes the last number; the
    default is ``"strict"``.
    """
    answer = marked_number(solution_str)
    if answer is None and extra_info.get("answer_format", "strict") == "flexible":
        answer = last_number(solution_str)
    return float(answer == _truth(ground_truth, data_source))


def _truth(ground_truth: Any, data_source: str) -> Decimal:
    number = last_number(str(ground_truth))
    if number is None:
        raise RewardError(
            f"ground_truth of a {data_source!r} row must hold a number, got {ground_truth!r}"
        )
    return number


SECONDS = 5
"""Time limit of each of: parsing the truth, parsing the answer, comparing them."""

POOL = WorkerPool(PROGRAM, size=max(1, min(4, (os.cpu_count() or 1) // 2)), purpose="math-verify")


@register_reward(
    "math",
    "math_dapo",
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "numina_*",
    "aime*",
)
def math_equal(solution_str: str, ground_truth: Any) -> dict[str, float]:
    r"""Score 1 if the answer equals the truth in LaTeX, else 0.

    The answer is the content of the last ``\boxed{…}``, else the last formula or number. The part
    ``answered`` says whether the answer holds any mathematics.
    """
    # The last of several boxes counts; math-verify would take all.
    box = boxed(solution_str)
    if box is None:
        solution = answer_of(solution_str)
    else:
        solution = f"\\boxed{{{box}}}"

    request = {"solution": solution, "truth": str(ground_truth), "seconds": SECONDS}
    # Twice the three time limits: a worker may have to become free, and to start.
    answer = POOL.ask(request, timeout=6.0 * SECONDS)
    return {"score": answer["score"], "answered": float(bool(answer["extracted"]))}


@register_reward("command")
@register_reward("harbor")
def command(agent_output: Mapping[str, Any] | None = None) -> float:
    """Return the reward that the task's tests gave.

    Raises:
        RewardError: the row's agent is neither ``command`` nor ``harbor``, or its task has no
            tests.
    """
    if agent_output is None or "reward" not in agent_output:
        raise RewardError(
            "data_source 'command', or 'harbor', is for rows whose agent has that name and whose"
            " task has tests"
        )
    return float(agent_output["reward"])


@register_reward("inspect")
def inspect_task(
    agent_output: Mapping[str, Any] | None = None, scorer: str | None = None
) -> dict[str, float]:
    """Return what the first scorer of an Inspect task gave, or the one that the row names.

    All numbers of its scorers are parts. A trajectory that a limit ended before its solver did
    gets 0.

    Raises:
        RewardError: the row's agent is not ``inspect``, or the scorer gave nothing.
    """
    if agent_output is None:
        return {"score": 0.0, "scored": 0.0}
    scores = agent_output.get("scores") if isinstance(agent_output, Mapping) else None
    if not isinstance(scores, Mapping):
        raise RewardError("data_source 'inspect' is for rows whose agent is 'inspect'")
    name = scorer or next(iter(scores), "")
    if name not in scores:
        raise RewardError(
            f"the Inspect task's scorers gave no {name!r}; they gave {sorted(scores)}"
        )
    return {**scores, "score": scores[name], "scored": 1.0}


@register_reward("environment")
def environment(turn_scores: Sequence[float]) -> float:
    """Return the sum of the rewards that the environment gave per turn."""
    return float(sum(turn_scores))


# --- open-domain question answering ---------------------------------------------------------------

DATA_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Convert to lower case without ASCII punctuation, articles and extra white space.

    >>> normalize_answer("The  Eiffel-Tower!")
    'eiffeltower'

    References:
        The evaluation script of SQuAD 1.1 (Rajpurkar et al., 2016).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, truths: Sequence[str]) -> float:
    """Score 1 if the prediction equals one of the truths after normalization, else 0.

    What normalizes to nothing (articles, punctuation) equals nothing.
    """
    answer = normalize_answer(prediction)
    accepted = {normalize_answer(truth) for truth in truths}
    return float(bool(answer) and answer in accepted)


def f1(prediction: str, truths: Sequence[str]) -> float:
    """Return the highest F1 of the prediction's words and a truth's words, in [0, 1].

    F1 is the harmonic mean of precision and recall; it is 0 for what normalizes to nothing.
    """
    words = normalize_answer(prediction).split()
    best = 0.0
    for truth in truths:
        best = max(best, _f1(words, normalize_answer(truth).split()))
    return best


def _f1(prediction: list[str], truth: list[str]) -> float:
    if not prediction or not truth:
        return 0.0
    common = (Counter(prediction) & Counter(truth)).total()
    return 2 * common / (len(prediction) + len(truth))


def _answer_and_truths(
    solution_str: str, ground_truth: Any, data_source: str
) -> tuple[str, list[str]]:
    """Return the answer of a solution, empty if there is none, and the accepted answers."""
    accepted = ground_truth
    if isinstance(ground_truth, Mapping):
        accepted = ground_truth.get("target")
    if isinstance(accepted, str | int | float):
        accepted = [accepted]
    truths = [str(truth) for truth in accepted or ()]
    if not truths:
        raise RewardError(
            f"ground_truth of a {data_source!r} row must hold answers, got {ground_truth!r:.100}"
        )

    answer = tagged(solution_str) or ""
    return answer[-MAX_CHARS:], truths


@register_reward("qa_em", *DATA_SETS, *(f"searchR1_{name}" for name in DATA_SETS))
def qa_exact_match(data_source: str, solution_str: str, ground_truth: Any) -> dict[str, float]:
    """Score the exact match; the parts are F1 and whether there is an answer."""
    answer, truths = _answer_and_truths(solution_str, ground_truth, data_source)
    return {
        "score": exact_match(answer, truths),
        "f1": f1(answer, truths),
        "answered": float(bool(answer)),
    }


@register_reward("qa_f1")
def qa_f1(data_source: str, solution_str: str, ground_truth: Any) -> dict[str, float]:
    """Score F1; the parts are the exact match and whether there is an answer."""
    answer, truths = _answer_and_truths(solution_str, ground_truth, data_source)
    return {
        "score": f1(answer, truths),
        "exact_match": exact_match(answer, truths),
        "answered": float(bool(answer)),
    }
