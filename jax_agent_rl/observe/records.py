"""Records of a run folder, as far as they can be read: the run may be going on, have been cut off, or be damaged.

A line that is no record of its kind is left out and counted; :attr:`Records.notes` says so to whoever reads the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jax_agent_rl.reasons import FinishReason, StopReason
from jax_agent_rl.types import Trajectory

_TRAJECTORY_KEYS = {field.name for field in fields(Trajectory)} | {"step", "split"}
_TURN_KEYS = {"sampled", "appended", "stop_reason", "cached_tokens", "score", "tool_calls"}
_CALL_KEYS = {"name", "seconds", "error"}
_FINISH_REASONS, _STOP_REASONS = tuple(FinishReason), tuple(StopReason)
_SPAN_KEYS = {"name", "about", "start_ns", "end_ns", "attributes", "error"}

Record = dict[str, Any]


@dataclass(kw_only=True)
class Records:
    """The records of a JSON Lines file. Every iteration reads the file again, and holds one record at a time.

    Attributes:
        file: it need not be there.
        is_whole: whether an object has what is read of a record.
        damaged: lines without an object that the last iteration left out.
        strange: objects that it left out, because they are not whole: another version wrote them, perhaps.
    """

    file: Path
    is_whole: Callable[[Record], bool]
    damaged: int = 0
    strange: int = 0

    def __iter__(self) -> Iterator[Record]:
        self.damaged = self.strange = 0
        if not self.file.exists():
            return
        with self.file.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                if (record := _object(line)) is None:
                    self.damaged += 1
                elif not self.is_whole(record):
                    self.strange += 1
                else:
                    yield record

    @property
    def notes(self) -> list[str]:
        """What the last iteration left out, for people."""
        reasons = {"cut off or damaged": self.damaged, "not as this version writes them": self.strange}
        return [f"lines left out of {self.file.name}: {n} ({reason})" for reason, n in reasons.items() if n]


def metrics_of(file: Path) -> Records:
    """Those of ``metrics.jsonl``: each has its ``kind`` and ``step``."""
    return Records(file=file, is_whole=lambda record: isinstance(record.get("kind"), str) and has_step(record))


def trajectories_of(file: Path) -> Records:
    """Those of ``trajectories.jsonl``, see :func:`jax_agent_rl.observe.metrics.trajectory_record`."""
    return Records(file=file, is_whole=_is_trajectory)


def traces_of(file: Path) -> Records:
    """Those of ``traces.jsonl``, see :func:`jax_agent_rl.observe.sinks.traces.trace_record`."""
    return Records(file=file, is_whole=_is_trace)


def has_step(record: Record) -> bool:
    """Whether a record says which step it belongs to."""
    return isinstance(record.get("step"), int)


def is_number(value: Any) -> bool:
    """True for a finite int or float; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _object(line: str) -> Record | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _is_trajectory(record: Record) -> bool:
    return (
        record.keys() >= _TRAJECTORY_KEYS
        and has_step(record)
        and is_number(record["reward"])
        and record["finish_reason"] in _FINISH_REASONS
        and _all(record["turns"], _is_turn)
        and _all(record["segments"], _is_trajectory)
    )


def _is_turn(turn: Record) -> bool:
    return (
        turn.keys() >= _TURN_KEYS
        and turn["stop_reason"] in _STOP_REASONS
        and _all(turn["tool_calls"], lambda call: call.keys() >= _CALL_KEYS)
    )


def _is_trace(record: Record) -> bool:
    spans = record.get("spans")
    return "trajectory_id" in record and bool(spans) and _all(spans, lambda span: span.keys() >= _SPAN_KEYS)


def _all(items: Any, fits: Callable[[Record], bool]) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) and fits(item) for item in items)
