"""Writes sums for a user who knows the answers: ``python examples/simulated_user/prepare.py``."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

SYSTEM = "You add numbers."
WORKED = ((23, 4), (57, 8), (31, 6))


def main() -> None:
    """Writes ``train.jsonl`` and ``heldout.jsonl`` and prints their paths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/simulated_user"))
    parser.add_argument("--train", type=int, default=160)
    parser.add_argument("--heldout", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sums = [(a, b) for a in range(11, 99) for b in range(2, 10) if (a, b) not in WORKED]
    random.Random(arguments.seed).shuffle(sums)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("heldout", arguments.heldout), ("train", arguments.train)):
        file = arguments.out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row_of(*sums.pop())) + "\n" for _ in range(count)))
        print(f"{file}: {count} rows")


def row_of(a: int, b: int) -> dict[str, Any]:
    """One sum as a row in verl's schema, with what its user knows."""
    answer = str(a + b)
    return {
        "data_source": "openai/gsm8k",  # the reward that looks for #### and a number
        "prompt": [
            {"role": "system", "content": SYSTEM},
            *(message for worked in WORKED for message in answered(*worked)),
            question(a, b),
        ],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"interaction_kwargs": {"name": "teacher", "ground_truth": answer}},
    }


def question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} plus {b}?"}


def answered(a: int, b: int) -> list[dict[str, str]]:
    return [question(a, b), {"role": "assistant", "content": f"#### {a + b}"}]


if __name__ == "__main__":
    main()
