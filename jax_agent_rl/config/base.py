"""The base class and the value types of all configuration sections, and the keys of both optimizers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
_Items = TypeVar("_Items", bound=tuple[Any, ...])


def _distinct(value: _Items) -> _Items:
    if len(set(value)) < len(value):
        raise ValueError(f"names an item twice: {list(value)}; name each once")
    return value


Distinct = AfterValidator(_distinct)
"""Annotates a tuple that must not repeat an item."""


class Section(BaseModel):
    """A frozen mapping of known keys; an unknown one is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse booleans where a number is expected: pydantic, like Python, takes them for 1 and 0."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if _holds_bool(value) and _mentions(annotation, (int, float)) and not _mentions(annotation, (bool, Any)):
            raise ValueError("true and false are no numbers; give a number")
        return value

    def changed(self, key: str) -> bool:
        """Return whether a key differs from its default."""
        return getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True)


def _holds_bool(value: Any) -> bool:
    return isinstance(value, bool) or isinstance(value, (list, tuple)) and any(map(_holds_bool, value))


def _mentions(annotation: Any, types: tuple[Any, ...]) -> bool:
    return annotation in types or any(_mentions(part, types) for part in get_args(annotation))


class OptimizerSection(Section):
    """AdamW, for the policy (``learner``) and the critic."""

    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate of AdamW.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Learning rate after the warm-up: constant, or a decay over the remaining trainer.steps. It "
        "changes between training steps only; all updates of a step use the same rate.",
    )
    lr_warmup_steps: NonNegative = Field(
        default=0, description="Training steps of linear warm-up; the first step has 1/lr_warmup_steps of the peak."
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="linear, cosine: final share of the peak learning rate."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay.")
    adam_b1: float = Field(default=0.9, ge=0, lt=1, description="AdamW first-moment decay.")
    adam_b2: float = Field(default=0.95, ge=0, lt=1, description="AdamW second-moment decay.")
    adam_eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon, added to the root of the second moment.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Global gradient-norm clip.")
