"""Writes a corpus of invented places and questions about them: ``python
examples/search_agent/prepare.py``.

The places do not exist, so no model can know them: whoever answers has looked them up. The corpus
is JSON Lines of ``{"id", "contents"}``, as Search-R1's; ``contents`` begins with the title.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

SYSTEM = (
    "You answer questions about places. First write <search> with what to look for </search>, then"
    " read the <information>, then write <answer> with the answer only </answer>."
)
ONSETS = ("B", "D", "F", "G", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Br", "Tr", "St", "Gr")
VOWELS = ("a", "e", "i", "o", "u", "ia", "ei")
ENDINGS = ("dal", "mora", "vik", "nesh", "tor", "lund", "ria", "bek", "stad", "mere")
KINDS = {
    "lake": (
        "How deep is {name}?",
        "{name} is a lake, {value} deep at most.",
        "{n} metres",
        (12, 480),
    ),
    "town": (
        "How many people live in {name}?",
        "{name} is a town in which {value} live.",
        "{n} people",
        (1200, 98000),
    ),
    "mountain": (
        "How high is {name}?",
        "{name} is a mountain that rises to {value}.",
        "{n} metres",
        (900, 4800),
    ),
    "bridge": (
        "How long is {name}?",
        "{name} is a bridge with a length of {value}.",
        "{n} metres",
        (40, 2400),
    ),
}


def main() -> None:
    """Writes ``corpus.jsonl``, ``train.jsonl`` and ``heldout.jsonl`` and prints their paths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("data/search_agent"))
    parser.add_argument("--train", type=int, default=160)
    parser.add_argument("--heldout", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    places = invent(2 + arguments.train + arguments.heldout, random.Random(arguments.seed))
    worked_examples = places[:2]
    train = places[2 : 2 + arguments.train]
    heldout = places[2 + arguments.train :]

    arguments.out.mkdir(parents=True, exist_ok=True)
    passages = [
        {"id": str(i), "contents": f"{place['name']}\n{place['fact']}"}
        for i, place in enumerate(places)
    ]
    parts = {
        "corpus": passages,
        "train": [row_of(place, worked_examples) for place in train],
        "heldout": [row_of(place, worked_examples) for place in heldout],
    }
    for name, rows in parts.items():
        file = arguments.out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{file}: {len(rows)} rows")


def invent(count: int, rng: random.Random) -> list[dict[str, str]]:
    """Places with different names, each with one fact, the question for it, and its answer."""
    places: dict[str, dict[str, str]] = {}
    while len(places) < count:
        name = rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(ENDINGS)
        kind = rng.choice(sorted(KINDS))
        question, fact, value, span = KINDS[kind]
        value = value.format(n=rng.randint(*span))
        place = {
            "question": question.format(name=name),
            "fact": fact.format(name=name, value=value),
            "answer": value,
        }
        places.setdefault(name, {"name": name, **place})
    return list(places.values())


def row_of(place: dict[str, str], worked: list[dict[str, str]]) -> dict[str, Any]:
    """One question as a row in verl's schema, after two answered as the policy is to do it."""
    prompt = [{"role": "system", "content": SYSTEM}]
    for example in worked:
        prompt += answered(example)
    prompt.append({"role": "user", "content": place["question"]})
    return {
        "data_source": "nq",  # exact match of what stands in <answer>
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": {"target": [place["answer"]]}},
        "extra_info": {},
    }


def answered(place: dict[str, str]) -> list[dict[str, str]]:
    """A question and the text of a trajectory that answers it."""
    information = f"[1] {place['name']}\n{place['fact']}"
    text = (
        f"<search>{place['name']}</search>\n<information>\n{information}\n</information>\n"
        f"<answer>{place['answer']}</answer>"
    )
    return [{"role": "user", "content": place["question"]}, {"role": "assistant", "content": text}]


if __name__ == "__main__":
    main()
