"""The ``reward`` section: how trajectories are scored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jax_agent_rl.config.base import NonNegative, Positive, Section
from jax_agent_rl.config.conditions import Unless


class RemoteRewardConfig(Section):
    """A reward server for some data sources."""

    url: str = Field(description="URL to which each trajectory is POSTed as JSON; it answers a number or {score: …}.")
    data_sources: tuple[str, ...] = Field(min_length=1, description="Data sources of the rows it scores (* matches).")
    timeout: float = Field(default=30.0, gt=0, description="Seconds one attempt may take.")
    max_retries: NonNegative = Field(default=3, description="Retries after connection errors, 429 and 5xx.")
    retry_delay: float = Field(default=1.0, ge=0, description="Seconds before the first retry; doubled each time.")
    max_concurrency: Positive = Field(default=16, description="Most requests at the same time.")
    requests_per_second: float | None = Field(default=None, gt=0, description="Most requests a second; null: no limit.")


class JudgeConfig(Section):
    """The model behind the `judge` that reward functions may request."""

    model: str = Field(description="Folder of a frozen model (Hugging Face), or `policy`: the model in training.")
    max_tokens: Positive = Field(default=256, description="Most tokens of one judgement.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0 is deterministic.")
    max_model_len: Annotated[Positive, Unless("reward.judge.model", "policy")] = Field(
        default=2048, description="Most ids of prompt and judgement (a frozen model's engine)."
    )
    max_in_flight: Positive = Field(default=16, description="Most judgements at the same time.")


class RewardConfig(Section):
    """How trajectories are scored; the function is chosen by each row's `data_source`."""

    path: str | None = Field(default=None, description="Python file or module that registers more reward functions.")
    timeout: float = Field(
        default=60.0, gt=0, description="Seconds scoring may take; after that the trajectory is dropped."
    )
    workers: NonNegative = Field(
        default=4,
        description="Processes that run synchronous functions of `path` and are killed on timeout; 0: one thread per "
        "call, which cannot be killed.",
    )
    remote: RemoteRewardConfig | None = Field(default=None, description="A reward server.")
    sandbox: Literal["bubblewrap", "unsafe_local"] = Field(
        default="bubblewrap",
        description="Sandbox of programs that are scored by tests; unsafe_local is none at all.",
    )
    judge: JudgeConfig | None = Field(default=None, description="A model that judges for reward functions.")
