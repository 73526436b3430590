r"""Mathematical answers compared by value with math-verify: ``0.5``, ``1/2`` and ``\frac12`` are the same.

Runs in worker processes (:mod:`jax_agent_rl.rewards.workers`); each comparison takes bounded time, however nasty the
expression. Needs the extra ``math``.
"""

from __future__ import annotations

import os
from typing import Any

from jax_agent_rl.rewards.registry import register_reward
from jax_agent_rl.rewards.text import boxed
from jax_agent_rl.rewards.workers import WorkerPool

SECONDS = 5
"""For each of: parsing the truth, parsing the answer, comparing them."""

POOL = WorkerPool(
    "jax_agent_rl.rewards.math_worker", size=max(1, min(4, (os.cpu_count() or 1) // 2)), purpose="math-verify"
)


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
    r"""1 if the answer (``\boxed{…}`` first, else the last formula or number) equals the truth, a LaTeX expression.

    ``answered`` is a part: whether any mathematics was found in the answer.
    """
    answer_only = boxed(solution_str)  # of several boxes the last counts; math-verify would take them together
    solution = solution_str if answer_only is None else f"\\boxed{{{answer_only}}}"
    question = {"solution": solution, "truth": str(ground_truth), "seconds": SECONDS}
    # Twice the time of the three alarms: the wall clock also has to wait for a free worker and for its start.
    answer = POOL.ask(question, timeout=6.0 * SECONDS)
    return {"score": answer["score"], "answered": float(bool(answer["extracted"]))}
