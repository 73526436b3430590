"""Reads a run folder as it is: finished, running, interrupted or damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.errors import DataError, ModelError
from jax_agent_rl.observe.metrics import RunFolder, read_records
from jax_agent_rl.observe.sample import sample
from jax_agent_rl.observe.trajectories import Decode
from jax_agent_rl.types import Trajectory

_KEYS = {field.name for field in fields(Trajectory)} | {"step", "split"}
_TURN_KEYS = {"sampled", "appended", "stop_reason", "cached_tokens", "score", "tool_calls"}


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What a run folder holds.

    Attributes:
        name: of the folder.
        config: the resolved configuration; empty if it cannot be read.
        metrics: records of ``metrics.jsonl``.
        trajectories: records of ``trajectories.jsonl``, a sample of them if there are many.
        total: how many trajectories the file has.
        traces: records of ``traces.jsonl``; see :mod:`jax_agent_rl.observe.traces`.
        summary: of a run that came to its end.
        notes: what is missing or could not be read, for the reader of the page.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    traces: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_run(run: Path, *, most: int) -> RunData:
    """Reads a run folder.

    Args:
        run: the folder.
        most: trajectories to keep, spread over steps and splits; 0 keeps all.

    Raises:
        DataError: it is no run folder: it holds neither metrics nor trajectories nor a configuration.
    """
    files = [run / name for name in ("config.json", "metrics.jsonl", "trajectories.jsonl")]
    if not any(file.is_file() for file in files):
        raise DataError(f"{run} is no run folder: there is no {', no '.join(file.name for file in files)} in it")
    folder, notes = RunFolder(run), []
    trajectories, total = _read_trajectories(folder.trajectories, most)
    if strangers := [record for record in trajectories if not _is_whole(record)]:
        trajectories = [record for record in trajectories if _is_whole(record)]
        notes.append(f"{len(strangers)} trajectories are left out: another version of the program wrote them")
    if total > len(trajectories):
        notes.append(
            f"{len(trajectories)} of {total} trajectories are shown: of every step the best, the worst, and others by "
            "chance; --most raises the number"
        )
    return RunData(
        name=run.resolve().name,
        config=_read_object(folder.config, notes),
        metrics=[record for record in read_records(folder.metrics) if "kind" in record and "step" in record],
        trajectories=trajectories,
        total=total,
        traces=read_records(folder.traces),
        summary=_read_object(folder.summary, notes) if folder.summary.exists() else {},
        notes=notes,
    )


def decoder(config: dict[str, Any], notes: list[str]) -> Decode:
    """Ids to text with the run's tokenizer; where that is gone, ids in brackets, and a note."""
    try:
        codec = ChatCodec.from_pretrained(config["model"]["path"])
    except (KeyError, ModelError) as error:
        problem = "its configuration is missing" if isinstance(error, KeyError) else str(error)
        notes.append(f"tokens are shown as ids, because the run's tokenizer cannot be read: {problem}")
        return lambda ids: "".join(f"[{i}]" for i in ids)
    return lambda ids: codec.decode(ids, skip_special_tokens=False)


def _read_trajectories(file: Path, most: int) -> tuple[list[dict[str, Any]], int]:
    """Reads twice where there are more than are wanted, so that memory holds only those that are."""
    if not file.exists():
        return [], 0
    facts = [(r["split"], r["step"], r["group_id"], r["reward"]) for r in _records(file)]
    if not most or len(facts) <= most:
        return list(_records(file)), len(facts)
    wanted = _spread(facts, most)
    return [record for place, record in enumerate(_records(file)) if place in wanted], len(facts)


def _spread(facts: Sequence[tuple[str, int, str, float]], most: int) -> set[int]:
    """Places of a sample with the same share of every step and split."""
    parts: dict[tuple[str, int], list[int]] = {}
    for place, (split, step, _, _) in enumerate(facts):
        parts.setdefault((split, step), []).append(place)
    share = max(2, most // len(parts))
    reward: Callable[[int], float] = lambda place: facts[place][3]  # noqa: E731
    group: Callable[[int], str] = lambda place: facts[place][2]  # noqa: E731
    chosen: set[int] = set()
    for (_, step), places in parts.items():
        chosen.update(sample(places, share, reward=reward, group=group, seed=step))
    return chosen


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Complete records; a line that a crash cut off is left out."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _is_whole(record: Mapping[str, Any]) -> bool:
    return _KEYS <= record.keys() and all(_TURN_KEYS <= turn.keys() for turn in record["turns"])


def _read_object(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{file.name} cannot be read: {error}")
        return {}
    return content if isinstance(content, dict) else {}
