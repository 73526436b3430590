"""The ``trainer`` and ``trace`` sections: how rollout and learner overlap, checkpoints, metrics and traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from jax_agent_rl.config.base import Distinct, NonNegative, Positive, Section
from jax_agent_rl.config.conditions import WhenKey

_FULLY_ASYNC = WhenKey("trainer.mode", "fully_async")
_DEFAULT_STALENESS = {"sync": 0, "one_step_off": 1, "fully_async": 1}


class TrainerConfig(Section):
    """How the run goes."""

    steps: Positive = Field(default=100, description="Training steps.")
    mode: Literal["sync", "one_step_off", "fully_async"] = Field(
        default="sync",
        description="sync: roll out, then learn. one_step_off: roll out the next step while learning this one. "
        "fully_async: roll out all the time, even while weights change.",
    )
    max_staleness: NonNegative | None = Field(
        default=None,
        description="fully_async: most versions a token may be older than the weights it trains; up to (max_staleness "
        "+ 1) * rollout.prompts_per_step groups are in flight. null: 1. The other modes fix it (sync 0, one_step_off "
        "1).",
    )
    stragglers: Annotated[Literal["wait", "drop"], _FULLY_ASYNC] = Field(
        default="wait",
        description="fully_async: wait: the learner waits for groups that would get too old. drop: it never waits, "
        "and groups that get too old are lost, which favours short trajectories.",
    )
    oversample_prompts: Annotated[NonNegative, _FULLY_ASYNC & WhenKey("trainer.stragglers", "drop")] = Field(
        default=0, description="stragglers: drop: extra rows to start, so that as many of the slowest may be lost."
    )
    in_flight_update: Annotated[Literal["auto", "keep", "recompute", "wait"], _FULLY_ASYNC] = Field(
        default="auto",
        description="fully_async: what running generations do when weights change. keep: they go on with the KV cache "
        "of the old weights; recompute: they go on after their context is recomputed; wait: they finish their turn "
        "first. auto: the first of these that the engine can do.",
    )
    eval_every: Annotated[NonNegative, WhenKey("data.eval")] = Field(
        default=0, description="Evaluate every this many steps; 0: before and after only."
    )
    checkpoint_every: NonNegative = Field(default=10, description="Steps between checkpoints; 0: at the end only.")
    keep_checkpoints: Positive = Field(default=2, description="Number of newest checkpoints to keep.")
    checkpoint_dir: str | None = Field(
        default=None,
        description="Folder of this run's checkpoints, the same for all processes; gs://… is one in a bucket. null: "
        "checkpoints in run_dir.",
    )
    keep_trajectories: NonNegative | None = Field(
        default=256,
        description="Most trajectories of a step written to trajectories.jsonl: the best, the worst, their groups, and "
        "other groups by chance. null: all.",
    )
    max_failed_batches: Positive = Field(
        default=2,
        description="Stop after this many batches in a row that lost every trajectory (rewards that fail, say).",
    )
    on_disagreement: Literal["stop", "warn"] = Field(
        default="stop",
        description="When engine and learner give tokens of the same weights log-probs further apart than their "
        "precision explains: a diagnosis is made, then stop ends the run before it learns from them, warn goes on. See "
        "docs/agreement.md.",
    )
    agreement_tolerance: tuple[float, float] | None = Field(
        default=None,
        description="Largest difference in nats: [of one token, on average]; null: set by engine and precision, see "
        "docs/agreement.md.",
    )
    target_accuracy: Annotated[float | None, WhenKey("data.eval") & WhenKey("trainer.eval_every")] = Field(
        default=None, gt=0, le=1, description="Stop early once an evaluation during training reaches this."
    )
    logger: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], Distinct] = Field(
        default=(),
        description="Where metrics go besides the screen and metrics.jsonl; each needs the extra of its name.",
        json_schema_extra={"type": ["array", "string"], "uniqueItems": True},
    )
    project_name: Annotated[str, WhenKey("trainer.logger", "wandb", "trackio")] = Field(
        default="jax_agent_rl", min_length=1, description="The project of the run in wandb and trackio."
    )
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        default=None, description="Port of this machine under which the newest metrics are served; 0 takes a free one."
    )

    @property
    def staleness_bound(self) -> int:
        """``max_staleness``, resolved."""
        return _DEFAULT_STALENESS[self.mode] if self.max_staleness is None else self.max_staleness

    @field_validator("logger", mode="before")
    @classmethod
    def _accept_one_name(cls, value: Any) -> Any:
        names = (value,) if isinstance(value, str) else value
        if isinstance(names, (list, tuple)) and "console" in names:
            raise ValueError("the console is always written to; leave 'console' out")
        return names

    @field_validator("agreement_tolerance")
    @classmethod
    def _positive(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not 0 < value[1] <= value[0]:
            raise ValueError(f"must be [largest of one token, largest mean], both above 0, got {list(value)}")
        return value


class TraceConfig(Section):
    """Spans of trajectories (run, generate, tool, reward, wait), and where they are sent."""

    sinks: Annotated[tuple[Literal["files", "mlflow", "trackio", "weave"], ...], Distinct] = Field(
        default=(),
        description="Where traces go. files: traces.jsonl in the run folder, shown by `jax-agent-rl report`; mlflow, "
        "trackio and weave need the extra `trace`. []: nothing is traced, which costs nothing.",
    )
    max_trajectories_per_step: Annotated[Positive, WhenKey("trace.sinks")] = Field(
        default=8,
        description="Most trajectories traced per step and per evaluation: whole groups, those that start first; of a "
        "larger group, its first members.",
    )
    max_text_length: Annotated[Positive, WhenKey("trace.sinks")] = Field(
        default=4000, description="Characters kept of a text; a longer one keeps both ends."
    )
    project: Annotated[str, WhenKey("trace.sinks", "mlflow", "trackio", "weave")] = Field(
        default="jax-agent-rl", description="MLflow experiment, trackio or Weave project (entity/project)."
    )
    mlflow_tracking_uri: Annotated[str | None, WhenKey("trace.sinks", "mlflow")] = Field(
        default=None, description="MLflow server, or database; null: mlflow.db in the run folder."
    )


def trainer_problems(trainer: TrainerConfig) -> Iterator[str]:
    """Yield every inconsistency of the section, each with its fix."""
    mode, fixed = trainer.mode, _DEFAULT_STALENESS[trainer.mode]
    if mode != "fully_async" and trainer.max_staleness not in (None, fixed):
        yield (
            f"trainer.max_staleness={trainer.max_staleness}: with trainer.mode={mode} it is {fixed}; leave it out, or "
            "set trainer.mode=fully_async"
        )


def with_correction(sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add token-level importance weights to an unvalidated tree with stale tokens and no correction of its own."""
    trainer, algorithm = sections.get("trainer"), sections.get("algorithm") or {}
    if not isinstance(trainer, Mapping) or not isinstance(algorithm, Mapping):
        return sections
    stale = trainer.get("max_staleness")
    if trainer.get("mode", "sync") == "sync" or stale == 0 or "rollout_correction" in algorithm:
        return sections
    loss = algorithm.get("policy_loss")
    if isinstance(loss, Mapping) and loss.get("loss_mode") == "decoupled":  # it brings its own
        return sections
    return {**sections, "algorithm": {**algorithm, "rollout_correction": {"rollout_is": "token"}}}
