"""Which trajectories a person wants to see. The page of ``jax-agent-rl report`` has the same filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.reasons import FinishReason, StopReason

Split = Literal["train", "heldout"]
Sort = Literal["time", "best", "worst"]
Colour = Literal["mask", "logprob", "advantage", "version", "gap"]
"""What the colour of sampled tokens says, see :data:`jax_agent_rl.observe.trajectories.COLOURS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryFilter:
    """Everything that is not None must hold.

    Attributes:
        split: ``train`` or ``heldout``.
        step: training step.
        min_step, max_step: bounds of the step, inclusive.
        min_reward, max_reward: bounds of the reward, inclusive.
        tool_error: kind of an error that a tool call had (``malformed``, ``timeout``, …); ``any``: any kind;
            ``none``: no call had one.
        finish_reason: why the trajectory ended.
        stop_reason: why one of its generations ended.
        text: stands in the trajectory's id, or in its response; case is no matter.

    Raises:
        ConfigError: a name that there is not.
    """

    split: str | None = None
    step: int | None = None
    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    tool_error: str | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        known = {"split": get_args(Split), "finish_reason": tuple(FinishReason), "stop_reason": tuple(StopReason)}
        for name, values in known.items():
            if (given := getattr(self, name)) is not None and given not in values:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {given!r}: choose one of {', '.join(values)}")

    def __call__(self, record: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> bool:
        """Whether a record of ``trajectories.jsonl`` is wanted; ``decode`` makes text of ids."""
        return (
            self.split in (None, record["split"])
            and self.step in (None, record["step"])
            and _within(self.min_step, record["step"], self.max_step)
            and _within(self.min_reward, record["reward"], self.max_reward)
            and self.finish_reason in (None, record["finish_reason"])
            and (self.stop_reason is None or self.stop_reason in stop_reasons(record))
            and self._tool_error_fits(tool_errors(record))
            and (self.text is None or self._text_stands_in(record, decode))
        )

    def _text_stands_in(self, record: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> bool:
        sought = (self.text or "").lower()
        return sought in record["trajectory_id"].lower() or sought in decode(record["response_ids"]).lower()

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

    def require_tool_error_among(self, kinds: Iterable[str]) -> None:
        """Checks that there are errors of the kind asked for.

        Raises:
            ConfigError: there are none; says which kinds there are.
        """
        known = ("any", "none", *sorted(set(kinds)))
        if self.tool_error is not None and self.tool_error not in known:
            raise ConfigError(f"--tool-error {self.tool_error!r}: no call of the run had it; choose {', '.join(known)}")

    def describe(self) -> str:
        """What is asked for, for a message."""
        given = ((name, getattr(self, name)) for name in self.__slots__)
        return ", ".join(f"{name}={value}" for name, value in given if value is not None) or "no filter"


def _within(least: float | None, value: float, most: float | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def tool_errors(record: Mapping[str, Any]) -> list[str]:
    """Kinds of the errors of a record's tool calls, in order."""
    return [call["error"] for turn in record["turns"] for call in turn["tool_calls"] if call["error"]]


def stop_reasons(record: Mapping[str, Any]) -> list[str]:
    """Why its generations ended, each reason once."""
    return list(dict.fromkeys(turn["stop_reason"] for turn in record["turns"]))
