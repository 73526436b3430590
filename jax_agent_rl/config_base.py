"""What the sections of the configuration are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

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

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    warmup_steps: NonNegative = Field(0, description="Steps of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    adam_b1: float = Field(0.9, ge=0, lt=1, description="AdamW first-moment decay.")
    adam_b2: float = Field(0.95, ge=0, lt=1, description="AdamW second-moment decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient-norm clip.")
