"""The task of the gallery's comparison with TRL and Tunix: sums, answered in one turn.

    python benchmarks/peers/sums.py OUT

This writes OUT/train.jsonl and OUT/heldout.jsonl, rows in verl's schema. It needs the standard
library only.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

EXAMPLES = ((23, 4), (57, 8), (31, 6))
"""The worked examples of each prompt."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """Return 1.0 if the answer is "= " and the sum, and nothing else."""
    return float(solution_str.strip() == f"= {ground_truth}")


def question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} plus {b}?"}


def row(a: int, b: int) -> dict[str, Any]:
    """Return a row that asks for a sum, after the worked examples."""
    prompt = [{"role": "system", "content": "You add numbers."}]
    for c, d in EXAMPLES:
        prompt.append(question(c, d))
        prompt.append({"role": "assistant", "content": f"= {c + d}"})
    prompt.append(question(a, b))
    return {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": str(a + b)}}


def write_rows(file: Path, pairs: list[tuple[int, int]]) -> None:
    lines = [json.dumps(row(a, b)) + "\n" for a, b in pairs]
    file.write_text("".join(lines))


def main() -> None:
    pairs = []
    for a in range(11, 99):
        for b in range(2, 10):
            if (a, b) not in EXAMPLES:
                pairs.append((a, b))
    random.Random(0).shuffle(pairs)

    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "heldout.jsonl", pairs[:96])
    write_rows(out / "train.jsonl", pairs[96:])


if __name__ == "__main__":
    main()
