"""The base class and the value types of all configuration sections, and the keys of both optimizers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import core_schema

from jax_agent_rl.utils.plugins import InstalledName, Kind, installed
from jax_agent_rl.utils.text import did_you_mean

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
_Items = TypeVar("_Items", bound=tuple[Any, ...])


def _distinct(value: _Items) -> _Items:
    if len(set(value)) < len(value):
        raise ValueError(f"names an item twice: {list(value)}; name each once")
    return value


Distinct = AfterValidator(_distinct)
"""Annotates a tuple that must not repeat an item."""


class OrInstalled:
    """Annotates a choice (a ``Literal``) to which installed packages may add names.

    Args:
        kind: of what they register.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind
        self._own: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        self._own = get_args(source)
        return core_schema.no_info_after_validator_function(self._check, core_schema.str_schema(strict=True))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", "enum": list(self._own)}, {"type": "string", "format": INSTALLED_FORMAT}]}

    def _check(self, value: str) -> str:
        if value in self._own:
            return value
        if value in (known := installed(self._kind)):
            return InstalledName(value)
        names = [*self._own, *sorted(known)]
        *others, last = map(repr, names)
        raise ValueError(
            f"no such name; {did_you_mean(value, names)}choose {', '.join(others)} or {last} (installed packages may "
            f"register more, in the entry-point group jax_agent_rl.{self._kind})"
        )


INSTALLED_FORMAT = "installed-name"
"""JSON Schema's ``format`` of a name that an installed package registers."""


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
    """An optimizer of optax, for the policy (``learner``) and the critic."""

    optimizer: Literal["adamw", "muon", "adafactor"] = Field(
        default="adamw",
        description="adamw; muon: orthogonalized momentum for the matrices of layers, at AdamW's scale of updates, and "
        "AdamW for the rest; adafactor: second moments of rows and columns only.",
    )
    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate.")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="constant",
        description="Learning rate after the warm-up: constant, a linear or cosine decay over the remaining "
        "trainer.steps, or wsd: constant, then linear. It changes between training steps only; all updates of a step "
        "use the same rate.",
    )
    lr_warmup_steps: NonNegative = Field(
        default=0, description="Training steps of linear warm-up; the first step has 1/lr_warmup_steps of the peak."
    )
    lr_decay_ratio: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="wsd: share of all training steps, the last ones, in which the rate decays.",
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="linear, cosine, wsd: final share of the peak learning rate."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay, times the learning rate.")
    no_weight_decay: tuple[str, ...] = Field(
        default=("norm",),
        description="Regular expressions: parameters whose path (embed, layers.q, layers.input_norm) has a match are "
        "not decayed.",
    )
    adam_b1: float = Field(default=0.9, ge=0, lt=1, description="AdamW first-moment decay.")
    adam_b2: float = Field(default=0.95, ge=0, lt=1, description="AdamW second-moment decay.")
    adam_eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon, added to the root of the second moment.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Global gradient-norm clip.")

    @field_validator("no_weight_decay")
    @classmethod
    def _are_expressions(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns

    @property
    def averaging(self) -> float:
        """Decay of a moving average of the parameters; 0: none is kept."""
        return 0.0

    def problems(self, name: str) -> Iterator[str]:
        """Yield the keys of the section ``name`` that are set although its optimizer or schedule does not read them."""
        kind = self.lr_scheduler_type
        if kind == "constant" and self.changed("min_lr_ratio"):
            yield (
                f"{name}.min_lr_ratio is read only with {name}.lr_scheduler_type linear, cosine or wsd, which is "
                f"{kind!r}; remove it or change that"
            )
        if kind != "wsd" and self.changed("lr_decay_ratio"):
            yield f"{name}.lr_decay_ratio is read only with {name}.lr_scheduler_type=wsd, which is {kind!r}; remove it"
        if not self.weight_decay and self.changed("no_weight_decay"):
            yield f"{name}.no_weight_decay is read only with {name}.weight_decay > 0; set that, or remove it"
        if self.optimizer == "adafactor":
            for key in filter(self.changed, ("adam_b1", "adam_b2", "adam_eps")):
                yield f"{name}.{key} is not read by {name}.optimizer=adafactor; remove it"
