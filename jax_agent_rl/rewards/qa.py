"""Open-domain question answering: exact match and F1 with SQuAD's normalisation.

The answer is the content of the last ``<answer>…</answer>``. The truth is a string, a list of accepted strings, or
``{"target": …}`` with one of these, as in search-agent data sets.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jax_agent_rl.errors import RewardError
from jax_agent_rl.rewards.registry import register_reward
from jax_agent_rl.rewards.rules import MAX_CHARS, tagged

DATA_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Convert to lower case without ASCII punctuation, articles and superfluous white space.

    >>> normalize_answer("The  Eiffel-Tower!")
    'eiffeltower'

    References:
        The evaluation script of SQuAD 1.1 (Rajpurkar et al., 2016).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, truths: Sequence[str]) -> float:
    """Score 1 if the prediction equals one of the truths after normalisation, else 0."""
    return float(normalize_answer(prediction) in {normalize_answer(truth) for truth in truths})


def f1(prediction: str, truths: Sequence[str]) -> float:
    """Return the best harmonic mean of word precision and recall over the truths, in [0, 1]."""
    words = normalize_answer(prediction).split()
    return max((_f1(words, normalize_answer(truth).split()) for truth in truths), default=0.0)


def _f1(prediction: list[str], truth: list[str]) -> float:
    if not prediction or not truth:
        return float(prediction == truth)
    common = (Counter(prediction) & Counter(truth)).total()
    return 2 * common / (len(prediction) + len(truth))


def _answer_and_truths(solution_str: str, ground_truth: Any, data_source: str) -> tuple[str, list[str]]:
    truths = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    truths = [truths] if isinstance(truths, str | int | float) else list(truths or ())
    if not truths:
        raise RewardError(f"ground_truth of a {data_source!r} row must hold answers, got {ground_truth!r:.100}")
    answer = tagged(solution_str)
    return "" if answer is None else answer[-MAX_CHARS:], [str(truth) for truth in truths]


@register_reward("qa_em", *DATA_SETS, *(f"searchR1_{name}" for name in DATA_SETS))
def qa_exact_match(data_source: str, solution_str: str, ground_truth: Any) -> dict[str, float]:
    """Score the exact match; F1 and whether there is an answer are parts."""
    answer, truths = _answer_and_truths(solution_str, ground_truth, data_source)
    return {"score": exact_match(answer, truths), "f1": f1(answer, truths), "answered": float(bool(answer))}


@register_reward("qa_f1")
def qa_f1(data_source: str, solution_str: str, ground_truth: Any) -> dict[str, float]:
    """Score F1; the exact match and whether there is an answer are parts."""
    answer, truths = _answer_and_truths(solution_str, ground_truth, data_source)
    return {"score": f1(answer, truths), "exact_match": exact_match(answer, truths), "answered": float(bool(answer))}
