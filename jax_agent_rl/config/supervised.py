"""The roots of ``jax-agent-rl sft`` and ``dpo``: training on given conversations and preferences."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jax_agent_rl.config.agent import ToolFormatName
from jax_agent_rl.config.base import Distinct, NonNegative, Positive, Section, WhenKey, unused
from jax_agent_rl.config.learner import RowsConfig
from jax_agent_rl.config.task import DataSources, ModelPathConfig

Role = Literal["assistant", "user", "tool"]


class ConversationsConfig(Section):
    """Rows: JSON Lines or Parquet, conversations or files that `jax-agent-rl rollout` wrote."""

    train: DataSources = Field(
        description="Rows to train on, as in the configuration of `train`: conversations (`messages`, and `tools`), "
        "for dpo preferences (`prompt`, `chosen`, `rejected`), or trajectories that `jax-agent-rl rollout` wrote."
    )
    eval: DataSources | None = Field(default=None, description="Rows to compute the loss on, never trained on.")
    max_length: Positive | None = Field(
        default=None, description="Leave out sequences of more tokens; null: one of more than a packed row is an error."
    )
    min_reward: float | None = Field(default=None, description="Leave out trajectories with a lower reward.")


class SftDataConfig(ConversationsConfig):
    """Rows of `sft`."""

    train_on: Annotated[tuple[Role, ...], Distinct] = Field(
        default=("assistant",),
        min_length=1,
        description="Roles whose messages carry loss; of trajectories, what the policy sampled does. An assistant "
        "message with `weight` 0 carries none.",
    )
    best_of: Positive | None = Field(
        default=None,
        description="Rejection sampling: of each group of trajectories keep this many with the highest rewards; "
        "null: all.",
    )


class TemplateConfig(Section):
    """How conversations become ids, with the keys of the configuration of `train`."""

    tool_format: ToolFormatName = Field(default="auto", description="See `train`: how tool calls are written.")
    tool_prompt: Literal["template", "none"] = Field(
        default="template", description="template: the prompt describes the row's tools. none: it does not."
    )


class EpochsConfig(Section):
    """The training loop."""

    epochs: Positive = Field(default=1, description="Passes over the rows, each in another order.")
    steps: Positive | None = Field(
        default=None, description="Stop after this many steps, unless `epochs` end before; null: no limit."
    )
    batch_size: Positive = Field(default=32, description="Conversations, or pairs of them, per optimizer update.")
    eval_every: Annotated[NonNegative, WhenKey("data.eval")] = Field(
        default=0, description="Steps between evaluations; 0: before and after training only."
    )
    checkpoint_every: NonNegative = Field(default=0, description="Steps between checkpoints; 0: at the end only.")
    keep_checkpoints: Positive = Field(default=2, description="Number of checkpoints to keep, the newest ones.")


class SftConfig(Section):
    """Supervised fine-tuning: the mean cross-entropy of a batch's tokens."""

    seed: NonNegative = Field(default=0, description="Seed of the order of rows.")
    run_dir: str = Field(description="Run folder: config, metrics, checkpoints.")
    model: ModelPathConfig
    data: SftDataConfig
    agent: TemplateConfig = Field(default_factory=TemplateConfig)
    learner: RowsConfig = Field(default_factory=RowsConfig)
    trainer: EpochsConfig = Field(default_factory=EpochsConfig)

    @model_validator(mode="after")
    def _used(self) -> SftConfig:
        found = [*unused(self), *self.learner.problems("learner")]
        if weighted := [source.path for source in (*self.data.train, *(self.data.eval or ())) if source.weight]:
            found.append(f"data gives a weight to {weighted}, but every row is used once per epoch; remove it")
        if found:
            raise ValueError("\n".join(found))
        return self


class PreferenceConfig(Section):
    """The preference loss: Rafailov et al. 2023, arXiv 2305.18290."""

    beta: float = Field(default=0.1, gt=0, description="Weight of staying close to the initial model.")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Probability that a preference is the wrong way round."
    )


class DpoConfig(SftConfig):
    """Direct preference optimization: the mean loss of a batch's pairs."""

    data: ConversationsConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # pairs have no roles to choose
    dpo: PreferenceConfig = Field(default_factory=PreferenceConfig)
