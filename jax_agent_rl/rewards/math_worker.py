"""The process that compares mathematical answers: ``python -m jax_agent_rl.rewards.math_worker``.

Reads ``{"solution": text, "truth": latex, "seconds": s}`` a line, writes ``{"score": 0 or 1, "extracted": text}``.
It is a process of its own because math-verify limits its time with SIGALRM, which works in a main thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jax_agent_rl.rewards.workers import answer_questions


def verify_answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """1 if some answer of the solution equals the truth, 0 if not or if it has none.

    Raises:
        ValueError: the truth itself cannot be parsed: a fault of the data.
    """
    from math_verify import parse, verify

    seconds = int(question["seconds"])
    truth = parse(f"\\boxed{{{question['truth']}}}", parsing_timeout=seconds)
    if not truth:
        raise ValueError(f"ground_truth {question['truth']!r:.200} is not mathematics that can be parsed")
    answer = parse(question["solution"], parsing_timeout=seconds)
    equal = bool(answer) and verify(truth, answer, timeout_seconds=seconds)
    return {"score": float(equal), "extracted": str(answer[-1]) if answer else ""}


def main() -> None:
    """Answers questions until standard input ends."""
    logging.disable(logging.CRITICAL)  # math-verify logs every answer it cannot parse
    answer_questions(_answer)


def _answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return verify_answer(question)
    except ImportError as error:
        return {"error": f"{error}; install the extra: pip install 'jax_agent_rl[math]'"}


if __name__ == "__main__":
    main()
