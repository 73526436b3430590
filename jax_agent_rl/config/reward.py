"""Settings of what scores trajectories. Part of :mod:`jax_agent_rl.config`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jax_agent_rl.config.base import NonNegative, Positive, Section
from jax_agent_rl.config.conditions import Unless


class RemoteRewardConfig(Section):
    """A reward server for some data sources."""

    url: str = Field(description="Where each trajectory is POSTed as JSON; answers a number or {score: …}.")
    data_sources: tuple[str, ...] = Field(min_length=1, description="Rows it scores, by data_source (* matches).")
    timeout: float = Field(default=30.0, gt=0, description="Seconds one attempt may take.")
    max_retries: NonNegative = Field(default=3, description="Further attempts after connection errors, 429 and 5xx.")
    retry_delay: float = Field(default=1.0, ge=0, description="Seconds before the first of them; doubled each time.")
    max_concurrency: Positive = Field(default=16, description="Requests at the same time.")
    requests_per_second: float | None = Field(
        default=None, gt=0, description="Most requests a second; null is no limit."
    )


class JudgeConfig(Section):
    """The model behind the `judge` that reward functions may ask for."""

    model: str = Field(description="Folder of a frozen model (Hugging Face), or `policy`: the one being trained.")
    max_tokens: Positive = Field(default=256, description="Most tokens of one opinion.")
    temperature: float = Field(default=0.0, ge=0, description="0 gives the same opinion every time.")
    max_model_len: Annotated[Positive, Unless("reward.judge.model", "policy")] = Field(
        default=2048, description="Most ids of question and opinion (a frozen model's engine)."
    )
    max_in_flight: Positive = Field(default=16, description="Questions at the same time.")


class RewardConfig(Section):
    """How trajectories are scored; the function is chosen by each row's `data_source`."""

    path: str | None = Field(default=None, description="Python file or module that registers more reward functions.")
    timeout: float = Field(default=60.0, gt=0, description="Seconds scoring may take; then the trajectory is dropped.")
    workers: NonNegative = Field(
        default=4,
        description="Processes that run synchronous functions of `path`, and are killed when late; 0: threads, as many "
        "as there are calls, which cannot be.",
    )
    remote: RemoteRewardConfig | None = Field(default=None, description="A reward server.")
    sandbox: Literal["bubblewrap", "unsafe_local"] = Field(
        default="bubblewrap",
        description="Where programs that are scored by tests run; unsafe_local is no sandbox at all.",
    )
    judge: JudgeConfig | None = Field(default=None, description="A model whose opinion reward functions may ask for.")
