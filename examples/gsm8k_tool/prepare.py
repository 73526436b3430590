"""Writes GSM8K as training rows: ``python examples/gsm8k_tool/prepare.py --out data/gsm8k``.

GSM8K is downloaded from the Hugging Face Hub (``openai/gsm8k``, kept in its cache): its training
split becomes ``train.jsonl``, the first problems of its test split ``heldout.jsonl``. If the Hub
cannot be reached, the 24 hand-made problems of ``sample.jsonl`` take its place, and a line says so.

``--source FILE`` takes another file of that schema, Parquet or JSON Lines with ``question`` and
``answer`` (ending in ``#### 72``), and holds out its last problems. The rows are verl's schema, so
files made for verl can be named in ``data.train`` as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from jax_agent_rl.data.reader import read_row_file
from jax_agent_rl.data.rows import write_rows
from jax_agent_rl.errors import DataError
from jax_agent_rl.rewards.rules import marked_number
from jax_agent_rl.utils.hub import dataset_files

SAMPLE = Path(__file__).with_name("sample.jsonl")
SYSTEM = (
    "You answer questions with a calculator. First write a <tool_call>, then read the"
    " <tool_response>, then answer after ####."
)


def main() -> None:
    """Writes ``train.jsonl`` and ``heldout.jsonl`` and prints their paths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", type=Path, help="GSM8K's Parquet or JSON Lines; default: download it"
    )
    parser.add_argument("--out", type=Path, default=Path("data/gsm8k"))
    parser.add_argument(
        "--heldout",
        type=int,
        help="problems kept for evaluation; default: 200 of GSM8K, 8 of a file",
    )
    arguments = parser.parse_args()
    parts = None if arguments.source else downloaded(arguments.heldout or 200)
    if parts is None:
        source = arguments.source or SAMPLE
        heldout = 8 if arguments.heldout is None else arguments.heldout
        rows = rows_of(problem for _, problem in read_row_file(source))
        if not 0 < heldout < len(rows):
            parser.error(f"--heldout {heldout}: {source} has {len(rows)} problems")
        parts = {"train": rows[:-heldout], "heldout": rows[-heldout:]}

    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        file = arguments.out / f"{name}.jsonl"
        write_rows(file, part)
        print(f"{file}: {len(part)} rows")


def downloaded(heldout: int) -> dict[str, list[dict[str, Any]]] | None:
    """GSM8K's rows; None if the Hub cannot be reached."""
    files = {}
    try:
        for split in ("train", "test"):
            files[split] = dataset_files(
                "openai/gsm8k", None, name="main", split=split, suffixes=(".parquet",)
            )
    except DataError as error:
        print(
            f"{error}\nGSM8K is not here: writing the problems of {SAMPLE.name} INSTEAD",
            file=sys.stderr,
        )
        return None
    train = rows_of(problems_in(files["train"]))
    test = rows_of(islice(problems_in(files["test"]), heldout))
    return {"train": train, "heldout": test}


def problems_in(files: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    """The problems of some files."""
    for file in files:
        for _, problem in read_row_file(file):
            yield problem


def rows_of(problems: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Problems as rows."""
    return [row_of(problem, index) for index, problem in enumerate(problems)]


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
            *worked(
                "Ann has 23 nuts and finds 45 more. How many nuts does she have?", "23 + 45", 68
            ),
            *worked("A box holds 14 pens. How many pens are in 6 boxes?", "14 * 6", 84),
            *worked(
                "Bob had 310 cents and spent 127 of them. How many cents are left?",
                "310 - 127",
                183,
            ),
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
