"""The keys of ``trainer`` that say where metrics go. Part of :mod:`jax_agent_rl.config`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from jax_agent_rl.config.base import Section
from jax_agent_rl.config.conditions import WhenKey


class LoggerSection(Section):
    """Besides the screen and ``metrics.jsonl``."""

    logger: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
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

    @field_validator("logger", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        """A single name works; verl's `console` needs no name here."""
        names = (value,) if isinstance(value, str) else value
        if isinstance(names, (list, tuple)) and "console" in names:
            raise ValueError("the console is always written to; leave 'console' out")
        return names

    @field_validator("logger")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("names one twice")
        return value
