"""Reads a run folder as it is: finished, running, interrupted or damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.errors import DataError, ModelError
from jax_agent_rl.observe.metrics import RunFolder
from jax_agent_rl.observe.records import Records, metrics_of, traces_of, trajectories_of
from jax_agent_rl.observe.sample import sample
from jax_agent_rl.observe.trajectories import Decode


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
    metrics, traces = metrics_of(folder.metrics), traces_of(folder.traces)
    recorded = trajectories_of(folder.trajectories)
    trajectories, total = _read_trajectories(recorded, most)
    if total > len(trajectories):
        notes.append(
            f"{len(trajectories)} of {total} trajectories are shown: of every step the best, the worst, and others by "
            "chance; --most raises the number"
        )
    data = RunData(
        name=run.resolve().name,
        config=_read_object(folder.config, notes),
        metrics=list(metrics),
        trajectories=trajectories,
        total=total,
        traces=list(traces),
        summary=_read_object(folder.summary, notes) if folder.summary.exists() else {},
        notes=notes,
    )
    for records in (metrics, recorded, traces):
        notes += records.notes
    return data


def value_at(config: Mapping[str, Any], section: str, key: str) -> Any:
    """A value of a configuration; None where it is missing."""
    found = config.get(section)
    return found.get(key) if isinstance(found, Mapping) else None


def decoder(config: Mapping[str, Any], notes: list[str]) -> Decode:
    """Ids to text with the run's tokenizer; where that is gone, ids in brackets, and a note."""
    path = value_at(config, "model", "path")
    try:
        if not isinstance(path, str):
            raise ModelError("its configuration does not say where the model is")
        codec = ChatCodec.from_pretrained(path)
    except ModelError as problem:
        notes.append(f"tokens are shown as ids, because the run's tokenizer cannot be read: {problem}")
        return lambda ids: "".join(f"[{i}]" for i in ids)
    return lambda ids: codec.decode(ids, skip_special_tokens=False)


def _read_trajectories(records: Records, most: int) -> tuple[list[dict[str, Any]], int]:
    """Reads twice where there are more than are wanted, so that memory holds only those that are."""
    facts = [(r["split"], r["step"], r["group_id"], r["reward"]) for r in records]
    if not most or len(facts) <= most:
        return list(records), len(facts)
    wanted = _spread(facts, most)
    return [record for place, record in enumerate(records) if place in wanted], len(facts)


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


def _read_object(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds no object but a {type(content).__name__}")
    except (OSError, ValueError) as error:
        notes.append(f"{file.name} cannot be read: {error}")
        return {}
    return content
