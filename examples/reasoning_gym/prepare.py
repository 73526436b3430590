"""Writes rows that name reasoning-gym questions: ``python examples/reasoning_gym/prepare.py
--dataset chain_sum``.

A row holds the name of the family, a seed and an index; the environment makes the question when it
is asked, and the family's own verifier scores the answer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SYSTEM = "You answer questions. Write the answer between <answer> and </answer>."
EXAMPLES = (
    ("State the final answer to the following arithmetic problem: 2 + 5 =", "7"),
    ("State the final answer to the following arithmetic problem: 9 - 4 =", "5"),
)
HELDOUT_SEED = 1_000_000
"""Far from the training seeds: most families make question ``i`` of seed ``s`` from ``s + i``."""


def main() -> None:
    """Writes ``train.jsonl`` and ``heldout.jsonl`` and prints their paths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="chain_sum", help="a family of reasoning-gym")
    parser.add_argument(
        "--config", type=json.loads, help="its settings as JSON; default two terms of one digit"
    )
    parser.add_argument("--train", type=int, default=500, help="training rows")
    parser.add_argument("--heldout", type=int, default=48, help="held-out rows")
    parser.add_argument("--out", type=Path, default=Path("data/reasoning_gym"))
    arguments = parser.parse_args()
    easy = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = arguments.config
    if config is None:
        config = easy if arguments.dataset == "chain_sum" else {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (
        ("train", arguments.train, 0),
        ("heldout", arguments.heldout, HELDOUT_SEED),
    ):
        rows = [row_of(arguments.dataset, config, seed, index) for index in range(count)]
        file = arguments.out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{file}: {count} rows")


def row_of(dataset: str, config: dict[str, Any], seed: int, index: int) -> dict[str, Any]:
    """One question by its name; the prompt shows only how to answer."""
    prompt = [{"role": "system", "content": SYSTEM}]
    for question, answer in EXAMPLES:
        prompt += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"<answer>{answer}</answer>"},
        ]

    environment = {
        "name": "reasoning_gym",
        "dataset": dataset,
        "seed": seed,
        "index": index,
        "config": config,
    }
    return {
        "data_source": "environment",
        "agent_name": "environment_agent",
        "prompt": prompt,
        "extra_info": {"environment_kwargs": environment},
    }


if __name__ == "__main__":
    main()
