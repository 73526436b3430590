"""The ``model``, ``data`` and ``reward`` sections: the policy, its rows, and how trajectories are scored."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from jax_agent_rl.config.base import NonNegative, Positive, Section
from jax_agent_rl.config.conditions import Unless, WhenKey, WhenModelHasVision


class ModelConfig(Section):
    """The policy's weights and processor."""

    path: str = Field(
        description="Folder with config.json, model.safetensors and tokenizer files, or owner/name[@revision] on the "
        "Hugging Face Hub, downloaded into its cache."
    )
    min_pixels: Annotated[Positive | None, WhenModelHasVision()] = Field(
        default=None,
        description="Minimum number of pixels an image or frame is scaled to; null: from the model's processor files. "
        "Set it together with max_pixels.",
    )
    max_pixels: Annotated[Positive | None, WhenModelHasVision()] = Field(
        default=None, description="Maximum number of pixels an image or frame is scaled to."
    )

    @property
    def pixels(self) -> tuple[int, int] | None:
        """``(min_pixels, max_pixels)``; None leaves both to the model's processor files."""
        return None if self.min_pixels is None or self.max_pixels is None else (self.min_pixels, self.max_pixels)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        low, high = self.min_pixels, self.max_pixels
        if (low is None) != (high is None):
            raise ValueError(f"min_pixels={low}, max_pixels={high}: set both or neither")
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_pixels={low} exceeds max_pixels={high}; lower it")
        return self


class DataConfig(Section):
    """Rows: JSON Lines or Parquet with `prompt`, `agent_name`, `data_source`, `reward_model.ground_truth`."""

    train: str = Field(description="Rows to train on (.jsonl or .parquet).")
    eval: str | None = Field(default=None, description="Rows to evaluate on; never trained on.")
    eval_limit: Annotated[Positive | None, WhenKey("data.eval")] = Field(
        default=None, description="Evaluate on this many rows, from the first."
    )


class RemoteRewardConfig(Section):
    """A reward server for some data sources."""

    url: str = Field(
        description="URL to which each trajectory is POSTed as JSON; the answer is a number or {score: …}."
    )
    data_sources: tuple[str, ...] = Field(min_length=1, description="Data sources of the rows it scores (* matches).")
    timeout: float = Field(default=30.0, gt=0, description="Timeout of one attempt, in seconds.")
    max_retries: NonNegative = Field(default=3, description="Retries after connection errors, 429 and 5xx.")
    retry_delay: float = Field(default=1.0, ge=0, description="Seconds before the first retry; doubled each time.")
    max_concurrency: Positive = Field(default=16, description="Maximum number of concurrent requests.")
    requests_per_second: float | None = Field(
        default=None, gt=0, description="Maximum number of requests per second; null: no limit."
    )


class JudgeConfig(Section):
    """The model of the `judge` that reward functions may request."""

    model: str = Field(description="Folder of a frozen model (Hugging Face), or `policy`: the model in training.")
    max_tokens: Positive = Field(default=256, description="Maximum number of tokens per judgement.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0 is deterministic.")
    max_model_len: Annotated[Positive, Unless("reward.judge.model", "policy")] = Field(
        default=2048, description="Maximum number of tokens of prompt and judgement (a frozen model's engine)."
    )
    max_in_flight: Positive = Field(default=16, description="Maximum number of concurrent judgements.")


class RewardConfig(Section):
    """Scoring of trajectories; each row's `data_source` selects the reward function."""

    path: str | None = Field(default=None, description="Python file or module that registers more reward functions.")
    timeout: float = Field(
        default=60.0, gt=0, description="Timeout of scoring in seconds; then the trajectory is dropped."
    )
    workers: NonNegative = Field(
        default=4,
        description="Number of processes that run synchronous functions of `path` and are killed on timeout; 0: one "
        "thread per call, which cannot be killed.",
    )
    remote: RemoteRewardConfig | None = Field(default=None, description="A reward server.")
    sandbox: Literal["bubblewrap", "unsafe_local"] = Field(
        default="bubblewrap",
        description="Sandbox of programs that are scored by tests; unsafe_local: none.",
    )
    judge: JudgeConfig | None = Field(default=None, description="Judge model for reward functions.")
