"""The picture of a run: reward per step and held-out accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.utils.files import writing


def reward_plot(records: Sequence[Mapping[str, Any]], file: Path, *, title: str) -> None:
    """Draws ``metrics.jsonl`` records (kinds ``step`` and ``evaluation``) to a PNG."""
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
    """Exponential moving average, started at the first value."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else weight * out[-1] + (1 - weight) * value)
    return out
