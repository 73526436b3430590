"""The keys of ``trace``. Part of :mod:`jax_agent_rl.config`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from jax_agent_rl.config.base import Positive, Section
from jax_agent_rl.config.conditions import WhenKey


class TraceConfig(Section):
    """Spans of trajectories (run, generate, tool, reward, wait), and where they go."""

    sinks: tuple[Literal["files", "mlflow", "trackio", "weave"], ...] = Field(
        default=(),
        description="Where traces go. files: traces.jsonl in the run folder, shown by `jax-agent-rl report`; mlflow, "
        "trackio and weave need the extra `trace`. []: nothing is traced, which costs nothing.",
    )
    max_trajectories_per_step: Annotated[Positive, WhenKey("trace.sinks")] = Field(
        default=8,
        description="Most trajectories traced of a step, and as many of an evaluation: the whole groups that start "
        "first; of a group that is larger, its first members.",
    )
    max_text_length: Annotated[Positive, WhenKey("trace.sinks")] = Field(
        default=4000, description="Characters kept of a text; of a longer one both ends."
    )
    project: Annotated[str, WhenKey("trace.sinks", "mlflow", "trackio", "weave")] = Field(
        default="jax-agent-rl", description="MLflow experiment, trackio or Weave project (entity/project)."
    )
    mlflow_tracking_uri: Annotated[str | None, WhenKey("trace.sinks", "mlflow")] = Field(
        default=None, description="MLflow server, or database; null: mlflow.db in the run folder."
    )


def trace_problems(trace: TraceConfig) -> Iterator[str]:
    """Every inconsistency of these keys, each with its fix."""
    if len(set(trace.sinks)) < len(trace.sinks):
        yield f"trace.sinks={list(trace.sinks)} names a sink twice; name each once"
