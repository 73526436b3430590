"""The curves of a run, ``reward.png``, and the timeline of engine and learner.

A chart says which metrics it shows and what to look for. The timeline has phases of
``metrics.jsonl`` and traced trajectories on one axis, in seconds since the first of them; pauses
longer than :data:`MAX_PAUSE_SECONDS` (the run was stopped and resumed) are cut out.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from jax_agent_rl.utils.files import replacing
from jax_agent_rl.validation import is_number

MAX_POINTS = 600
"""Points of a line; longer ones keep the smallest and largest value of every stretch, so no spike
is lost."""
ROUNDING = 1e-8
"""Values up to this one are 0 but for rounding: a KL of a policy from itself."""
MAX_BARS = 300
"""Bars of a stack; in longer ones, each bar is the sum of several steps."""
_CHARTED_ELSEWHERE = (
    "kind",
    "step",
    "accounting",
    "finish_reasons",
    "tool_errors_by_kind",
    "staleness_histogram",
)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart over training steps.

    Attributes:
        title, unit: heading and unit of the values.
        hint: how to read it.
        lines: keys of ``metrics.jsonl`` records by label; lines without values and charts without
            lines are omitted.
        band: keys of the lower and upper edge of a band around the first line.
        kind: kind of the records.
        scale: axis of the values; ``share`` is from 0 to 1, shown in per cent.
        hides_zero: omit a line that is 0 at every step, since the run has no such thing: with one
            update per step, the policy is not compared with another one.
    """

    title: str
    hint: str
    lines: Mapping[str, str]
    band: tuple[str, str] | None = None
    kind: Literal["step", "evaluation"] = "step"
    unit: str = ""
    scale: Literal["linear", "log", "share"] = "linear"
    hides_zero: bool = False


CHARTS = (
    Chart(
        title="Reward",
        hint=(
            "Mean of each step's trajectories, between the worst and the best. It should rise; a"
            " band of zero width leaves nothing to learn from."
        ),
        lines={"mean": "reward_mean"},
        band=("reward_min", "reward_max"),
    ),
    Chart(
        title="Held-out accuracy",
        hint=(
            "Share of right answers on rows that are never trained on: the mean of the reward's"
            " part 'accuracy', or of the whole score if it has none. A lost trajectory counts as"
            " wrong."
        ),
        lines={"accuracy": "accuracy"},
        kind="evaluation",
        scale="share",
    ),
    Chart(
        title="Response length",
        hint=(
            "Sampled and inserted tokens. A mean at the upper edge means that answers are cut off."
        ),
        lines={"response": "response_tokens_mean", "sampled": "sampled_tokens_mean"},
        band=("response_tokens_min", "response_tokens_max"),
        unit="tokens",
    ),
    Chart(
        title="Turns and tool calls",
        hint="Means per trajectory.",
        lines={"turns": "turns_mean", "tool calls": "tool_calls_mean"},
        band=("turns_min", "turns_max"),
    ),
    Chart(
        title="Entropy",
        hint=(
            "Entropy of the policy over sampled tokens. It falls as the policy becomes certain;"
            " near zero early on, exploration has ended."
        ),
        lines={"entropy": "entropy"},
        unit="nats",
    ),
    Chart(
        title="KL",
        hint=(
            "From the policy before the step, from the reference, and of the rollout from the"
            " learner."
        ),
        lines={"step": "kl", "reference": "kl_reference", "rollout": "rollout_kl"},
        unit="nats",
        hides_zero=True,
    ),
    Chart(
        title="Engine/learner log-prob gap",
        hint=(
            "Difference between log-probs of engine and learner for the same weights; it should not"
            " grow. In asynchronous modes stale weights are part of it."
        ),
        lines={"max": "logprob_gap_max", "mean": "logprob_gap_mean"},
        unit="nats",
        scale="log",
    ),
    Chart(
        title="Throughput",
        hint="Tokens sampled by the engines, and tokens trained on by the learner while it works.",
        lines={"rollout": "rollout_tokens_per_second", "learner": "learner_tokens_per_second"},
        unit="tokens/s",
    ),
    Chart(
        title="Busy and idle",
        hint=(
            "Share of the time. An idle learner waits for rollouts: add engines, or train"
            " asynchronously."
        ),
        lines={"learner idle": "learner_idle_share", "engine busy": "engine_busy_share"},
        scale="share",
    ),
    Chart(
        title="Seconds per step",
        hint="From one finished step to the next, and its parts.",
        lines={
            "step": "step_seconds",
            "rollout": "rollout_seconds",
            "learner": "learner_seconds",
            "weight update": "weight_update_seconds",
        },
        unit="s",
    ),
    Chart(
        title="Loss and gradient",
        hint="Policy-gradient losses need not fall; an exploding gradient norm needs attention.",
        lines={"loss": "loss", "gradient norm": "grad_norm"},
    ),
    Chart(
        title="Clipped tokens",
        hint="Tokens whose ratio left the clip range.",
        lines={"clipped": "clip_fraction"},
        scale="share",
        hides_zero=True,
    ),
    Chart(
        title="Staleness",
        hint="Age of the tokens trained on, in versions of the weights.",
        lines={"mean": "staleness_mean", "max": "staleness_max"},
        unit="versions",
        hides_zero=True,
    ),
)


def charts(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return all charts of a run as JSON.

    Keys: ``title, hint, unit, scale, kind, lines [{name, x, y, low?, high?, reach?}]``. ``kind`` is
    ``lines``, or ``stack`` for counts that add up, whose bars cover ``every`` steps each. Where not
    every step is drawn, a step has the value of the nearest drawn one, at most ``reach`` away.
    Metrics that no chart names follow as ``more``, one chart each. A chart without data is omitted;
    :func:`zero_metrics` names metrics that are 0 throughout.
    """
    made = [_line_chart(chart, metrics) for chart in CHARTS]
    made += [
        _stack("Dropped trajectories", "Started but not trained on, by reason.", _dropped(metrics)),
        _stack("How trajectories ended", "By reason.", _counts(metrics, "finish_reasons")),
        _stack("Tool errors", "By kind.", _counts(metrics, "tool_errors_by_kind")),
    ]
    made += [_line_chart(chart, metrics) | {"more": True} for chart in _other_charts(metrics)]
    return [chart for chart in made if chart["lines"]]


def zero_metrics(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of step metrics that no chart shows because they are 0 at every step."""
    return [
        chart.title for chart in _other_charts(metrics) if not _line_chart(chart, metrics)["lines"]
    ]


def thinned(
    points: Sequence[tuple[float, ...]], limit: int = MAX_POINTS
) -> list[tuple[float, ...]]:
    """Thin out points ``(x, y, …)``, ordered by x, to about ``limit``.

    The first and last point stay, and those with the least and the greatest y of every stretch.
    """
    if len(points) <= limit:
        return list(points)
    length = math.ceil(2 * len(points) / limit)
    stretches = (points[begin : begin + length] for begin in range(0, len(points), length))
    extremes = (
        {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])} for part in stretches
    )
    return sorted({points[0], points[-1]}.union(*extremes))


def _line_chart(chart: Chart, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    records = [record for record in metrics if record["kind"] == chart.kind]
    lines = []
    for number, (name, key) in enumerate(chart.lines.items()):
        keys = (key, *((chart.band or ()) if number == 0 else ()))
        points = [
            (float(r["step"]), *(float(r[key]) for key in keys))
            for r in records
            if all(is_number(r.get(key)) for key in keys)
        ]
        has_values = (
            any(abs(y) > ROUNDING for _, y, *_ in points) if chart.hides_zero else bool(points)
        )
        if has_values:
            kept = thinned(points)
            named = dict(zip(("x", "y", "low", "high"), zip(*kept, strict=True), strict=False))
            rounded = {
                axis: [float(f"{value:.6g}") for value in column] for axis, column in named.items()
            }
            lines.append(
                {"name": name} | rounded | _reach([x for x, *_ in points], [x for x, *_ in kept])
            )
    head = {"title": chart.title, "hint": chart.hint, "unit": chart.unit, "scale": chart.scale}
    return head | {"kind": "lines", "lines": lines}


def _stack(title: str, hint: str, counts: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Return a stack of bars per step, reasons in order of their sum."""
    sums: Counter[str] = Counter()
    for named in counts.values():
        sums.update(named)
    steps = sorted(counts)
    every = math.ceil(len(steps) / MAX_BARS) or 1
    bars = [steps[begin : begin + every] for begin in range(0, len(steps), every)]
    middles = [bar[len(bar) // 2] for bar in bars]
    lines = [
        {
            "name": name,
            "x": middles,
            "y": [sum(counts[step].get(name, 0) for step in bar) for bar in bars],
        }
        | _reach(steps, middles)
        for name, total in sums.most_common()
        if total
    ]
    if every > 1:
        hint += f" Each bar is the sum of {every} steps."
    head = {
        "title": title,
        "hint": hint,
        "unit": "trajectories",
        "scale": "linear",
        "kind": "stack",
        "every": every,
    }
    return head | {"lines": lines}


def _reach(steps: Sequence[float], drawn: Sequence[float]) -> dict[str, float]:
    """Return the largest distance of a step to its nearest drawn one as ``reach``; nothing where all are drawn."""

    def distance(step: float) -> float:
        place = bisect_left(drawn, step)
        return min(abs(step - near) for near in drawn[max(0, place - 1) : place + 1])

    reach = max(map(distance, steps), default=0)
    return {"reach": reach} if reach else {}


def _counts(metrics: Iterable[Mapping[str, Any]], key: str) -> dict[int, Mapping[str, float]]:
    return {
        r["step"]: r[key]
        for r in metrics
        if r["kind"] == "step" and isinstance(r.get(key), Mapping)
    }


def _dropped(metrics: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, float]]:
    """Return each step's own drops: the accounting is cumulative."""
    dropped, before = {}, Counter()
    for step, counts in _counts(metrics, "accounting").items():
        now = Counter(
            {
                key.removeprefix("dropped/"): n
                for key, n in counts.items()
                if key.startswith("dropped/")
            }
        )
        dropped[step], before = now - before, now
    return dropped


def _other_charts(metrics: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return a chart for every number that none of :data:`CHARTS` shows."""
    shown = {
        key
        for chart in CHARTS
        for key in (*chart.lines.values(), *(chart.band or ()), *_CHARTED_ELSEWHERE)
    }
    keys = {
        key for r in metrics if r["kind"] == "step" for key, value in r.items() if is_number(value)
    }
    return [
        Chart(title=key, hint="", lines={key: key}, hides_zero=True) for key in sorted(keys - shown)
    ]


def reward_plot(records: Sequence[Mapping[str, Any]], file: Path, *, title: str) -> None:
    """Draw reward per step and held-out accuracy, of ``metrics.jsonl``, to a PNG.

    Raises:
        StorageError: the file cannot be written.
    """
    lines = (("reward_mean", "training reward"), ("accuracy", "held-out accuracy"))
    _plot(
        records,
        file,
        lines=lines,
        form="{:.0%}",
        ylabel="reward / accuracy",
        ylim=(-0.03, 1.08),
        title=title,
    )


def loss_plot(records: Sequence[Mapping[str, Any]], file: Path, *, title: str) -> None:
    """Draw the losses of steps and of held-out rows; for the arguments see :func:`reward_plot`."""
    lines = (("loss", "training loss"), ("loss", "held-out loss"))
    _plot(records, file, lines=lines, form="{:.2f}", ylabel="loss [nats]", title=title)


def _plot(
    records: Sequence[Mapping[str, Any]],
    file: Path,
    *,
    lines: Sequence[tuple[str, str]],
    form: str,
    **axes_settings: Any,
) -> None:
    """Draw one number of the steps, plain and smoothed, and one of the evaluations, each written in a form."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    (of_steps, label), (of_evaluations, heldout_label) = lines
    steps = [r for r in records if r["kind"] == "step"]
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    figure = Figure(figsize=(8, 4.5), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if steps:
        x, y = [r["step"] for r in steps], [r[of_steps] for r in steps]
        axes.plot(x, y, color="#9bbcd8", marker=".", label=f"{label} (step mean)")
        axes.plot(x, _smooth(y), color="#1f6fb2", label=f"{label} (smoothed)")
    if evaluations:
        x, y = [r["step"] for r in evaluations], [r[of_evaluations] for r in evaluations]
        axes.plot(x, y, "o--", color="#d1495b", label=heldout_label)
        for step, value in zip(x, y, strict=True):
            axes.annotate(
                form.format(value), (step, value), textcoords="offset points", xytext=(6, 6)
            )
    axes.set(xlabel="training step", **axes_settings)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    with replacing(file) as stream:
        figure.savefig(stream, format=file.suffix.lstrip("."))


def _smooth(values: Sequence[float], weight: float = 0.6) -> list[float]:
    """Return the exponential moving average, started at the first value."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else weight * out[-1] + (1 - weight) * value)
    return out


_ENGINE_PHASES = (
    "engine",
    "evaluate",
)  # drawn in this order: where both overlap, the evaluation stays visible
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
    metrics: Sequence[Mapping[str, Any]],
    traces: Sequence[Mapping[str, Any]],
    numbers: Mapping[str, int],
) -> dict[str, Any]:
    """Return the timeline as JSON.

    Args:
        metrics: records of ``metrics.jsonl``; their ``phase_seconds`` are ``[name, begin, end]``
            since the epoch, and ``engine_busy_share`` is a share of the phase ``engine``.
        traces: records of ``traces.jsonl``, as :func:`newest_traces` returns them.
        numbers: positions of trajectories on the page, by id.

    Returns:
        ``phases [{name, from, to, step}]``, ``engine [{name, from, to, busy?, step}]``, ``updates
        [time]`` of the weights, ``traces [{id, at, spans [{name, from, to, note}]}]``, ``cuts`` and
        ``seconds``. Engines work for training (``name`` is ``engine``), and for evaluations
        (``evaluate``), whose busy share is not recorded.
    """
    phases = [
        (name, begin, end, r["step"])
        for r in metrics
        for name, begin, end in r.get("phase_seconds") or ()
    ]
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
            {"name": name, "from": axis(begin), "to": axis(end), "step": step}
            | ({"busy": round(busy.get(step, 0.0), 4)} if name == "engine" else {})
            for work in _ENGINE_PHASES
            for name, begin, end, step in phases
            if name == work
        ],
        "updates": [axis(end) for name, _, end, _ in phases if name == "publish"],
        "traces": [_lane(trace, axis, numbers) for trace in traces],
        "cuts": list(axis.cuts),
        "seconds": axis(max(ends)) if ends else 0.0,
    }


def newest_traces(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last :data:`MAX_TRACES` of ``traces.jsonl`` in the order in which they began."""
    newest = heapq.nlargest(
        MAX_TRACES, enumerate(records), key=lambda placed: (_began(placed[1]), placed[0])
    )
    return [record for _, record in reversed(newest)]


def _began(trace: Mapping[str, Any]) -> int:
    return min(span["start_ns"] for span in trace["spans"])


def _lane(trace: Mapping[str, Any], axis: TimeAxis, numbers: Mapping[str, int]) -> dict[str, Any]:
    spans = [
        {
            "name": s["name"],
            "from": axis(s["start_ns"] / 1e9),
            "to": axis(s["end_ns"] / 1e9),
            "note": _note(s),
        }
        for s in trace["spans"]
    ]
    return {
        "id": trace["trajectory_id"],
        "at": numbers.get(trace["trajectory_id"], -1),
        "spans": spans,
    }


def _note(span: Mapping[str, Any]) -> str:
    """Return what a span's label adds to its name."""
    about = "" if span["name"] == "run" else span["about"]
    parts = (
        about,
        span["attributes"].get("stop_reason"),
        span["attributes"].get("tool_error"),
        span["error"],
    )
    return ", ".join(part for part in parts if part)
