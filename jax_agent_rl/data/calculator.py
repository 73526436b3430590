"""The calculator task: arithmetic that is too large for mental calculation, with a calculator tool.

The prompt shows two worked additions, each with its tool call, result and answer. The questions ask for sums,
differences and products of larger numbers: the policy has to generalize the call to other operations, and to make it
reliably when sampling.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jax_agent_rl.data.rows import write_rows

SYSTEM = (
    "You answer questions with a calculator. First write a <tool_call>, then read the <tool_response>, then answer."
)

# words, symbol, ranges of the two numbers, result
Operation = tuple[tuple[str, ...], tuple[int, int], tuple[int, int], Callable[[int, int], int]]
OPERATIONS: tuple[Operation, ...] = (
    (("What is {a} times {b}?", "What is {a} multiplied by {b}?"), (112, 999), (12, 99), lambda a, b: a * b),
    (("What is {a} minus {b}?",), (1000, 9999), (100, 999), lambda a, b: a - b),
    (("What is {a} plus {b}?",), (1000, 9999), (1000, 9999), lambda a, b: a + b),
)


def prepare_calculator(
    out: Path, *, train: int = 2000, heldout: int = 200, seed: int = 0, agent_name: str = "tool_agent"
) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``heldout.jsonl`` (disjoint questions) and return their paths.

    Args:
        out: folder to write to.
        train: number of training rows.
        heldout: number of held-out rows.
        seed: seeds the questions.
        agent_name: agent loop of the rows.
    """
    out.mkdir(parents=True, exist_ok=True)
    questions = _questions(random.Random(seed))
    rows = [_row(*next(questions), agent_name) for _ in range(train + heldout)]
    files = (out / "train.jsonl", out / "heldout.jsonl")
    for file, part in zip(files, (rows[heldout:], rows[:heldout]), strict=True):
        write_rows(file, part)
    return files


def _questions(rng: random.Random) -> Iterator[tuple[str, int]]:
    """Yield distinct questions without end, operations in turn."""
    seen = set()
    while True:
        for phrasings, first, second, compute in OPERATIONS:
            a, b = rng.randint(*first), rng.randint(*second)
            question = rng.choice(phrasings).format(a=a, b=b)
            if (a, b) not in seen:
                seen.add((a, b))
                yield question, compute(a, b)


def _row(question: str, answer: int, agent_name: str) -> dict[str, Any]:
    return {
        "data_source": "calculator",
        "agent_name": agent_name,
        "prompt": [
            {"role": "system", "content": SYSTEM},
            *_worked("What is 23 plus 45?", "23 + 45", 68),
            *_worked("What is 310 plus 27?", "310 + 27", 337),
            {"role": "user", "content": question},
        ],
        "reward_model": {"ground_truth": str(answer)},
        "extra_info": {},
    }


def _worked(question: str, expression: str, result: int) -> list[dict[str, str]]:
    """Return a question answered with the tool, as the policy should."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": str(result)},
        {"role": "assistant", "content": f"The answer is {result}."},
    ]
