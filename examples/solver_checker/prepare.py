"""Writes sums to solve: ``python examples/solver_checker/prepare.py --train 96 --heldout 24``."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from jax_agent_rl.data.rows import write_rows

SOLVER = "You add numbers. Answer with the sum."
CHECKER = "You check sums. Answer yes if the sum is right, and no if it is wrong."
SOLVED = (("3 + 4 =", "7"), ("12 + 5 =", "17"), ("8 + 6 =", "14"))
CHECKED = (("3 + 4 = 7", "yes"), ("12 + 5 = 18", "no"), ("8 + 6 = 15", "no"), ("9 + 2 = 11", "yes"))


def main() -> None:
    """Writes ``train.jsonl`` and ``heldout.jsonl``, of different sums."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=int, default=96)
    parser.add_argument("--heldout", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("data/solver_checker"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(1, 13) for b in range(1, 11)]
    random.Random(0).shuffle(pairs)
    rows = [row_of(a, b) for a, b in pairs[: arguments.train + arguments.heldout]]
    for name, part in (
        ("heldout", rows[: arguments.heldout]),
        ("train", rows[arguments.heldout :]),
    ):
        write_rows(arguments.out / f"{name}.jsonl", part)
        print(f"{arguments.out / name}.jsonl: {len(part)} sums")


def row_of(a: int, b: int) -> dict[str, Any]:
    """A sum: the solver's prompt, and the beginning of the checker's, which the agent ends with the
    answer.
    """
    question = f"{a} + {b} ="
    return {
        "data_source": "solver_checker",
        "agent_name": "solver_checker",
        "prompt": [*chat(SOLVER, *SOLVED), {"role": "user", "content": question}],
        "reward_model": {"ground_truth": str(a + b)},
        "extra_info": {"question": question, "checker_prompt": chat(CHECKER, *CHECKED)},
    }


def chat(system: str, *answered: tuple[str, str]) -> list[dict[str, str]]:
    """A system message and answered questions."""
    messages = [{"role": "system", "content": system}]
    for question, answer in answered:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return messages


if __name__ == "__main__":
    main()
