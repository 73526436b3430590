"""Dataset rows from JSON Lines or Parquet, checked before anything runs.

A row, in verl's schema::

    {"data_source": "calculator", "agent_name": "tool_agent",
     "prompt": [{"role": "user", "content": "What is 12 times 34?"}],
     "reward_model": {"ground_truth": "408"}, "extra_info": {}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_agent_rl.errors import DataError

Row = dict[str, Any]


def load_rows(path: str | Path) -> list[Row]:
    """All rows of a ``.jsonl`` or ``.parquet`` file.

    Raises:
        DataError: the file is missing, unreadable or empty, or a row lacks a field; says which row and what to do.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(
            f"dataset file {str(path)!r} does not exist; correct data.train / data.heldout, or write the quickstart's "
            "with `jax-agent-rl prepare calculator`"
        )
    match file.suffix:
        case ".jsonl":
            numbered = _json_lines(file)
        case ".parquet":
            numbered = _parquet(file)
        case other:
            raise DataError(f"{file}: files ending in {other!r} are not read; use .jsonl or .parquet")
    rows = [_checked(row, f"{file}, row {number}") for number, row in numbered]
    if not rows:
        raise DataError(f"{file} holds no rows")
    return rows


def _json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{file}, row {number}: not valid JSON ({error}): {line[:80]!r}") from None


def _parquet(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from None
    yield from enumerate(table.to_pylist(), 1)


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: must be an object, got {type(row).__name__}")
    prompt = row.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: 'prompt' must be a non-empty list of messages, got {prompt!r:.80}")
    for message in prompt:
        if not isinstance(message, Mapping) or "role" not in message:
            raise DataError(f"{where}: every message of 'prompt' needs a 'role', got {message!r:.80}")
    if not isinstance(row.get("data_source"), str):
        raise DataError(
            f"{where}: 'data_source' must name the task (it selects the reward), got {row.get('data_source')!r}"
        )
    return dict(row)
