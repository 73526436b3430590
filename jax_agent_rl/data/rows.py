"""Dataset rows from JSON Lines or Parquet, checked before anything runs.

A row, in verl's schema::

    {"data_source": "calculator", "agent_name": "tool_agent",
     "prompt": [{"role": "user", "content": "What is 12 times 34?"}],
     "reward_model": {"ground_truth": "408"}, "extra_info": {}}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_agent_rl.errors import DataError
from jax_agent_rl.utils.files import write_atomically
from jax_agent_rl.utils.text import did_you_mean

Row = dict[str, Any]
_TOOLS_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


def load_rows(
    path: str | Path,
    *,
    agents: Collection[str] | None = None,
    tools: Collection[str] | None = None,
    adapters: Collection[str] | None = None,
) -> list[Row]:
    """Read all rows of a ``.jsonl`` or ``.parquet`` file.

    Args:
        path: the file.
        agents: allowed values of ``agent_name``; None: any.
        tools: allowed names in ``extra_info.tool_selection`` and ``extra_info.tools_kwargs``; None: any.
        adapters: allowed values of ``adapter``; None: any.

    Raises:
        DataError: the file is missing, unreadable or empty, or a row lacks a field or has an invalid one; names the
            line or row and the fix.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(
            f"dataset file {str(path)!r} does not exist; correct data.train / data.eval, or write a "
            "built-in task's with `jax-agent-rl prepare shop` (the quickstart) or `prepare calculator` (the recipes)"
        )
    match file.suffix:
        case ".jsonl":
            placed = _json_lines(file)
        case ".parquet":
            placed = _parquet(file)
        case other:
            raise DataError(f"{file}: files ending in {other!r} are not read; use .jsonl or .parquet")
    rows = []
    for where, row in placed:
        try:
            rows.append(_checked(row, agents, tools, adapters))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    if not rows:
        raise DataError(f"{file} holds no rows")
    return rows


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                yield where, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start}); convert it") from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not valid JSON ({error}): {line[:80]!r}") from None


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from None
    yield from ((f"{file}, row {number}", row) for number, row in enumerate(table.to_pylist(), 1))


def _checked(
    row: Any,
    agents: Collection[str] | None,
    tools: Collection[str] | None,
    adapters: Collection[str] | None,
) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"must be an object, got {type(row).__name__}")
    prompt = row.get("prompt")
    extra_info = row.get("extra_info")
    has_environment = isinstance(extra_info, Mapping) and extra_info.get("environment_kwargs")  # it provides a prompt
    if not isinstance(prompt, list) or not (prompt or has_environment):
        raise DataError(f"'prompt' must be a non-empty list of messages, got {prompt!r:.80}")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"every message of 'prompt' needs a 'role', got {message!r:.80}")
        if not isinstance(message.get("content"), str):
            raise DataError(f"every message of 'prompt' needs a 'content' of text, got {message!r:.80}")
    if not isinstance(row.get("data_source"), str):
        raise DataError(f"'data_source' must name the task (it selects the reward), got {row.get('data_source')!r}")
    for field, known in (("agent_name", agents), ("adapter", adapters)):
        name = row.get(field)
        if name is not None and not isinstance(name, str):
            raise DataError(f"{field!r} must be a name or absent, got {name!r:.80}")
        if name:
            _check_known(field, name, known)
    for section in ("reward_model", "extra_info"):
        _check_object(row, section)
    _check_tools(extra_info or {}, tools)
    _check_object(extra_info or {}, "interaction_kwargs")
    return dict(row)


def _check_tools(extra_info: Mapping[str, Any], tools: Collection[str] | None) -> None:
    _check_object(extra_info, "tools_kwargs")
    for name, kinds in (extra_info.get("tools_kwargs") or {}).items():
        _check_object(extra_info["tools_kwargs"], name)
        if kinds and tools:  # a run without tools may read the same rows
            _check_known("extra_info.tools_kwargs", name, tools)
        for kind in kinds or {}:
            _check_known(f"extra_info.tools_kwargs.{name}", kind, _TOOLS_KWARGS)
            _check_object(kinds, kind)
    selection = extra_info.get("tool_selection")
    if selection is None:
        return
    if not isinstance(selection, list) or not all(isinstance(name, str) for name in selection):
        raise DataError(f"'extra_info.tool_selection' must be a list of tool names, got {selection!r:.80}")
    for name in selection:
        _check_known("extra_info.tool_selection", name, tools)


def _check_object(holder: Mapping[str, Any], name: str) -> None:
    value = holder.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise DataError(f"{name!r} must be an object or absent, got {value!r:.80}")


def _check_known(field: str, name: str, known: Collection[str] | None) -> None:
    if known is None or name in known:
        return
    raise DataError(f"{field} {name!r} is not known; {did_you_mean(name, known)}there are {sorted(known)}")


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON Lines, all or none."""
    write_atomically(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
