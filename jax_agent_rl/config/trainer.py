"""The ``trainer`` and ``trace`` sections: how rollout and learner overlap, and what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from jax_agent_rl.config.base import Distinct, NonNegative, OrInstalled, Positive, Section, WhenKey

_FULLY_ASYNC = WhenKey("trainer.mode", "fully_async")
_DEFAULT_STALENESS = {"sync": 0, "one_step_off": 1, "fully_async": 1}


class TrainerConfig(Section):
    """The training loop."""

    steps: Positive = Field(default=100, description="Training steps.")
    mode: Literal["sync", "one_step_off", "fully_async"] = Field(
        default="sync",
        description=(
            "sync: roll out, then learn. one_step_off: roll out the next step while learning this"
            " one. fully_async: roll out continuously, also while weights change."
        ),
    )
    max_staleness: NonNegative | None = Field(
        default=None,
        description=(
            "fully_async: maximum age of a token in versions of the weights; up to (max_staleness +"
            " 1) * rollout.prompts_per_step groups are in flight. null: 1. The other modes fix it"
            " (sync 0, one_step_off 1)."
        ),
    )
    stragglers: Annotated[Literal["wait", "drop"], _FULLY_ASYNC] = Field(
        default="wait",
        description=(
            "fully_async: what happens to groups that would become too old. wait: the learner waits"
            " for them. drop: it never waits, and such groups are dropped, which favours short"
            " trajectories."
        ),
    )
    oversample_prompts: Annotated[
        NonNegative, _FULLY_ASYNC & WhenKey("trainer.stragglers", "drop")
    ] = Field(
        default=0,
        description=(
            "stragglers: drop: number of extra rows to start, so that as many of the slowest may be"
            " dropped."
        ),
    )
    in_flight_update: Annotated[Literal["auto", "keep", "recompute", "wait"], _FULLY_ASYNC] = Field(
        default="auto",
        description=(
            "fully_async: what running generations do when weights change. keep: continue with the"
            " KV cache of the old weights. recompute: continue after their context is recomputed."
            " wait: finish their turn first. auto: the first of these that the engine supports."
        ),
    )
    eval_every: Annotated[NonNegative, WhenKey("data.eval")] = Field(
        default=0, description="Steps between evaluations; 0: before and after training only."
    )
    checkpoint_every: NonNegative = Field(
        default=10, description="Steps between checkpoints; 0: at the end only."
    )
    keep_checkpoints: Positive = Field(
        default=2, description="Number of checkpoints to keep, the newest ones."
    )
    checkpoint_dir: str | None = Field(
        default=None,
        description=(
            "Folder of this run's checkpoints, the same for all processes; gs://… for a bucket."
            " null: checkpoints in run_dir."
        ),
    )
    keep_trajectories: NonNegative | None = Field(
        default=256,
        description=(
            "Maximum number of trajectories of a step written to trajectories.jsonl: the best, the"
            " worst, their groups, and random other groups. null: all."
        ),
    )
    max_failed_batches: Positive = Field(
        default=2,
        description=(
            "Stop after this many consecutive batches that lost every trajectory (because rewards"
            " fail, for example)."
        ),
    )
    on_disagreement: Literal["stop", "warn"] = Field(
        default="stop",
        description=(
            "What happens after the diagnosis when the log-probs of engine and learner differ by"
            " more than their precision explains. stop: end the run before it learns from them."
            " warn: continue. See docs/agreement.md."
        ),
    )
    agreement_tolerance: tuple[float, float] | None = Field(
        default=None,
        description=(
            "Maximum difference in nats: [of one token, on average]; null: set by engine and"
            " precision, see docs/agreement.md."
        ),
    )
    target_accuracy: Annotated[
        float | None, WhenKey("data.eval") & WhenKey("trainer.eval_every")
    ] = Field(
        default=None,
        gt=0,
        le=1,
        description="Stop early once an evaluation during training reaches this accuracy.",
    )
    logger: Annotated[
        tuple[
            Annotated[Literal["tensorboard", "wandb", "trackio"], OrInstalled("metric_sinks")], ...
        ],
        Distinct,
    ] = Field(
        default=(),
        description=(
            "Where metrics go besides the console and metrics.jsonl; each needs the extra of its"
            " name."
        ),
        json_schema_extra={"type": ["array", "string"], "uniqueItems": True},
    )
    project_name: Annotated[str, WhenKey("trainer.logger", "wandb", "trackio", plugins=True)] = (
        Field(
            default="jax_agent_rl",
            min_length=1,
            description="Project of the run in wandb and trackio.",
        )
    )
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        default=None,
        description="Port on this machine that serves the newest metrics; 0 takes a free one.",
    )

    @property
    def staleness_bound(self) -> int:
        """``max_staleness``, resolved."""
        if self.max_staleness is None:
            return _DEFAULT_STALENESS[self.mode]
        return self.max_staleness

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
            raise ValueError(
                f"must be [largest of one token, largest mean], both above 0, got {list(value)}"
            )
        return value

    def problems(self) -> Iterator[str]:
        """Yield every inconsistency of the section, with its fix."""
        default = _DEFAULT_STALENESS[self.mode]  # which the modes but fully_async cannot change
        if self.mode != "fully_async" and self.max_staleness not in (None, default):
            yield (
                f"trainer.max_staleness={self.max_staleness}: with trainer.mode={self.mode} it is"
                f" {default}; leave it out, or set trainer.mode=fully_async"
            )


class TraceConfig(Section):
    """Traces: spans of trajectories (run, generate, tool, reward, wait), and their sinks."""

    sinks: Annotated[
        tuple[
            Annotated[Literal["files", "mlflow", "trackio", "weave"], OrInstalled("trace_sinks")],
            ...,
        ],
        Distinct,
    ] = Field(
        default=(),
        description=(
            "Where traces go. files: traces.jsonl in the run folder, shown by `jax-agent-rl"
            " report`; mlflow, trackio and weave need the extra `trace`. []: nothing is traced, at"
            " no cost."
        ),
    )
    max_trajectories_per_step: Annotated[Positive, WhenKey("trace.sinks")] = Field(
        default=8,
        description=(
            "Maximum number of trajectories traced per step and per evaluation: whole groups, those"
            " that start first; of a larger group, its first members."
        ),
    )
    max_text_length: Annotated[Positive, WhenKey("trace.sinks")] = Field(
        default=4000,
        description="Maximum number of characters of a text; a longer one keeps both ends.",
    )
    project: Annotated[str, WhenKey("trace.sinks", "mlflow", "trackio", "weave", plugins=True)] = (
        Field(
            default="jax-agent-rl",
            description="MLflow experiment, trackio or Weave project (entity/project).",
        )
    )
    mlflow_tracking_uri: Annotated[str | None, WhenKey("trace.sinks", "mlflow")] = Field(
        default=None, description="MLflow server or database; null: mlflow.db in the run folder."
    )
