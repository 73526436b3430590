"""Which trajectories a person wants to see. The page of ``jax-agent-rl report`` has the same filters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.reasons import FinishReason, StopReason

SPLITS = ("train", "heldout")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryFilter:
    """Everything that is not None must hold.

    Attributes:
        split: ``train`` or ``heldout``.
        step: training step.
        min_reward, max_reward: bounds of the reward, inclusive.
        tool_error: kind of an error that a tool call had (``malformed``, ``timeout``, …); ``any``: any kind;
            ``none``: no call had one.
        finish_reason: why the trajectory ended.
        stop_reason: why one of its generations ended.

    Raises:
        ConfigError: a name that there is not.
    """

    split: str | None = None
    step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    tool_error: str | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None

    def __post_init__(self) -> None:
        known = {"split": SPLITS, "finish_reason": tuple(FinishReason), "stop_reason": tuple(StopReason)}
        for name, values in known.items():
            if (given := getattr(self, name)) is not None and given not in values:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {given!r}: choose one of {', '.join(values)}")

    def __call__(self, record: Mapping[str, Any]) -> bool:
        """Whether a record of ``trajectories.jsonl`` is wanted."""
        return (
            self.split in (None, record["split"])
            and self.step in (None, record["step"])
            and (self.min_reward is None or record["reward"] >= self.min_reward)
            and (self.max_reward is None or record["reward"] <= self.max_reward)
            and self.finish_reason in (None, record["finish_reason"])
            and (self.stop_reason is None or self.stop_reason in stop_reasons(record))
            and self._tool_error_fits(tool_errors(record))
        )

    def _tool_error_fits(self, errors: list[str]) -> bool:
        match self.tool_error:
            case None:
                return True
            case "none":
                return not errors
            case "any":
                return bool(errors)
            case kind:
                return kind in errors

    def describe(self) -> str:
        """What is asked for, for a message."""
        given = ((name, getattr(self, name)) for name in self.__slots__)
        return ", ".join(f"{name}={value}" for name, value in given if value is not None) or "no filter"


def tool_errors(record: Mapping[str, Any]) -> list[str]:
    """Kinds of the errors of a record's tool calls, in order."""
    return [call["error"] for turn in record["turns"] for call in turn["tool_calls"] if call["error"]]


def stop_reasons(record: Mapping[str, Any]) -> list[str]:
    """Why its generations ended, each reason once."""
    return list(dict.fromkeys(turn["stop_reason"] for turn in record["turns"]))
