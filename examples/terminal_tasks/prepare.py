"""Writes small file tasks as task folders in Harbor's format, and rows that name them."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from jax_agent_rl.agents.command.pytest_task import write_pytest_task
from jax_agent_rl.data.rows import write_rows

NOUNS = (
    "apple bridge candle desert engine forest garden hammer island jacket kettle ladder market"
    " needle orange".split()
)
TEST_PY = """from pathlib import Path

EXPECTED = {expected!r}


def test_files_are_as_asked():
    for name, text in EXPECTED.items():
        path = Path(name)
        assert path.exists() == (text is not None), name
        if text is not None:
            assert path.read_text().split() == text.split(), name
"""

# instruction, files at the start, files at the end (None: gone)
Task = tuple[str, dict[str, str], dict[str, str | None]]


def tasks(rng: random.Random) -> Iterator[Task]:
    """Yield distinct tasks without end, kinds in turn."""
    seen = set()
    while True:
        for kind in range(6):
            first_noun, second_noun, word = rng.sample(NOUNS, 3)
            a = f"{first_noun}.txt"
            b = f"{second_noun}.txt"
            lines = rng.sample(NOUNS, rng.randint(3, 8))
            text = "".join(f"{line}\n" for line in lines)
            task: Task = [
                (f"Write the word {word} into {a}.", {}, {a: word}),
                (f"Copy {a} to {b}.", {a: text}, {a: text, b: text}),
                (f"Count the lines of {a} into {b}.", {a: text}, {b: str(len(lines))}),
                (f"Rename {a} to {b}.", {a: text}, {a: None, b: text}),
                (f"Delete {a}.", {a: text, b: text}, {a: None, b: text}),
                (f"Write the first line of {a} into {b}.", {a: text}, {b: lines[0]}),
            ][kind]
            if task[0] not in seen:
                seen.add(task[0])
                yield task


def write_task(folder: Path, task: Task) -> None:
    """Write one task folder."""
    instruction, files, expected = task
    tests = {"test_state.py": TEST_PY.format(expected=expected)}
    write_pytest_task(folder, instruction=instruction, files=files, tests=tests)


def main() -> None:
    """Write ``train.jsonl``, ``heldout.jsonl`` and their tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/terminal_tasks"))
    parser.add_argument("--train", type=int, default=300)
    parser.add_argument("--heldout", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    stream = tasks(random.Random(arguments.seed))
    for name, count in (("heldout", arguments.heldout), ("train", arguments.train)):
        rows = []
        for number in range(count):
            task = next(stream)
            folder = arguments.out / "tasks" / f"{name}-{number:04d}"
            write_task(folder, task)
            row = {
                "prompt": [{"role": "user", "content": task[0]}],
                "data_source": "command",
                "agent_name": "command",
            }
            rows.append({**row, "extra_info": {"task": str(folder.resolve())}})
        write_rows(arguments.out / f"{name}.jsonl", rows)
    print(f"{arguments.train} training and {arguments.heldout} held-out tasks in {arguments.out}")


if __name__ == "__main__":
    main()
