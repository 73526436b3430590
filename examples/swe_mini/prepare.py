"""Writes twenty bug-fix tasks to train on and twenty held out, as task folders in Harbor's format.

Each task is a file with one function, one line of which is wrong. Training and held-out tasks share
the functions, but not the bugs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_agent_rl.agents.command.pytest_task import write_pytest_task
from jax_agent_rl.data.rows import write_rows


@dataclass(frozen=True, kw_only=True)
class Function:
    """A right function, and two ways to get one of its lines wrong.

    Attributes:
        cases: arguments, and what the right function returns for them. The agent is shown the first
            two, the verifier tries all.
    """

    signature: str
    purpose: str
    lines: tuple[str, ...]
    right: str
    train_bug: str
    heldout_bug: str
    cases: tuple[tuple[list[Any], Any], ...]

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]

    def source(self, bug: str) -> str:
        """Return the file's text with ``bug`` in place of the right line."""
        text = f'def {self.signature}:\n    """{self.purpose}"""\n'
        for line in self.lines:
            if line.strip() == self.right:
                line = line.replace(self.right, bug)
            text += f"    {line}\n"
        return text


def one_line(
    signature: str, purpose: str, right: str, bugs: tuple[str, str], *cases: tuple[list[Any], Any]
) -> Function:
    """Return a function of one statement."""
    train_bug, heldout_bug = bugs
    return Function(
        signature=signature,
        purpose=purpose,
        lines=(right,),
        right=right,
        train_bug=train_bug,
        heldout_bug=heldout_bug,
        cases=cases,
    )


FUNCTIONS = (
    one_line(
        "area(width, height)",
        "Return the area of a rectangle.",
        "return width * height",
        ("return width + height", "return width * width"),
        ([2, 3], 6),
        ([4, 5], 20),
        ([7, 1], 7),
        ([6, 9], 54),
    ),
    one_line(
        "difference(a, b)",
        "Return a minus b.",
        "return a - b",
        ("return a + b", "return b - a"),
        ([9, 4], 5),
        ([7, 1], 6),
        ([3, 8], -5),
        ([10, 6], 4),
    ),
    one_line(
        "square(n)",
        "Return n times n.",
        "return n * n",
        ("return n + n", "return n * n * n"),
        ([3], 9),
        ([5], 25),
        ([-4], 16),
        ([10], 100),
    ),
    one_line(
        "half(n)",
        "Return n divided by 2.",
        "return n / 2",
        ("return n * 2", "return n / 3"),
        ([8], 4.0),
        ([5], 2.5),
        ([-6], -3.0),
        ([1], 0.5),
    ),
    one_line(
        "is_even(n)",
        "Return whether n is even.",
        "return n % 2 == 0",
        ("return n % 2 == 1", "return n % 3 == 0"),
        ([4], True),
        ([7], False),
        ([9], False),
        ([0], True),
    ),
    one_line(
        "is_adult(age)",
        "Return whether the age is 18 or more.",
        "return age >= 18",
        ("return age > 18", "return age <= 18"),
        ([18], True),
        ([30], True),
        ([17], False),
        ([3], False),
    ),
    one_line(
        "first(items)",
        "Return the first item.",
        "return items[0]",
        ("return items[1]", "return items[-1]"),
        ([[5, 6, 7]], 5),
        ([[2, 9, 4]], 2),
        ([[8, 1, 3, 0]], 8),
    ),
    one_line(
        "last(items)",
        "Return the last item.",
        "return items[-1]",
        ("return items[0]", "return items[1]"),
        ([[5, 6, 7]], 7),
        ([[2, 9, 4]], 4),
        ([[8, 1, 3, 0]], 0),
    ),
    one_line(
        "total(prices)",
        "Return the sum of the prices.",
        "return sum(prices)",
        ("return max(prices)", "return len(prices)"),
        ([[1, 2, 4]], 7),
        ([[10, 5]], 15),
        ([[3, 3, 3, 3]], 12),
    ),
    one_line(
        "largest(numbers)",
        "Return the maximum of the numbers.",
        "return max(numbers)",
        ("return min(numbers)", "return sum(numbers)"),
        ([[1, 8, 4]], 8),
        ([[10, 5]], 10),
        ([[3, 7, 2]], 7),
    ),
    one_line(
        "count(items)",
        "Return the number of items.",
        "return len(items)",
        ("return max(items)", "return sum(items)"),
        ([[5, 6, 7]], 3),
        ([[9, 9]], 2),
        ([[1, 1, 1, 1, 4]], 5),
    ),
    one_line(
        "shout(text)",
        "Return the text in upper case.",
        "return text.upper()",
        ("return text.lower()", "return text.title()"),
        (["hello"], "HELLO"),
        (["Good day"], "GOOD DAY"),
        (["a b c"], "A B C"),
    ),
    one_line(
        "whisper(text)",
        "Return the text in lower case.",
        "return text.lower()",
        ("return text.upper()", "return text.strip()"),
        (["HELLO"], "hello"),
        (["Good Day"], "good day"),
        (["A b C"], "a b c"),
    ),
    one_line(
        "trim(text)",
        "Return the text without spaces at both ends.",
        "return text.strip()",
        ("return text.lower()", "return text.lstrip()"),
        ([" Cat "], "Cat"),
        (["Dog  "], "Dog"),
        (["  One two  "], "One two"),
    ),
    one_line(
        "greet(name)",
        "Return Hello and the name.",
        'return "Hello " + name',
        ('return "Bye " + name', 'return "Hello "'),
        (["Ann"], "Hello Ann"),
        (["Bob"], "Hello Bob"),
        (["Eve"], "Hello Eve"),
    ),
    one_line(
        "reverse(text)",
        "Return the text backwards.",
        "return text[::-1]",
        ("return text[::1]", "return text[::-2]"),
        (["abc"], "cba"),
        (["hello"], "olleh"),
        (["xyzw"], "wzyx"),
    ),
    one_line(
        "is_empty(items)",
        "Return whether there are no items.",
        "return len(items) == 0",
        ("return len(items) == 1", "return len(items) > 0"),
        ([[]], True),
        ([[4]], False),
        ([[1, 2]], False),
    ),
    Function(
        signature="average(numbers)",
        purpose="Return the mean of the numbers.",
        lines=(
            "total = sum(numbers)",
            "return total / len(numbers)",
        ),
        right="return total / len(numbers)",
        train_bug="return total * len(numbers)",
        heldout_bug="return total - len(numbers)",
        cases=(
            ([[2, 4]], 3.0),
            ([[1, 2, 6]], 3.0),
            ([[5]], 5.0),
            ([[8, 0, 4, 4]], 4.0),
        ),
    ),
    Function(
        signature="factorial(n)",
        purpose="Return the product of 1 to n.",
        lines=(
            "result = 1",
            "for i in range(1, n + 1):",
            "    result *= i",
            "return result",
        ),
        right="result *= i",
        train_bug="result += i",
        heldout_bug="result -= i",
        cases=(
            ([3], 6),
            ([4], 24),
            ([1], 1),
            ([5], 120),
        ),
    ),
    Function(
        signature="count_positive(numbers)",
        purpose="Return how many numbers are greater than 0.",
        lines=(
            "count = 0",
            "for number in numbers:",
            "    if number > 0:",
            "        count += 1",
            "return count",
        ),
        right="if number > 0:",
        train_bug="if number < 0:",
        heldout_bug="if number == 0:",
        cases=(
            ([[1, -2, 3]], 2),
            ([[-1, 0, 4]], 1),
            ([[0, 0]], 0),
            ([[5, 6, 7]], 3),
        ),
    ),
)

CHECK = """import solution

for arguments, expected in {cases!r}:
    shown = ", ".join(map(repr, arguments))
    result = solution.{name}(*arguments)
    if result != expected:
        raise SystemExit(f"{name}({{shown}}) is {{result!r}}, but it should be {{expected!r}}.")
"""
TESTS = '''"""The program runs in a process of its own: nothing that it does decides a test."""

import json
import os
import subprocess
import sys

import pytest

CASES = {cases!r}
CALL = """
import json, sys
import solution
print(json.dumps(solution.{name}(*json.loads(sys.argv[1]))))
"""


@pytest.mark.parametrize(("arguments", "expected"), CASES)
def test_the_function_returns_what_it_says(arguments, expected):
    done = subprocess.run(
        [sys.executable, "-c", CALL, json.dumps(arguments)],
        cwd="/app",
        env={{**os.environ, "PYTHONSAFEPATH": ""}},
        capture_output=True,
        text=True,
        timeout=10,
    )
    assert json.loads(done.stdout) == expected
'''


def write_task(folder: Path, function: Function, bug: str) -> None:
    """Write the task to mend one bug of a function."""
    write_pytest_task(
        folder,
        instruction="solution.py has a bug. Fix it so that check.py succeeds.",
        files={
            "solution.py": function.source(bug),
            "check.py": CHECK.format(name=function.name, cases=function.cases[:2]),
        },
        tests={"test_solution.py": TESTS.format(name=function.name, cases=function.cases)},
    )


def main() -> None:
    """Write ``train.jsonl``, ``heldout.jsonl`` and their tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/swe_mini"))
    arguments = parser.parse_args()
    for split in ("train", "heldout"):
        rows = []
        for function in FUNCTIONS:
            bug = function.train_bug if split == "train" else function.heldout_bug
            folder = arguments.out / "tasks" / f"{split}-{function.name}"
            write_task(folder, function, bug)
            rows.append(
                {
                    "prompt": [{"role": "user", "content": f"Fix {function.name}."}],
                    "data_source": "command",
                    "agent_name": "command",
                    "extra_info": {"task": str(folder.resolve())},
                }
            )
        write_rows(arguments.out / f"{split}.jsonl", rows)
    print(f"{len(FUNCTIONS)} training and {len(FUNCTIONS)} held-out tasks in {arguments.out}")


if __name__ == "__main__":
    main()
