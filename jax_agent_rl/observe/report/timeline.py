"""When engine and learner worked: phases of ``metrics.jsonl`` and traced trajectories, on one time axis.

Times are seconds since the first of them. Pauses longer than :data:`MAX_PAUSE_SECONDS` (the run was stopped and
resumed) are cut out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

MAX_PAUSE_SECONDS = 120.0
MAX_TRACES = 400  # the newest ones


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeAxis:
    """Wall-clock time without long pauses.

    Attributes:
        starts: begin of each stretch, seconds since the epoch.
        offsets: what is subtracted from the times of each stretch.
        cuts: positions of the cuts on the axis.
    """

    starts: tuple[float, ...]
    offsets: tuple[float, ...]
    cuts: tuple[float, ...]

    @classmethod
    def from_intervals(cls, intervals: Iterable[tuple[float, float]]) -> TimeAxis:
        """Return the axis of intervals ``(begin, end)``."""
        ordered = sorted(intervals)
        if not ordered:
            return cls(starts=(0.0,), offsets=(0.0,), cuts=())
        ends = accumulate((end for _, end in ordered), max)
        starts, offsets = [ordered[0][0]], [ordered[0][0]]
        for (begin, _), end in zip(ordered[1:], ends, strict=False):
            if begin - end > MAX_PAUSE_SECONDS:
                starts.append(begin)
                offsets.append(offsets[-1] + begin - end)
        cuts = tuple(begin - off for begin, off in zip(starts[1:], offsets[1:], strict=True))
        return cls(starts=tuple(starts), offsets=tuple(offsets), cuts=cuts)

    def __call__(self, time: float) -> float:
        """Convert a time to seconds on the axis."""
        which = max(0, bisect_right(self.starts, time) - 1)
        return round(time - self.offsets[which], 3)


def timeline(
    metrics: Sequence[Mapping[str, Any]], traces: Sequence[Mapping[str, Any]], numbers: Mapping[str, int]
) -> dict[str, Any]:
    """Return the timeline as JSON.

    Args:
        metrics: records of ``metrics.jsonl``; their ``phase_seconds`` are ``[name, begin, end]`` since the epoch, and
            ``engine_busy_share`` is a share of the phase ``engine``.
        traces: records of ``traces.jsonl``.
        numbers: positions of trajectories on the page, by id.

    Returns:
        ``phases [{name, from, to, step}]``, ``engine [{from, to, busy, step}]``, ``updates [time]`` of the weights,
        ``traces [{id, at, spans [{name, from, to, note}]}]``, ``cuts`` and ``seconds``.
    """
    traces = sorted(traces, key=_began)[-MAX_TRACES:]
    phases = [(name, begin, end, r["step"]) for r in metrics for name, begin, end in r.get("phase_seconds") or ()]
    busy = {r["step"]: r["engine_busy_share"] for r in metrics if "engine_busy_share" in r}
    spans = [(s["start_ns"] / 1e9, s["end_ns"] / 1e9) for t in traces for s in t["spans"]]
    axis = TimeAxis.from_intervals([*((begin, end) for _, begin, end, _ in phases), *spans])
    ends = [end for _, _, end, _ in phases] + [end for _, end in spans]
    return {
        "phases": [
            {"name": name, "from": axis(begin), "to": axis(end), "step": step}
            for name, begin, end, step in phases
            if name != "engine"
        ],
        "engine": [
            {"from": axis(begin), "to": axis(end), "busy": round(busy.get(step, 0.0), 4), "step": step}
            for name, begin, end, step in phases
            if name == "engine"
        ],
        "updates": [axis(end) for name, _, end, _ in phases if name == "publish"],
        "traces": [_lane(trace, axis, numbers) for trace in traces],
        "cuts": list(axis.cuts),
        "seconds": axis(max(ends)) if ends else 0.0,
    }


def _began(trace: Mapping[str, Any]) -> int:
    return min(span["start_ns"] for span in trace["spans"])


def _lane(trace: Mapping[str, Any], axis: TimeAxis, numbers: Mapping[str, int]) -> dict[str, Any]:
    spans = [
        {"name": s["name"], "from": axis(s["start_ns"] / 1e9), "to": axis(s["end_ns"] / 1e9), "note": _note(s)}
        for s in trace["spans"]
    ]
    return {"id": trace["trajectory_id"], "at": numbers.get(trace["trajectory_id"], -1), "spans": spans}


def _note(span: Mapping[str, Any]) -> str:
    """Return what a span's label adds to its name."""
    about = "" if span["name"] == "run" else span["about"]
    parts = (about, span["attributes"].get("stop_reason"), span["attributes"].get("tool_error"), span["error"])
    return ", ".join(part for part in parts if part)
