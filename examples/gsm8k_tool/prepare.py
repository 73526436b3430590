"""Writes GSM8K as training rows: ``python examples/gsm8k_tool/prepare.py --source train.parquet --out data/gsm8k``.

The source is GSM8K as it is published, Parquet or JSON Lines with ``question`` and ``answer`` (ending in ``#### 72``);
without one, the 24 hand-made problems of ``sample.jsonl``. The rows are verl's schema, so files made for verl can be
named in ``data.train`` as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_agent_rl.rewards.rules import marked_number

SAMPLE = Path(__file__).with_name("sample.jsonl")
SYSTEM = (
    "You answer questions with a calculator. First write a <tool_call>, then read the <tool_response>, then answer "
    "after ####."
)


def main() -> None:
    """Writes ``train.jsonl`` and ``heldout.jsonl`` and prints their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=SAMPLE, help="GSM8K's Parquet or JSON Lines")
    parser.add_argument("--out", type=Path, default=Path("data/gsm8k"))
    parser.add_argument("--heldout", type=int, default=8, help="problems kept for evaluation, the last ones")
    arguments = parser.parse_args()
    rows = [row_of(problem, index) for index, problem in enumerate(problems_of(arguments.source))]
    if not 0 < arguments.heldout < len(rows):
        parser.error(f"--heldout {arguments.heldout}: {arguments.source} has {len(rows)} problems")
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts = {"train": rows[: -arguments.heldout], "heldout": rows[-arguments.heldout :]}
    for name, part in parts.items():
        file = arguments.out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{file}: {len(part)} rows")


def problems_of(source: Path) -> Iterator[Mapping[str, Any]]:
    """``question`` and ``answer`` of every problem."""
    if source.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(source).to_pylist()
    else:
        yield from (json.loads(line) for line in source.read_text().splitlines() if line.strip())


def row_of(problem: Mapping[str, Any], index: int) -> dict[str, Any]:
    """One problem as a row."""
    truth = marked_number(problem["answer"])
    if truth is None:
        raise SystemExit(f"problem {index} has no answer after ####: {problem['answer']!r:.100}")
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "ability": "math",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            *worked("Ann has 23 nuts and finds 45 more. How many nuts does she have?", "23 + 45", 68),
            *worked("A box holds 14 pens. How many pens are in 6 boxes?", "14 * 6", 84),
            *worked("Bob had 310 cents and spent 127 of them. How many cents are left?", "310 - 127", 183),
            {"role": "user", "content": problem["question"]},
        ],
        "reward_model": {"style": "rule", "ground_truth": str(truth)},
        "extra_info": {
            "index": index,
            "question": problem["question"],
            "answer": problem["answer"],
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": str(truth)}}},
        },
    }


def worked(question: str, expression: str, result: int) -> list[dict[str, str]]:
    """A problem solved as the policy is to do it."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": str(result)},
        {"role": "assistant", "content": f"#### {result}"},
    ]


if __name__ == "__main__":
    main()
