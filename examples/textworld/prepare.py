"""Makes TextWorld games and rows that name them: ``python examples/textworld/prepare.py --train 16
--heldout 4``.

Each game is a room with a quest of one command unless asked for more; training and held-out games
have different seeds. Making a game takes a second or two. Games that lie there already are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SYSTEM = (
    "You play a text game. You are told what to do and which commands there are. Answer with one"
    " command."
)
EXAMPLE = (
    (
        (
            "Hello! Please open the wooden chest in the attic.\n\n-= Attic =-\nYou are in the"
            " attic. You see a closed wooden chest.\n\nYou can: examine wooden chest, inventory,"
            " look, open wooden chest"
        ),
        "open wooden chest",
    ),
    (
        (
            "Welcome! Your task is to take the key from the table, then go west.\n\n-= Hall =-\nYou"
            " are in a hall. On the table is a key.\n\nYou can: examine key, go west, inventory,"
            " look, take key from table"
        ),
        "take key from table",
    ),
    (
        (
            "You take the key from the table.\n\nYou can: drop key, examine key, go west,"
            " inventory, look"
        ),
        "go west",
    ),
)
HELDOUT_SEED = 10_000


def main() -> None:
    """Writes games, ``train.jsonl`` and ``heldout.jsonl``, and prints the paths of the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=int, default=16, help="training games")
    parser.add_argument("--heldout", type=int, default=4, help="held-out games")
    parser.add_argument("--rooms", type=int, default=1)
    parser.add_argument("--objects", type=int, default=3)
    parser.add_argument("--quest-length", type=int, default=1, help="commands a quest takes")
    parser.add_argument("--out", type=Path, default=Path("data/textworld"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (
        ("train", arguments.train, 1),
        ("heldout", arguments.heldout, HELDOUT_SEED),
    ):
        rows = [row_of(make_game(arguments, seed + i)) for i in range(count)]
        file = arguments.out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{file}: {count} games")


def make_game(arguments: argparse.Namespace, seed: int) -> Path:
    """The compiled game of a seed."""
    import textworld

    path = (
        arguments.out / f"{arguments.rooms}-{arguments.objects}-{arguments.quest_length}-{seed}.z8"
    )
    if path.is_file():
        return path
    options = textworld.GameOptions()
    options.seeds = seed
    options.nb_rooms = arguments.rooms
    options.nb_objects = arguments.objects
    options.quest_length = arguments.quest_length
    options.path = str(path)
    return Path(textworld.generator.compile_game(textworld.generator.make_game(options), options))


def row_of(game: Path) -> dict[str, Any]:
    """A game by its path; the prompt shows only how to play."""
    prompt = [{"role": "system", "content": SYSTEM}]
    for observation, command in EXAMPLE:
        prompt += [
            {"role": "user", "content": observation},
            {"role": "assistant", "content": command},
        ]
    return {
        "data_source": "environment",
        "agent_name": "environment_agent",
        "prompt": prompt,
        "extra_info": {"environment_kwargs": {"name": "textworld", "game": str(game)}},
    }


if __name__ == "__main__":
    main()
