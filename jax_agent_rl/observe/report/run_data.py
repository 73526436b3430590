"""Reading a run folder in any state: finished, running, interrupted or damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.errors import DataError, ModelError
from jax_agent_rl.observe.run_dir import Decode, Records, RunDir, read_metrics, read_traces, read_trajectories
from jax_agent_rl.observe.selection import MAX_TOKENS, Fact, choose


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The content of a run folder.

    Attributes:
        name: the folder's name.
        config: the resolved configuration; empty if unreadable.
        metrics: records of ``metrics.jsonl``.
        trajectories: records of ``trajectories.jsonl``, a sample of them if there are many.
        total: number of trajectories in the file.
        traces: records of ``traces.jsonl``; see :mod:`jax_agent_rl.observe.sinks.traces`.
        summary: ``summary.json`` of a finished run.
        notes: messages about missing or unreadable parts.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    traces: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_run(run: Path, *, limit: int) -> RunData:
    """Read a run folder.

    Args:
        run: the folder.
        limit: number of trajectories to keep, see :func:`~jax_agent_rl.observe.selection.choose`; 0 keeps all.

    Raises:
        DataError: the folder holds neither metrics nor trajectories nor a configuration.
    """
    files = [run / name for name in ("config.json", "metrics.jsonl", "trajectories.jsonl")]
    if not any(file.is_file() for file in files):
        raise DataError(f"{run} is no run folder: it has no {', no '.join(file.name for file in files)}")
    run_dir, notes = RunDir(run), []
    metrics, traces = read_metrics(run_dir.metrics), read_traces(run_dir.traces)
    recorded = read_trajectories(run_dir.trajectories)
    trajectories, total = _read_trajectories(recorded, limit, notes)
    data = RunData(
        name=run.resolve().name,
        config=_read_object(run_dir.config, notes),
        metrics=list(metrics),
        trajectories=trajectories,
        total=total,
        traces=list(traces),
        summary=_read_object(run_dir.summary, notes) if run_dir.summary.exists() else {},
        notes=notes,
    )
    for records in (metrics, recorded, traces):
        notes += records.notes
    return data


def config_value(config: Mapping[str, Any], section: str, key: str) -> Any:
    """Return a value of a configuration, or None.

    Args:
        config: the configuration as recorded, of any shape.
        section: name of the section.
        key: name of the key in it.
    """
    found = config.get(section)
    return found.get(key) if isinstance(found, Mapping) else None


def decoder(config: Mapping[str, Any], notes: list[str]) -> Decode:
    """Return the decoder of the run's tokenizer; if that is unreadable, add a note and show ids in brackets."""
    path = config_value(config, "model", "path")
    try:
        if not isinstance(path, str):
            raise ModelError("its configuration has no model.path")
        codec = ChatCodec.from_pretrained(path)
    except ModelError as problem:
        notes.append(f"tokens are shown as ids, because the run's tokenizer cannot be read: {problem}")
        return lambda ids: "".join(f"[{i}]" for i in ids)
    return lambda ids: codec.decode(ids, skip_special_tokens=False)


def _read_trajectories(records: Records, limit: int, notes: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Read the file twice, so that only the chosen records are in memory."""
    facts = [Fact.from_record(record) for record in records]
    choice = choose(facts, limit)
    if len(choice.places) < len(facts):
        steps = len({facts[place].step for place in choice.places})
        more = f"a page takes {MAX_TOKENS:,} tokens, --limit 0 shows all" if choice.is_full else "--limit shows more"
        notes.append(
            f"{len(choice.places)} of {len(facts)} trajectories are shown, from {steps} of "
            f"{len({fact.step for fact in facts})} steps: the best and the worst of each, and random others; {more}"
        )
    return [record for place, record in enumerate(records) if place in choice.places], len(facts)


def _read_object(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it contains a {type(content).__name__}, not an object")
    except (OSError, ValueError) as error:
        notes.append(f"{file.name} cannot be read: {error}")
        return {}
    return content
