"""The task of the gallery's comparison with TRL and Tunix: sums, answered in one turn. Standard
library only.

python benchmarks/peers/sums.py OUT      # writes OUT/train.jsonl and OUT/heldout.jsonl, rows in verl's schema
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

WORKED = ((23, 4), (57, 8), (31, 6))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """Return 1.0 if the answer is "= " and the sum, and nothing else."""
    return float(solution_str.strip() == f"= {ground_truth}")


def question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} plus {b}?"}


def row(a: int, b: int) -> dict[str, Any]:
    worked = [
        x
        for c, d in WORKED
        for x in (question(c, d), {"role": "assistant", "content": f"= {c + d}"})
    ]
    prompt = [{"role": "system", "content": "You add numbers."}, *worked, question(a, b)]
    return {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": str(a + b)}}


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(11, 99) for b in range(2, 10) if (a, b) not in WORKED]
    random.Random(0).shuffle(pairs)
    for name, some in (("heldout", pairs[:96]), ("train", pairs[96:])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row(*pair)) + "\n" for pair in some))


if __name__ == "__main__":
    main()
