"""Writes the deals of Kuhn poker.

python examples/kuhn_poker/prepare.py --train 60 --heldout 6
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice, permutations
from pathlib import Path
from typing import Any

from jax_agent_rl.data.rows import write_rows

SYSTEM = (
    "You play poker with three cards. The King beats the Queen, the Queen beats the Jack. Answer"
    " with one of the two words you are given."
)
EXAMPLE = (
    ("You hold the King. You begin. check or bet?", "bet"),
    ("You hold the Jack. Your opponent bets. fold or call?", "fold"),
    ("You hold the Queen. Your opponent checks. check or bet?", "check"),
    ("You hold the King. Your opponent bets. fold or call?", "call"),
)


def main() -> None:
    """Writes ``train.jsonl`` and ``heldout.jsonl``: the six deals, again and again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=int, default=60, help="training games")
    parser.add_argument("--heldout", type=int, default=24, help="held-out games")
    parser.add_argument("--out", type=Path, default=Path("data/kuhn_poker"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", arguments.train), ("heldout", arguments.heldout)):
        deals = islice(cycle(permutations(("Jack", "Queen", "King"), 2)), count)
        write_rows(arguments.out / f"{name}.jsonl", [row_of(*deal) for deal in deals])
        print(f"{arguments.out / name}.jsonl: {count} games")


def row_of(first: str, second: str) -> dict[str, Any]:
    """A deal; the prompt shows how to answer, and the agent adds what a player sees."""
    prompt = [{"role": "system", "content": SYSTEM}]
    for question, move in EXAMPLE:
        prompt += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": move},
        ]
    return {
        "data_source": "kuhn_poker",
        "agent_name": "kuhn_poker",
        "prompt": prompt,
        "extra_info": {"cards": {"first": first, "second": second}},
    }


if __name__ == "__main__":
    main()
