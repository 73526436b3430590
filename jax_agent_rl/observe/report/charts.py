"""The curves of a run: which chart shows which metrics and what to look for; and ``reward.png``."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jax_agent_rl.observe.run_dir import is_number
from jax_agent_rl.utils.files import writing

MAX_POINTS = 600
"""Points of a line; longer ones keep the smallest and largest value of every stretch, so no spike is lost."""
MAX_BARS = 300
"""Bars of a stack; in longer ones, each bar is the sum of several steps."""
_CHARTED_ELSEWHERE = ("kind", "step", "accounting", "finish_reasons", "tool_errors_by_kind", "staleness_histogram")


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """One line of a chart.

    Attributes:
        name: label in the legend.
        key: key of a ``metrics.jsonl`` record.
        kind: kind of the records.
        band: keys of the lower and upper edge of a band around it.
    """

    name: str
    key: str
    kind: Literal["step", "evaluation"] = "step"
    band: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart over training steps.

    Attributes:
        title, unit: what it shows, in which unit.
        hint: what to look for.
        lines: omitted where the run has no such metric; a chart without lines is omitted.
        scale: axis of the values; ``share`` is from 0 to 1, shown in per cent.
    """

    title: str
    hint: str
    lines: tuple[ChartLine, ...]
    unit: str = ""
    scale: Literal["linear", "log", "share"] = "linear"


CHARTS = (
    Chart(
        title="Reward",
        hint="Mean of each step's trajectories, between the worst and the best. It should rise; a band of zero width "
        "leaves nothing to learn from.",
        lines=(ChartLine(name="mean", key="reward_mean", band=("reward_min", "reward_max")),),
    ),
    Chart(
        title="Held-out accuracy",
        hint="Mean reward on rows that are never trained on; a lost trajectory counts as wrong.",
        scale="share",
        lines=(ChartLine(name="accuracy", key="accuracy", kind="evaluation"),),
    ),
    Chart(
        title="Response length",
        hint="Sampled and inserted tokens. A mean at the upper edge means that answers are cut off.",
        unit="tokens",
        lines=(
            ChartLine(name="response", key="response_tokens_mean", band=("response_tokens_min", "response_tokens_max")),
            ChartLine(name="sampled", key="sampled_tokens_mean"),
        ),
    ),
    Chart(
        title="Turns and tool calls",
        hint="Means per trajectory.",
        lines=(
            ChartLine(name="turns", key="turns_mean", band=("turns_min", "turns_max")),
            ChartLine(name="tool calls", key="tool_calls_mean"),
        ),
    ),
    Chart(
        title="Entropy",
        hint="Of the policy over sampled tokens. It falls as the policy grows sure; near zero early on, exploration "
        "has ended.",
        unit="nats",
        lines=(ChartLine(name="entropy", key="entropy"),),
    ),
    Chart(
        title="KL",
        hint="From the policy before the step, from the reference, and of the rollout from the learner.",
        unit="nats",
        lines=(
            ChartLine(name="step", key="kl"),
            ChartLine(name="reference", key="kl_reference"),
            ChartLine(name="rollout", key="rollout_kl"),
        ),
    ),
    Chart(
        title="Engine/learner log-prob gap",
        hint="How far the engine's log-probs are from the learner's for the same weights. Growth means that the two "
        "have come apart. In asynchronous modes stale weights are part of it.",
        unit="nats",
        scale="log",
        lines=(ChartLine(name="max", key="logprob_gap_max"), ChartLine(name="mean", key="logprob_gap_mean")),
    ),
    Chart(
        title="Throughput",
        hint="Tokens sampled by the engines, and tokens trained on by the learner while it works.",
        unit="tokens/s",
        lines=(
            ChartLine(name="rollout", key="rollout_tokens_per_second"),
            ChartLine(name="learner", key="learner_tokens_per_second"),
        ),
    ),
    Chart(
        title="Busy and idle",
        hint="Share of the time. An idle learner waits for rollouts: add engines, or let it run asynchronously.",
        scale="share",
        lines=(
            ChartLine(name="learner idle", key="learner_idle_share"),
            ChartLine(name="engine busy", key="engine_busy_share"),
        ),
    ),
    Chart(
        title="Seconds of a step",
        hint="From one finished step to the next, and its parts.",
        unit="s",
        lines=(
            ChartLine(name="step", key="step_seconds"),
            ChartLine(name="rollout", key="rollout_seconds"),
            ChartLine(name="learner", key="learner_seconds"),
            ChartLine(name="weight update", key="weight_update_seconds"),
        ),
    ),
    Chart(
        title="Loss and gradient",
        hint="Policy-gradient losses need not fall; a gradient norm that explodes must be looked at.",
        lines=(ChartLine(name="loss", key="loss"), ChartLine(name="gradient norm", key="grad_norm")),
    ),
    Chart(
        title="Clipped tokens",
        hint="Tokens whose ratio left the clip range.",
        scale="share",
        lines=(ChartLine(name="clipped", key="clip_fraction"),),
    ),
    Chart(
        title="Staleness",
        hint="Age of the tokens trained on, in versions of the weights.",
        unit="versions",
        lines=(ChartLine(name="mean", key="staleness_mean"), ChartLine(name="max", key="staleness_max")),
    ),
)


def charts(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return all charts of a run as JSON.

    Keys: ``title, hint, unit, scale, kind, lines [{name, x, y, low?, high?, reach?}]``. ``kind`` is ``lines``, or
    ``stack`` for counts that add up, whose bars cover ``every`` steps each. Where not every step is drawn, a step has
    the value of the nearest drawn one, at most ``reach`` away. Metrics that no chart names follow as ``more``, one
    chart each.
    """
    made = [_line_chart(chart, metrics) for chart in CHARTS]
    made += [
        _stack("Dropped trajectories", "Started but not trained on, by reason.", _dropped(metrics)),
        _stack("How trajectories ended", "By reason.", _counts(metrics, "finish_reasons")),
        _stack("Tool errors", "By kind.", _counts(metrics, "tool_errors_by_kind")),
    ]
    made += [_line_chart(chart, metrics) | {"more": True} for chart in _further(metrics)]
    return [chart for chart in made if chart["lines"]]


def thinned(points: Sequence[tuple[float, ...]], limit: int = MAX_POINTS) -> list[tuple[float, ...]]:
    """Thin out points ``(x, y, …)``, ordered by x, to about ``limit``.

    The first and last point stay, and those with the least and the greatest y of every stretch.
    """
    if len(points) <= limit:
        return list(points)
    length = math.ceil(2 * len(points) / limit)
    stretches = (points[begin : begin + length] for begin in range(0, len(points), length))
    extremes = ({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])} for part in stretches)
    return sorted({points[0], points[-1]}.union(*extremes))


def _line_chart(chart: Chart, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    lines = [drawn for line in chart.lines if (drawn := _line(line, metrics))]
    head = {"title": chart.title, "hint": chart.hint, "unit": chart.unit, "scale": chart.scale}
    return head | {"kind": "lines", "lines": lines}


def _line(line: ChartLine, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    keys = (line.key, *(line.band or ()))
    points = [
        (float(r["step"]), *(float(r[key]) for key in keys))
        for r in metrics
        if r["kind"] == line.kind and all(is_number(r.get(key)) for key in keys)
    ]
    if not points:
        return None
    kept = thinned(points)
    named = dict(zip(("x", "y", "low", "high"), zip(*kept, strict=True), strict=False))
    drawn = {name: [_short(v) for v in column] for name, column in named.items()}
    return {"name": line.name} | drawn | _reach([x for x, *_ in points], [x for x, *_ in kept])


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
        {"name": name, "x": middles, "y": [sum(counts[step].get(name, 0) for step in bar) for bar in bars]}
        | _reach(steps, middles)
        for name, total in sums.most_common()
        if total
    ]
    if every > 1:
        hint += f" Each bar is the sum of {every} steps."
    head = {"title": title, "hint": hint, "unit": "trajectories", "scale": "linear", "kind": "stack", "every": every}
    return head | {"lines": lines}


def _reach(steps: Sequence[float], drawn: Sequence[float]) -> dict[str, float]:
    """Return the largest distance of a step to its nearest drawn one as ``reach``; nothing where all are drawn."""

    def distance(step: float) -> float:
        place = bisect_left(drawn, step)
        return min(abs(step - near) for near in drawn[max(0, place - 1) : place + 1])

    reach = max(map(distance, steps), default=0)
    return {"reach": reach} if reach else {}


def _counts(metrics: Iterable[Mapping[str, Any]], key: str) -> dict[int, Mapping[str, float]]:
    return {r["step"]: r[key] for r in metrics if r["kind"] == "step" and isinstance(r.get(key), Mapping)}


def _dropped(metrics: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, float]]:
    """Return each step's own drops: the accounting is cumulative."""
    dropped, before = {}, Counter()
    for step, counts in _counts(metrics, "accounting").items():
        now = Counter({key.removeprefix("dropped/"): n for key, n in counts.items() if key.startswith("dropped/")})
        dropped[step], before = now - before, now
    return dropped


def _further(metrics: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return a chart for every number that none of :data:`CHARTS` shows."""
    shown = {key for chart in CHARTS for line in chart.lines for key in (line.key, *(line.band or ()))}
    keys = dict.fromkeys(key for r in metrics if r["kind"] == "step" for key, v in r.items() if is_number(v))
    left = [key for key in keys if key not in shown and key not in _CHARTED_ELSEWHERE]
    return [Chart(title=key, hint="", lines=(ChartLine(name=key, key=key),)) for key in sorted(left)]


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def reward_plot(records: Sequence[Mapping[str, Any]], file: Path, *, title: str) -> None:
    """Draw reward per step and held-out accuracy, from ``metrics.jsonl`` records, to a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [r for r in records if r["kind"] == "step"]
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    figure = Figure(figsize=(8, 4.5), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if steps:
        x = [r["step"] for r in steps]
        axes.plot(
            x, [r["reward_mean"] for r in steps], color="#9bbcd8", marker=".", label="training reward (step mean)"
        )
        axes.plot(x, _smooth([r["reward_mean"] for r in steps]), color="#1f6fb2", label="training reward (smoothed)")
    if evaluations:
        x = [r["step"] for r in evaluations]
        y = [r["accuracy"] for r in evaluations]
        axes.plot(x, y, "o--", color="#d1495b", label="held-out accuracy")
        for step, accuracy in zip(x, y, strict=True):
            axes.annotate(f"{accuracy:.0%}", (step, accuracy), textcoords="offset points", xytext=(6, 6))
    axes.set(xlabel="training step", ylabel="reward / accuracy", ylim=(-0.03, 1.08), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    with writing(file):
        figure.savefig(file)


def _smooth(values: Sequence[float], weight: float = 0.6) -> list[float]:
    """Return the exponential moving average, started at the first value."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else weight * out[-1] + (1 - weight) * value)
    return out
