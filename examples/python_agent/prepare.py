"""Writes questions that a line of Python answers: ``python examples/python_agent/prepare.py``.

The prompt shows two of them answered with ``<tool>code</tool>``; the others ask for other things.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SYSTEM = (
    "You answer questions with Python. First write <tool> with code that prints the answer </tool>,"
    " then read the <result>, then answer."
)
NUMBERS = "{a}, {b} and {c}"
# question, result; {a}, {b}, {c} are the numbers
QUESTIONS: tuple[tuple[str, Callable[[int, int, int], int]], ...] = (
    ("What is the product of " + NUMBERS + "?", lambda a, b, c: a * b * c),
    ("What is the largest of " + NUMBERS + "?", lambda a, b, c: max(a, b, c)),
    ("What is {a} plus {b} minus {c}?", lambda a, b, c: a + b - c),
    ("What is {a} times {b} plus {c}?", lambda a, b, c: a * b + c),
    ("What is the remainder of {a} divided by {c}?", lambda a, b, c: a % c),
)
WORKED = (
    ("What is the sum of 14, 5 and 21?", "print(14 + 5 + 21)", 40),
    ("What is the smallest of 32, 18 and 25?", "print(min(32, 18, 25))", 18),
)


def main() -> None:
    """Writes ``train.jsonl`` and ``heldout.jsonl`` and prints their paths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("data/python_agent"))
    parser.add_argument("--train", type=int, default=200)
    parser.add_argument("--heldout", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    questions = ask(random.Random(arguments.seed))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("heldout", arguments.heldout), ("train", arguments.train)):
        file = arguments.out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row_of(*next(questions))) + "\n" for _ in range(count)))
        print(f"{file}: {count} rows")


def ask(rng: random.Random) -> Iterator[tuple[str, int]]:
    """Different questions without end, kinds in turn, each with its answer."""
    seen: set[str] = set()
    while True:
        for question, compute in QUESTIONS:
            numbers = {"a": rng.randint(60, 999), "b": rng.randint(12, 99), "c": rng.randint(3, 50)}
            text = question.format(**numbers)
            if text not in seen:
                seen.add(text)
                yield text, compute(**numbers)


def row_of(question: str, answer: int) -> dict[str, Any]:
    """One question as a row in verl's schema."""
    return {
        "data_source": "python_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            *(message for worked in WORKED for message in answered(*worked)),
            {"role": "user", "content": question},
        ],
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {},
    }


def answered(question: str, code: str, result: int) -> list[dict[str, str]]:
    """A question and the text of a trajectory that answers it."""
    text = f"<tool>{code}</tool>\n<result>\n{result}\n</result>\nThe answer is {result}."
    return [{"role": "user", "content": question}, {"role": "assistant", "content": text}]


if __name__ == "__main__":
    main()
