"""What the sections of the configuration are made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A frozen mapping of known keys; an unknown one is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def changed(self, key: str) -> bool:
        """Whether a key has another value than its default."""
        return getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True)


class OptimizerSection(Section):
    """AdamW, for the policy (``learner``) and the critic."""

    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate of AdamW.")
    warmup_steps: NonNegative = Field(default=0, description="Steps of linear warm-up.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay.")
    adam_b1: float = Field(default=0.9, ge=0, lt=1, description="AdamW first-moment decay.")
    adam_b2: float = Field(default=0.95, ge=0, lt=1, description="AdamW second-moment decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Global gradient-norm clip.")


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    """Low-rank adapters in place of full training; see PEFT's ``LoraConfig`` for the fields' meaning."""

    rank: Positive = Field(default=16, description="r: inner size of the adapters.")
    alpha: float = Field(default=32.0, gt=0, description="Adapters are scaled by alpha / rank.")
    targets: tuple[LoraTarget, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="Linear layers that get adapters, by their Hugging Face names.",
    )
    quantize: Literal["none", "int8", "nf4"] = Field(
        default="none", description="How the targets' frozen weights are kept (QLoRA); needs the extra `qlora`."
    )
    seed: NonNegative = Field(default=0, description="Draws the adapters' first values.")

    @field_validator("targets")
    @classmethod
    def _each_once(cls, value: tuple[LoraTarget, ...]) -> tuple[LoraTarget, ...]:
        if len(set(value)) != len(value):
            raise ValueError(f"names a layer twice: {list(value)}")
        return value
