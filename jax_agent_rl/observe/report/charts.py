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
from pathlib import Path
from typing import Any, Literal

from jax_agent_rl.checks import is_number
from jax_agent_rl.utils.files import replacing

MAX_POINTS = 600
"""Points of a line; longer lines keep the smallest and largest value of every stretch, so no spike
is lost."""
ROUNDING = 1e-8
"""Values up to this one are 0 except for rounding, as the KL of a policy from itself."""
MAX_BARS = 300
"""Bars of a stack; in longer stacks, each bar is the sum of several steps."""
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
        title: heading of the chart.
        hint: how to read it.
        lines: keys of ``metrics.jsonl`` records by label; lines without values and charts without
            lines are omitted.
        band: keys of the lower and upper edge of a band around the first line.
        kind: kind of the records.
        unit: unit of the values; empty if they have none.
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
    Chart(
        title="Observation loss",
        hint=(
            "Cross-entropy of what tools, environments and users answered. It falls as the policy"
            " learns what its actions do."
        ),
        lines={"loss": "observation_loss"},
        unit="nats",
    ),
    Chart(
        title="Trajectories with feedback",
        hint=(
            "Share with an error of a tool or a text of the reward function: self-distillation"
            " teaches nothing in the others."
        ),
        lines={"with feedback": "feedback_share"},
        scale="share",
    ),
    Chart(
        title="Curriculum: groups drawn",
        hint="By the pool that their rows were drawn from.",
        lines={
            "new": "curriculum/drawn_new",
            "normal": "curriculum/drawn_normal",
            "easy": "curriculum/drawn_easy",
            "hard": "curriculum/drawn_hard",
        },
        unit="groups",
    ),
    Chart(
        title="Curriculum: pools",
        hint="Rows, or data sources, by their running pass rate.",
        lines={
            "normal": "curriculum/normal",
            "easy": "curriculum/easy",
            "hard": "curriculum/hard",
        },
    ),
    Chart(
        title="Curriculum: accuracy",
        hint=(
            "Estimate for the training data: rows that are drawn less often weigh more. The reward"
            " above is of what was drawn."
        ),
        lines={"accuracy": "curriculum/accuracy"},
        scale="share",
    ),
    Chart(
        title="Curriculum: rows passed over",
        hint="Since the step before. Many mean that hardly any row is worth a group.",
        lines={"passed over": "curriculum/passed_over"},
        unit="rows",
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
    all_charts = [_line_chart(chart, metrics) for chart in CHARTS]
    all_charts += [
        _stack("Dropped trajectories", "Started but not trained on, by reason.", _dropped(metrics)),
        _stack("How trajectories ended", "By reason.", _counts(metrics, "finish_reasons")),
        _stack("Tool errors", "By kind.", _counts(metrics, "tool_errors_by_kind")),
    ]
    for chart in _other_charts(metrics):
        all_charts.append(_line_chart(chart, metrics) | {"more": True})
    return [chart for chart in all_charts if chart["lines"]]


def zero_metrics(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of step metrics that no chart shows because they are 0 at every step."""
    names = []
    for chart in _other_charts(metrics):
        if not _line_chart(chart, metrics)["lines"]:
            names.append(chart.title)
    return names


def thinned(
    points: Sequence[tuple[float, ...]], limit: int = MAX_POINTS
) -> list[tuple[float, ...]]:
    """Thin out points ``(x, y, …)``, ordered by x, to about ``limit``.

    The first and last point stay, and the points with the least and the greatest y of every
    stretch.
    """
    if len(points) <= limit:
        return list(points)

    chosen = {points[0], points[-1]}
    length = math.ceil(2 * len(points) / limit)
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        chosen.add(min(stretch, key=lambda point: point[1]))
        chosen.add(max(stretch, key=lambda point: point[1]))
    return sorted(chosen)


def _line_chart(chart: Chart, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a chart of lines as JSON, with the lines that have values."""
    records = [record for record in metrics if record["kind"] == chart.kind]
    lines = []
    for number, (name, key) in enumerate(chart.lines.items()):
        keys = [key]
        if number == 0 and chart.band is not None:
            keys += chart.band
        points = _points(records, keys)
        if not points:
            continue
        if chart.hides_zero and not any(abs(point[1]) > ROUNDING for point in points):
            continue

        drawn = thinned(points)
        line: dict[str, Any] = {"name": name}
        columns = zip(*drawn, strict=True)
        for axis, column in zip(("x", "y", "low", "high"), columns, strict=False):
            line[axis] = [float(f"{value:.6g}") for value in column]
        line |= _reach([point[0] for point in points], [point[0] for point in drawn])
        lines.append(line)
    return {
        "title": chart.title,
        "hint": chart.hint,
        "unit": chart.unit,
        "scale": chart.scale,
        "kind": "lines",
        "lines": lines,
    }


def _points(records: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[tuple[float, ...]]:
    """Return ``(step, value of each key)`` of the records that have all of them."""
    points = []
    for record in records:
        if all(is_number(record.get(key)) for key in keys):
            values = [float(record[key]) for key in keys]
            points.append((float(record["step"]), *values))
    return points


def _stack(title: str, hint: str, counts: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Return a stack of bars as JSON, reasons in order of their sum.

    Args:
        counts: counts of each step, by reason.
    """
    sums: Counter[str] = Counter()
    for step_counts in counts.values():
        sums.update(step_counts)

    steps = sorted(counts)
    every = math.ceil(len(steps) / MAX_BARS) or 1
    bars = [steps[start : start + every] for start in range(0, len(steps), every)]
    middles = [bar[len(bar) // 2] for bar in bars]

    lines = []
    for name, total in sums.most_common():
        if not total:
            continue
        heights = []
        for bar in bars:
            heights.append(sum(counts[step].get(name, 0) for step in bar))
        lines.append({"name": name, "x": middles, "y": heights} | _reach(steps, middles))

    if every > 1:
        hint += f" Each bar is the sum of {every} steps."
    return {
        "title": title,
        "hint": hint,
        "unit": "trajectories",
        "scale": "linear",
        "kind": "stack",
        "every": every,
        "lines": lines,
    }


def _reach(steps: Sequence[float], drawn: Sequence[float]) -> dict[str, float]:
    """Return the largest distance of a step to its nearest drawn one as ``reach``.

    Nothing if all steps are drawn.
    """

    def distance(step: float) -> float:
        index = bisect_left(drawn, step)
        return min(abs(step - neighbour) for neighbour in drawn[max(0, index - 1) : index + 1])

    reach = max((distance(step) for step in steps), default=0)
    if not reach:
        return {}
    return {"reach": reach}


def _counts(metrics: Iterable[Mapping[str, Any]], key: str) -> dict[int, Mapping[str, float]]:
    """Return the counts that steps have under a key, by step."""
    counts = {}
    for record in metrics:
        if record["kind"] == "step" and isinstance(record.get(key), Mapping):
            counts[record["step"]] = record[key]
    return counts


def _dropped(metrics: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, float]]:
    """Return what each step dropped, by reason; the accounting is cumulative."""
    dropped = {}
    previous_total = Counter()
    for step, counts in _counts(metrics, "accounting").items():
        count_by_reason = {}
        for key, count in counts.items():
            if key.startswith("dropped/"):
                count_by_reason[key.removeprefix("dropped/")] = count
        total = Counter(count_by_reason)
        dropped[step] = total - previous_total
        previous_total = total
    return dropped


def _other_charts(metrics: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return a chart for every number that none of :data:`CHARTS` shows."""
    charted_keys: set[str] = set(_CHARTED_ELSEWHERE)
    for chart in CHARTS:
        charted_keys.update(chart.lines.values())
        charted_keys.update(chart.band or ())

    keys = set()
    for record in metrics:
        if record["kind"] == "step":
            keys.update(key for key, value in record.items() if is_number(value))

    other_charts = []
    for key in sorted(keys - charted_keys):
        other_charts.append(Chart(title=key, hint="", lines={key: key}, hides_zero=True))
    return other_charts


def reward_plot(records: Sequence[Mapping[str, Any]], file: Path, *, title: str) -> None:
    """Draw reward per step and held-out accuracy to a PNG.

    Args:
        records: records of ``metrics.jsonl``.

    Raises:
        StorageError: the file cannot be written.
    """
    _plot(
        records,
        file,
        step_line=("reward_mean", "training reward"),
        evaluation_line=("accuracy", "held-out accuracy"),
        value_format="{:.0%}",
        ylabel="reward / accuracy",
        ylim=(-0.03, 1.08),
        title=title,
    )


def loss_plot(records: Sequence[Mapping[str, Any]], file: Path, *, title: str) -> None:
    """Draw the losses of steps and of held-out rows; for the arguments see :func:`reward_plot`."""
    _plot(
        records,
        file,
        step_line=("loss", "training loss"),
        evaluation_line=("loss", "held-out loss"),
        value_format="{:.2f}",
        ylabel="loss [nats]",
        title=title,
    )


def _plot(
    records: Sequence[Mapping[str, Any]],
    file: Path,
    *,
    step_line: tuple[str, str],
    evaluation_line: tuple[str, str],
    value_format: str,
    **axes_settings: Any,
) -> None:
    """Draw one number of the steps, plain and smoothed, and one of the evaluations.

    Args:
        step_line, evaluation_line: key and label of the number.
        value_format: format of the text at each evaluation.
        axes_settings: settings of matplotlib's axes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    figure = Figure(figsize=(8, 4.5), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots()

    if steps:
        key, label = step_line
        x = [record["step"] for record in steps]
        y = [record[key] for record in steps]
        axes.plot(x, y, color="#9bbcd8", marker=".", label=f"{label} (step mean)")
        axes.plot(x, _smooth(y), color="#1f6fb2", label=f"{label} (smoothed)")
    if evaluations:
        key, label = evaluation_line
        x = [record["step"] for record in evaluations]
        y = [record[key] for record in evaluations]
        axes.plot(x, y, "o--", color="#d1495b", label=label)
        for step, value in zip(x, y, strict=True):
            text = value_format.format(value)
            axes.annotate(text, (step, value), textcoords="offset points", xytext=(6, 6))

    axes.set(xlabel="training step", **axes_settings)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    with replacing(file) as stream:
        figure.savefig(stream, format=file.suffix.lstrip("."))


def _smooth(values: Sequence[float], weight: float = 0.6) -> list[float]:
    """Return the exponential moving average, started at the first value."""
    averages: list[float] = []
    for value in values:
        if averages:
            value = weight * averages[-1] + (1 - weight) * value
        averages.append(value)
    return averages


# Drawn in this order: where both overlap, the evaluation stays visible.
_ENGINE_PHASES = ("engine", "evaluate")
MAX_PAUSE_SECONDS = 120.0
MAX_TRACES = 400  # the newest ones


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeAxis:
    """Wall-clock time without long pauses.

    Attributes:
        starts: begin of each stretch between pauses, in seconds since the epoch.
        offsets: seconds to subtract from the times of each stretch.
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

        first_begin, latest_end = ordered[0]
        starts = [first_begin]
        offsets = [first_begin]
        cuts = []
        for begin, end in ordered[1:]:
            if begin - latest_end > MAX_PAUSE_SECONDS:
                offset = offsets[-1] + begin - latest_end
                starts.append(begin)
                offsets.append(offset)
                cuts.append(begin - offset)
            latest_end = max(latest_end, end)
        return cls(starts=tuple(starts), offsets=tuple(offsets), cuts=tuple(cuts))

    def __call__(self, time: float) -> float:
        """Convert a time to seconds on the axis."""
        stretch = max(0, bisect_right(self.starts, time) - 1)
        return round(time - self.offsets[stretch], 3)


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
    phases: list[tuple[str, float, float, int]] = []  # name, begin, end, step
    busy_shares = {}
    for record in metrics:
        for name, begin, end in record.get("phase_seconds") or ():
            phases.append((name, begin, end, record["step"]))
        if "engine_busy_share" in record:
            busy_shares[record["step"]] = record["engine_busy_share"]

    intervals = [(begin, end) for _, begin, end, _ in phases]
    for trace in traces:
        for span in trace["spans"]:
            intervals.append((span["start_ns"] / 1e9, span["end_ns"] / 1e9))
    axis = TimeAxis.from_intervals(intervals)
    seconds = 0.0
    if intervals:
        seconds = axis(max(end for _, end in intervals))

    phase_bars = []
    updates = []
    for name, begin, end, step in phases:
        if name != "engine":
            phase_bars.append({"name": name, "from": axis(begin), "to": axis(end), "step": step})
        if name == "publish":
            updates.append(axis(end))

    engine_bars = []
    for engine_phase in _ENGINE_PHASES:
        for name, begin, end, step in phases:
            if name != engine_phase:
                continue
            bar: dict[str, Any] = {
                "name": name,
                "from": axis(begin),
                "to": axis(end),
                "step": step,
            }
            if name == "engine":
                bar["busy"] = round(busy_shares.get(step, 0.0), 4)
            engine_bars.append(bar)

    return {
        "phases": phase_bars,
        "engine": engine_bars,
        "updates": updates,
        "traces": [_lane(trace, axis, numbers) for trace in traces],
        "cuts": list(axis.cuts),
        "seconds": seconds,
    }


def newest_traces(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last :data:`MAX_TRACES` of ``traces.jsonl`` in the order in which they began."""

    def rank(item: tuple[int, Mapping[str, Any]]) -> tuple[int, int]:
        """Order traces by their beginning, then by their place in the file."""
        number, record = item
        return min(span["start_ns"] for span in record["spans"]), number

    newest = heapq.nlargest(MAX_TRACES, enumerate(records), key=rank)
    return [record for _, record in reversed(newest)]


def _lane(trace: Mapping[str, Any], axis: TimeAxis, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return a trace as the timeline shows it."""
    spans = []
    for span in trace["spans"]:
        bar = {
            "name": span["name"],
            "from": axis(span["start_ns"] / 1e9),
            "to": axis(span["end_ns"] / 1e9),
            "note": _note(span),
        }
        spans.append(bar)
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
