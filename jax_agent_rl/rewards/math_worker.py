"""The process that compares mathematical answers: ``python -m jax_agent_rl.rewards.math_worker``.

Reads ``{"solution": text, "truth": latex, "seconds": s}`` a line, writes ``{"score": 0 or 1, "extracted": text}``.
It is a process of its own because math-verify limits its time with SIGALRM, which works in a main thread only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


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
    import logging

    logging.disable(logging.CRITICAL)  # math-verify logs every answer it cannot parse
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints must not look like an answer
    for line in sys.stdin:
        try:
            answer = verify_answer(json.loads(line))
        except ImportError as error:
            answer = {"error": f"{error}; install the extra: pip install 'jax_agent_rl[math]'"}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
